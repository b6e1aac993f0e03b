"""Parts that the environment switches on, without a change of the program: ``DIST2_CONTROL_PLANE``.

They start with the first group of the process, in the thread that makes it: that group names the rank, and
the ranks find each other through its store. What cannot be started is logged; it never breaks the group.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dist2.errors import Dist2Error
from dist2.runtime.config import Config
from observability.flight_recorder import global_rank, instrument

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup
    from dist2.operation.signature import GroupInfo
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
            log.warning("DIST2_CONTROL_PLANE=%s: no control plane is started: %s", self._where, error)

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


_automatic: AutomaticStart | None = None


def from_settings(config: Config) -> None:
    """Apply the settings of the environment; called once, when the default instruments are loaded."""
    global _automatic
    if config.control_plane is not None:
        _automatic = AutomaticStart(config.control_plane)
        instrument.on_opened.append(_automatic.opened)


def give_way() -> None:
    """Close a control plane that was started by the environment: the program starts one itself."""
    if _automatic is not None:
        _automatic.give_way()
