"""A program that is interrupted at all critical points, and prints the outcomes as JSON.

It knows the public names of dist2 alone, so that it can run with a copy whose modules have other names.
Its argument is a folder for the store. This process is rank 0, a child that it forks is rank 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dist2
from dist2 import FileStore, InvalidUsageError, ProcessGroup, legacy

LATE_S = 0.3
EARLY_S = 0.1
LIMIT_S = 10.0

Call = Callable[[ProcessGroup], object]

WAITS: dict[str, Call] = {
    "all_reduce": lambda pg: pg.all_reduce(torch.ones(2)),
    "async": lambda pg: pg.all_reduce(torch.ones(2), async_op=True).wait(),
    "recv": lambda pg: pg.recv(torch.ones(2), 1 - pg.rank()),
    "store": lambda pg: pg.get_group_store().get("never"),
}
"""Calls in which rank 0 waits for rank 1."""

OPERATIONS: dict[str, Call] = {
    "in_python": lambda pg: pg.all_reduce(torch.ones(3), timeout=20.0),
    "from_python_to_c": lambda pg: pg.all_reduce(torch.ones(3), timeout=20.0),  # the plan is known now
    "message": lambda pg: pg.isend(torch.ones(3), pg.rank()),
}
"""Calls that call instruments while they run."""


class Instrument:
    """Acts during the next operation, and records the callers that close groups."""

    def __init__(self) -> None:
        self.next: Callable[[], object] | None = None
        self.closed_by: dict[str, str] = {}

    def group_opened(self, group: Any) -> None: ...

    def group_closed(self, group: Any) -> None:
        self.closed_by[group.group_name] = threading.current_thread().name

    def operation_started(self, operation: Any) -> None:
        call, self.next = self.next, None
        if call is not None:
            call()

    def operation_finished(self, operation: Any) -> None: ...


def child(pg: ProcessGroup, name: str) -> ProcessGroup:
    """Return a group of both ranks for one case."""
    made = pg.split([0, 1], name=name)
    assert made is not None
    return made


def is_deferred(frame: FrameType | None) -> bool:
    """Whether Ctrl-C is put off where a frame is; if so it is raised when that is over."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler) and handler is not signal.default_int_handler
    try:
        handler(signal.SIGINT, frame)
    except KeyboardInterrupt:
        return False
    return True


def wait(pg: ProcessGroup, name: str) -> bool | None:
    """Press Ctrl-C while a call waits; return whether it was deferred. Rank 1 arrives late."""
    group = child(pg, name)
    group.barrier()
    found: bool | None = None

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal found
        found = is_deferred(frame)
        if not found:
            raise KeyboardInterrupt

    if pg.rank() == 0:
        signal.signal(signal.SIGALRM, press)
        signal.setitimer(signal.ITIMER_REAL, EARLY_S)
        with suppress(KeyboardInterrupt):
            WAITS[name](group)
    else:
        time.sleep(LATE_S)
    group.abort()
    pg.barrier()
    return found


def run(pg: ProcessGroup, instrument: Instrument, call: Call) -> bool:
    """Press Ctrl-C during a call; return whether it was deferred until the end of the call."""
    found: list[bool] = []

    def press() -> None:
        found.append(is_deferred(sys._getframe()))

    instrument.next = press
    try:
        call(pg)
        time.sleep(LIMIT_S)
    except KeyboardInterrupt:
        pass
    return found == [True]


def closed(pg: ProcessGroup, instrument: Instrument) -> dict[str, str]:
    """Close groups between operations and during one; return the threads that did so."""
    store = dist2.HashStore()
    names = [f"closed{index}" for index in range(4)]
    groups = [dist2.new_group("fake", store=store, rank=0, world_size=1, name=name) for name in names]
    groups[0].abort()
    groups[1].shutdown()
    for group, end in zip(groups[2:], ("abort", "shutdown"), strict=True):
        instrument.next = getattr(group, end)
        pg.all_reduce(torch.ones(1), timeout=20.0)  # by the method in Python
    for thread in threading.enumerate():
        if thread.name.startswith("dist2-abort"):
            thread.join(LIMIT_S)
    return {name: by for name, by in instrument.closed_by.items() if name.startswith("closed")}


def refused(pg: ProcessGroup, instrument: Instrument) -> str:
    """Wait for an operation during another one of the same group, as a handler might."""
    told: list[str] = []

    def call() -> None:
        try:
            pg.barrier()
        except InvalidUsageError as error:
            told.append(str(error))

    instrument.next = call
    pg.all_reduce(torch.ones(1), async_op=False)
    return "refused" if told and "cannot be waited for here" in told[0] else "not refused"


def lines(pg: ProcessGroup) -> list[bool]:
    """Whether operations name the line that called: by methods in Python and in C, and the global API."""
    calls: list[Callable[[], Any]] = [lambda: pg.broadcast(torch.ones(2), 0)] * 2
    calls.append(lambda: legacy.broadcast(torch.ones(2), 0, async_op=True))
    with dist2.process_group(pg):
        works = [call() for call in calls]
    return [f" at {__file__}:" in work.operation.describe() for work in works]


def forked(pg: ProcessGroup) -> str:
    """Use the group in a forked process; return its error."""
    readable, writable = os.pipe()
    if os.fork() == 0:
        try:
            pg.all_reduce(torch.ones(1))
        except BaseException as error:  # noqa: BLE001 - reported by the parent
            os.write(writable, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writable)
    told = os.read(readable, 10_000).decode()
    os.close(readable)
    os.wait()
    return "forbidden" if "GroupAbortedError" in told and "belongs to the parent process" in told else told


def main(folder: Path) -> None:
    """Be rank 0, and rank 1 in a child; print the findings. Leaves a group open."""
    rank = 0 if os.fork() else 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pg = dist2.new_group(
        "socket", LIMIT_S, store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    found: dict[str, Any] = {f"wait: {name}": wait(pg, name) for name in WAITS}
    pg.shutdown()
    if rank == 1:
        os._exit(0)
    os.wait()
    instrument = Instrument()
    dist2.add_instrument(instrument)
    alone = dist2.new_group("socket", LIMIT_S, store=dist2.HashStore(), rank=0, world_size=1, name="alone")
    found |= {f"run: {name}": run(alone, instrument, call) for name, call in OPERATIONS.items()}
    found["closed"] = closed(alone, instrument)
    found["refused"] = refused(alone, instrument)
    found["lines"] = lines(alone)
    found["forked"] = forked(alone)
    print(json.dumps(found), sys.modules[type(pg).__module__].__file__, sep="\n", flush=True)
    instrument.group_closed = lambda group: print(threading.current_thread().name)  # type: ignore[method-assign]  # of the end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
