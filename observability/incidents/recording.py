"""Writes incidents: of failed operations, of uncaught exceptions, and of hangs that are confirmed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from dist2.errors import Dist2Error, GroupAbortedError
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.exit_report import blamed, note_incident
from observability.flight_recorder import global_rank
from observability.incidents import folders

if TYPE_CHECKING:
    from observability.job.directory import Entry

log = logging.getLogger("dist2.incidents")


@attrs.define
class Recording:
    """The incidents of this process.

    Attributes:
        root: Where incidents are written.
        first: The group that was opened first: its id names the job, as it is equal on all ranks.
        making: The same while the process makes its first group; None before.
        latest: The latest incident of this process.
        is_mine: Whether this process has made that folder: then it tells the path.
        failed: Ids of the groups whose failure was written: later ones are consequences.
        known: The control planes of the job that this process knows, by rank.
        is_over: Whether the ranks are being ended after a wait: what fails from then on is a consequence.
    """

    root: Path
    first: GroupInfo | None = None
    making: GroupInfo | None = None
    latest: Path | None = None
    is_mine: bool = False
    failed: set[tuple[str, int]] = attrs.field(factory=set)
    known: Mapping[int, Entry] = attrs.field(factory=dict)
    is_over: bool = False

    def opened(self, info: GroupInfo) -> None:
        """Take note of a group."""
        if self.first is None:
            self.first = info

    def broken(self, operation: Operation) -> None:
        """Write the part of the rank whose operation has failed."""
        info = operation.signature.group
        key = info.uid, info.rank
        if key in self.failed or isinstance(
            operation.error, GroupAbortedError
        ):  # by this process: on purpose
            return
        self.failed.add(key)
        self.write("failure", info, f"{operation.describe()} failed", operation.error)

    def raised(self, error: BaseException | None) -> None:
        """Write the part of this rank, which an uncaught exception ends."""
        on_purpose = (SystemExit, KeyboardInterrupt, GroupAbortedError)
        job = self.first or self.making
        if job is None or error is None or isinstance(error, on_purpose):
            return
        if self.failed and isinstance(error, Dist2Error):  # of an operation, which has written it
            return
        self.write("failure", job, f"{type(error).__name__} ends the process", error)

    def write(self, kind: str, info: GroupInfo, why: str, error: BaseException | None = None) -> Path | None:
        """Write the part of a rank; return the folder, or None if that is impossible."""
        if self.is_over:
            return self.latest
        try:
            from observability.incidents.evidence import write_part

            job = self.first or info
            folder = folders.joined(self.root, job.uid, job.name)
            write_part(folder.path, kind, info, why, error, looks=folder.is_new)
        except OSError as refused:  # such as a lack of descriptors, which may be the failure itself
            # Ranks that fail together would all say the same.
            alone = global_rank(info) == 0 or not blamed(error)
            level = logging.WARNING if alone else logging.INFO
            log.log(level, "rank %d: %s", global_rank(info), folders.unwritable(self.root, refused))
            return None
        except Exception:  # the failure itself must reach the program
            log.warning("the incident of rank %d cannot be written", global_rank(info), exc_info=True)
            return None
        self.note(folder)
        return folder.path

    def note(self, folder: folders.Folder) -> None:
        """Remember an incident, and note its URLs; the process that has made its folder tells the path."""
        self.joined(folder.path)
        self.note_places(folder.path)
        if folder.is_new:
            self.made(folder.path)
            log.warning("incident: %s", folder.path, extra={"path": str(folder.path)})

    def note_places(self, path: Path) -> None:
        """Note the control planes that this process knows: commands find the incident by each of them."""
        with suppress(OSError):  # the evidence is there without
            known = list(self.known.values())
            folders.add_places(path, ((each.process.host, each.url) for each in known))

    def joined(self, path: Path) -> None:
        """Remember an incident that this rank has a part in."""
        self.latest = path
        note_incident(str(path))

    def made(self, path: Path) -> None:
        """Remember an incident whose folder this process has made: then it tells the path at its end."""
        self.joined(path)
        self.is_mine = True

    def forget(self) -> None:
        """Forget the latest incident: it was none."""
        self.latest, self.is_mine = None, False
        note_incident("")

    def last_words(self, error: BaseException | None) -> None:
        """Tell the path again as the last line of a process that an error ends."""
        if error is not None and self.is_mine and sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(f"dist2: incident: {self.latest}, read it with: dist2 why {self.latest}\n")
                sys.stderr.flush()
