"""Parts without a line in the program: incidents, the operation log, the control plane of the environment.

They start with the first group of the process, in the thread that makes it: that group names the rank, and
the ranks find each other through its store. A part that cannot be started is logged; it never breaks the
group. ``DIST2_ON_HANG`` needs a control plane, and starts one.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from dist2.errors import Dist2Error
from dist2.operation.instruments import add_instrument
from dist2.rendezvous.liveness import on_building
from dist2.runtime.config import LOOPBACK, Config
from dist2.runtime.process import AtExit, at_exit, raised
from observability.flight_recorder import global_rank, instrument
from observability.incidents.folders import passing, root_of
from observability.incidents.recording import Recording
from observability.incidents.waits import Waits

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup
    from dist2.operation.signature import GroupInfo
    from observability.operation_log import OperationLog
    from observability.server import Server

log = logging.getLogger("dist2.control_plane")


class AutomaticStart:
    """Starts the control plane of this process with its first group.

    Args:
        where: An address to listen on, or a folder for Unix sockets.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        # The first group of each process: a forked child has its own. A lock might be held during the fork.
        self._firsts: dict[int, GroupInfo] = {}
        self._server: Server | None = None

    def opened(self, group: ProcessGroup) -> None:
        """Take note of a group: the first one of a process starts the control plane."""
        if self._firsts.setdefault(os.getpid(), group.info) is not group.info:
            return
        from observability.server import running

        if running():  # the program has started one
            return
        try:
            self._server = self._started(group)
        except (Dist2Error, OSError, RuntimeError) as error:
            # A thousand ranks that cannot listen there would say the same.
            level = logging.WARNING if global_rank(group.info) == 0 else logging.INFO
            log.log(level, "DIST2_CONTROL_PLANE=%s: no control plane is started: %s", self._where, error)

    def give_way(self) -> None:
        """Close the control plane: the program starts one itself."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _started(self, group: ProcessGroup) -> Server:
        from observability.server import start

        if "/" not in self._where:
            return start(group, self._where)
        folder, rank = Path(self._where), global_rank(group.info)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return start(group, unix_socket=folder / f"rank-{rank}-{os.getpid()}.sock", announce=False)


@attrs.define
class _Parts:
    """The parts of this process."""

    control_plane: AutomaticStart | None = None
    recording: Recording | None = None
    operation_log: OperationLog | None = None
    on_hang: str = "observe"


_parts = _Parts()


def from_settings(config: Config) -> None:
    """Apply the settings of the environment; called once, when the default instruments are loaded."""
    root = root_of(config)
    recording = Recording(passing()[0] if root is None else root)
    if root is not None:
        _parts.recording = recording
        instrument.on_broken.append(recording.broken)
    if root is not None or config.on_hang != "observe":
        instrument.on_opened.append(lambda group: recording.opened(group.info))
        waits = Waits(recording, config.waiting_s, config.on_hang, keeps=root is not None)
        on_building.append(waits.begin)
    if config.operation_log is not None:
        _parts.operation_log = _logging(Path(config.operation_log), config.operation_log_bytes)
    _parts.on_hang = config.on_hang
    where = config.control_plane or (LOOPBACK if config.on_hang != "observe" else None)
    if where is not None:
        _parts.control_plane = AutomaticStart(where)
        instrument.on_opened.append(_parts.control_plane.opened)


def _logging(folder: Path, most_bytes: int) -> OperationLog | None:
    """Return a log of operations that has begun; None if its folder cannot be made."""
    from observability.operation_log import OperationLog

    try:
        log_of_all = OperationLog(folder, most_bytes)
    except OSError as error:
        log.warning("DIST2_OPERATION_LOG=%s: no operations are logged: %s", folder, error)
        return None
    add_instrument(log_of_all)
    return log_of_all


def recording() -> Recording | None:
    """Return the incidents of this process; None where they are switched off."""
    return _parts.recording


def on_hang() -> str:
    """Return the policy for a job that waits."""
    return _parts.on_hang


def give_way() -> None:
    """Close a control plane that was started by the environment: the program starts one itself."""
    if _parts.control_plane is not None:
        _parts.control_plane.give_way()


@at_exit(AtExit.EVIDENCE)
def _exiting() -> None:
    if _parts.operation_log is not None:
        _parts.operation_log.flush()  # children of multiprocessing may run no later step
    if _parts.recording is not None:
        _parts.recording.raised(raised())


@at_exit(AtExit.LAST_WORDS)
def _last_words() -> None:
    if _parts.operation_log is not None:
        _parts.operation_log.close()
    if _parts.recording is not None:
        _parts.recording.last_words(raised())
