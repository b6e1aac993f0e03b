"""`Stage`: the means of a role of a cell: the store, the group, and ways to wait for the others."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
from support import nccl_stubs
from support.host_device import HostDevice

import dist2
from dist2 import Dist2Error, ProcessGroup
from dist2.group.open_groups import open_groups
from drill.crew import Note

EVENT_S = 15.0
"""Nothing that a cell waits for takes longer, on a slow machine either: a root over TCP only notices that
ranks gave up when it has used up its credit, after about 20,000 short broadcasts."""


@attrs.frozen(eq=False)
class Stage:
    """The environment of one role of a cell.

    Attributes:
        role: Its number, equal to its rank in the first group, if it is a member.
        transport: Option of the groups; ``nccl`` for those of NCCL on host memory.
        timeout_s: Limit of the groups' operations.
        path: The file of the store.
        note: Reports steps.
        store: Shared by all roles.
        devices: The memory used in place of a GPU's, if any.
    """

    role: int
    transport: str
    timeout_s: float
    path: Path
    note: Note
    store: dist2.FileStore
    devices: list[HostDevice] = attrs.field(factory=list)

    def group(self, world_size: int, algorithm: str | None = None) -> ProcessGroup:
        """Return the first group, of the roles from 0 on, once all of them are in it."""
        self._write(f"pid/{self.role}", str(os.getpid()))
        backend, options = self.backend()
        if algorithm is not None:
            options["algorithm"] = algorithm
        pg = dist2.new_group(
            backend, EVENT_S, store=self.store, rank=self.role, world_size=world_size, **options
        )
        pg.set_timeout(self.timeout_s)
        pg.barrier(EVENT_S)
        return pg

    def alone(self) -> ProcessGroup:
        """Return a group of this process only, to be merged."""
        backend, options = self.backend()
        return dist2.new_group(backend, EVENT_S, store=dist2.HashStore(), rank=0, world_size=1, **options)

    def backend(self) -> tuple[str, dict[str, Any]]:
        """Return the backend of the groups, and its options."""
        if self.transport != "nccl":
            return "socket", {"transport": self.transport}
        if not self.devices:
            self.devices.append(HostDevice())
        return "nccl", {"transport": "tcp", "platform": lambda: (self.devices[0], nccl_stubs.library())}

    def pid(self, role: int) -> int:
        """Return the process of another role."""
        return int(self._place(f"pid/{role}").read_text())

    def tell(self, event: str) -> None:
        """Say that something has happened, and when."""
        self._write(event, repr(time.monotonic()))

    def hear(self, *events: str) -> float:
        """Wait until all of these have happened; return when the last did, on the common clock."""
        places = [self._place(event) for event in events]
        self.until(lambda: all(place.exists() for place in places))
        return max(float(place.read_text()) for place in places)

    def _place(self, event: str) -> Path:
        """Return the file of an event: not in the store, whose lock a process that is stopped may hold."""
        return self.path.with_name(f"{self.path.name}.{event.replace('/', '.')}")

    def _write(self, event: str, text: str) -> None:
        unfinished = self.path.with_name(f"{self.path.name}.unfinished.{os.getpid()}.{threading.get_ident()}")
        unfinished.write_text(text)
        unfinished.rename(self._place(event))

    def see_end(self, role: int) -> None:
        """Wait until another role's process has ended."""
        try:
            descriptor = os.pidfd_open(self.pid(role))
        except ProcessLookupError:
            return
        try:
            ready, _, _ = select.select([descriptor], [], [], EVENT_S)
            assert ready, f"role {role} has not ended within {EVENT_S} s"
        finally:
            os.close(descriptor)

    def see_stop(self, role: int) -> None:
        """Wait until another role's process is stopped."""
        status = Path(f"/proc/{self.pid(role)}/stat")
        self.until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until a condition holds that no event announces."""
        deadline = time.monotonic() + EVENT_S
        while not happened():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)

    def first_error(self, call: Callable[[], object]) -> tuple[Dist2Error, float]:
        """Call again and again until it fails; return the error, and how long the last call took."""
        deadline = time.monotonic() + EVENT_S
        while True:
            start = time.monotonic()
            try:
                call()
            except Dist2Error as error:
                took_s = time.monotonic() - start
                self.note(f"after {took_s:.3f} s: {type(error).__name__}: {error}")
                return error, took_s
            assert time.monotonic() < deadline, "no error came"

    def leave(self) -> None:
        """Take down every group that is still open."""
        for group in open_groups():
            group.abort()
        for device in self.devices:
            device.close()


def others(role: int, world_size: int) -> Iterable[int]:
    """Return all roles but one."""
    return (other for other in range(world_size) if other != role)
