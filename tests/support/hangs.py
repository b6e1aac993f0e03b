"""Situations in which a job of three ranks hangs or fails, as tests inject them.

A situation defines the behaviour of each rank once the group and the control planes are there. The ranks do
not know that they are observed: tests ask from outside, as an operator does. As a program (``-m
support.hangs NAME``) this module is a rank of a launcher, and its end is that of its situation.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import attrs
import torch

import dist2
from dist2 import ProcessGroup
from observability.incidents.hang import EXIT_CODE
from observability.server import running

WORLD = 3

Part = Callable[[ProcessGroup, Path], None]


def idle() -> None:
    """Wait for nothing that comes."""
    threading.Event().wait(600)


def reduce_on(pg: ProcessGroup, times: int = 1) -> None:
    for _ in range(times):
        pg.all_reduce(torch.ones(4))


def others_reduce(culprit: Callable[[ProcessGroup, Path], None]) -> Part:
    """Return a situation: ranks 0 and 1 reduce, rank 2 does something else."""

    @wraps(culprit)  # whose name stands for it in another process
    def part(pg: ProcessGroup, folder: Path) -> None:
        if pg.rank() == 2:
            culprit(pg, folder)
        else:
            reduce_on(pg)

    return part


@others_reduce
def missing_call(pg: ProcessGroup, folder: Path) -> None:
    idle()  # it skipped the call, and goes on to something else


@others_reduce
def endless_loop(pg: ProcessGroup, folder: Path) -> None:
    while True:
        pass


@others_reduce
def sleeping(pg: ProcessGroup, folder: Path) -> None:
    time.sleep(600)


@others_reduce
def stopped(pg: ProcessGroup, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@others_reduce
def death(pg: ProcessGroup, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@others_reduce
def swallowed_exception(pg: ProcessGroup, folder: Path) -> None:
    try:
        raise ValueError("a bad batch")
    except ValueError:
        idle()  # "never let a batch stop the run"


@others_reduce
def different_branch(pg: ProcessGroup, folder: Path) -> None:
    pg.broadcast(torch.ones(4), root=0)


@others_reduce
def slow_disk(pg: ProcessGroup, folder: Path) -> None:
    os.mkfifo(folder / "batch")
    (folder / "batch").read_bytes()  # no process ever writes


@others_reduce
def gil_held_asleep(pg: ProcessGroup, folder: Path) -> None:
    ctypes.PyDLL(None).sleep(600)  # keeps the interpreter lock, as a careless extension does


@others_reduce
def gil_held_busy(pg: ProcessGroup, folder: Path) -> None:
    sum(range(10**15))


@others_reduce
def backtracking(pg: ProcessGroup, folder: Path) -> None:
    re.match("(a+)+$", "a" * 60 + "b")  # keeps the interpreter lock for hours


@others_reduce
def uninterruptible(pg: ProcessGroup, folder: Path) -> None:
    """Wait in vfork, in state D, for a child that opens a pipe which no process reads."""
    os.mkfifo(folder / "log")
    closed = [(os.POSIX_SPAWN_CLOSE, number) for number in (1, 2)]
    opened = (os.POSIX_SPAWN_OPEN, 1, str(folder / "log"), os.O_WRONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[*closed, opened])


def never_awaited(pg: ProcessGroup, folder: Path) -> None:
    """Ranks 0 and 1 have issued a collective and wait for no result of it; rank 2 has not."""
    if pg.rank() < 2:
        pg.all_reduce(torch.ones(4), async_op=True)
    time.sleep(600)


@others_reduce
def main_thread_ended(pg: ProcessGroup, folder: Path) -> None:
    threading.Thread(target=idle, daemon=False).start()
    raise SystemExit


def uneven_data(pg: ProcessGroup, folder: Path) -> None:
    reduce_on(pg, 3 if pg.rank() == 2 else 5)
    idle()


def two_culprits(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() == 0:
        reduce_on(pg)
    time.sleep(600)


def wrong_order(pg: ProcessGroup, folder: Path) -> None:
    second = pg.split([0, 1, 2], name="second")
    assert second is not None
    order = (second, pg) if pg.rank() == 1 else (pg, second)
    for each in order:
        reduce_on(each)


def crossing_sends(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() < 2:
        pg.send(torch.ones(1 << 24), 1 - pg.rank())
    idle()


def receive_without_send(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() == 0:
        pg.recv(torch.ones(4), 2)
    idle()


def wrong_tag(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() == 0:
        pg.recv(torch.ones(4), 2, tag=1)
    elif pg.rank() == 2:
        pg.send(torch.ones(4), 0, tag=7)
    idle()


def irecv_in_advance(pg: ProcessGroup, folder: Path) -> None:
    """Rank 2 has posted a receive from rank 0, and is busy with something else."""
    if pg.rank() == 2:
        pg.irecv(torch.ones(4), 0)
        time.sleep(600)
    reduce_on(pg)


def work_in_advance(pg: ProcessGroup, folder: Path) -> None:
    """Rank 2 has issued a collective of another group, which rank 0 does not reach."""
    second = pg.split([0, 2], name="second")
    if pg.rank() == 2:
        assert second is not None
        second.all_reduce(torch.ones(4), async_op=True)
        time.sleep(600)
    reduce_on(pg)


def irecv_awaited(pg: ProcessGroup, folder: Path) -> None:
    """A deadlock: rank 2 waits for a receive from rank 0, which waits for rank 2."""
    if pg.rank() == 2:
        pg.irecv(torch.ones(4), 0).wait()
    reduce_on(pg)


def one_message_too_few(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() == 1:
        for _ in range(7):
            pg.send(torch.ones(4), 2)
    elif pg.rank() == 2:
        for _ in range(8):
            pg.recv(torch.ones(4), 1)
    reduce_on(pg)


def one_receive_too_few(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() == 0:
        for _ in range(3):
            pg.send(torch.ones(1 << 22), 1)
    elif pg.rank() == 1:
        for _ in range(2):
            pg.recv(torch.ones(1 << 22), 0)
    reduce_on(pg)


@others_reduce
def loading(pg: ProcessGroup, folder: Path) -> None:
    os.mkfifo(folder / "checkpoint")
    torch.load(folder / "checkpoint")  # no process ever writes


@others_reduce
def control_plane_closed(pg: ProcessGroup, folder: Path) -> None:
    for server in running():
        server.close()
    idle()


def in_another_group(pg: ProcessGroup, folder: Path) -> None:
    evaluation = pg.split([0, 1, 2], name="evaluation")
    assert evaluation is not None
    reduce_on(evaluation if pg.rank() == 2 else pg)


def chain_of_groups(pg: ProcessGroup, folder: Path) -> None:
    first = pg.split([0, 1], name="first")
    second = pg.split([1, 2], name="second")
    if pg.rank() == 0 and first is not None:
        reduce_on(first)
    elif pg.rank() == 1 and second is not None:
        reduce_on(second)
    idle()


def store_gone(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() == 2:
        idle()
    reduce_on(pg)


def store_stopped(pg: ProcessGroup, folder: Path) -> None:
    store_gone(pg, folder)


def split_without_one(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() < 2:
        evaluation = pg.split([0, 1, 2], name="evaluation")
        assert evaluation is not None
        reduce_on(evaluation)
    idle()


def new_group_without_one(pg: ProcessGroup, folder: Path) -> None:
    if pg.rank() < 2:
        store = dist2.FileStore(str(folder / "second"), WORLD)
        dist2.new_group("socket", 60, store=store, rank=pg.rank(), world_size=WORLD)
    idle()


def late_start(pg: ProcessGroup, folder: Path) -> None:
    reduce_on(pg)


@attrs.frozen
class Situation:
    """A way to hang.

    Attributes:
        part: The behaviour of each rank.
        culprits: Ranks that are named.
        words: The verdict's text about them.
        asked: The rank that is queried.
        backend: The backend of the group.
        without: Words that the verdict must not have.
        code: The exit code of the launcher, with ``DIST2_ON_HANG=exit``.
    """

    part: Part
    culprits: tuple[int, ...]
    words: tuple[str, ...]
    asked: int = 0
    backend: str = "socket"
    without: str = "so this is no"
    code: int = EXIT_CODE

    def __str__(self) -> str:
        return f"{self.part.__name__}-{self.backend}"


BLAMED = "rank 2 (last seen: barrier #1 at "

MAIN = "its main thread "

SITUATIONS = (
    Situation(missing_call, (2,), (BLAMED, "is waited for by ranks 0, 1 in all_reduce #2", "in idle")),
    Situation(missing_call, (2,), (BLAMED, "in idle"), backend="gloo"),
    Situation(endless_loop, (2,), (BLAMED, "in endless_loop")),
    Situation(sleeping, (2,), (BLAMED, "in sleeping")),
    Situation(
        stopped,
        (2,),
        ("rank 2 is waited for by ranks 0, 1", "is stopped (by a signal): state T", "its main thread "),
    ),
    Situation(death, (2,), ("rank 2", "was killed by SIGKILL"), code=128 + signal.SIGKILL),
    Situation(swallowed_exception, (2,), (BLAMED, "handling ValueError: a bad batch")),
    Situation(
        different_branch,
        (2,),
        ("diverges at operation #2: ranks 0, 1: all_reduce", "rank 2: broadcast"),
        code=1,
    ),
    Situation(slow_disk, (2,), (BLAMED, "in slow_disk", "in open")),
    Situation(
        gil_held_asleep,
        (2,),
        ("rank 2 is waited for", "asleep (state S)", "interpreter lock (GIL)", "in gil_held_asleep (by "),
    ),
    Situation(
        gil_held_busy,
        (2,),
        ("rank 2 is waited for", "running (state R)", "interpreter lock (GIL)", "in gil_held_busy (by "),
    ),
    Situation(backtracking, (2,), ("rank 2 is waited for", "(GIL)", "in backtracking (by ")),
    Situation(
        uninterruptible,
        (2,),
        ("rank 2 is waited for", ": state D", "in uninterruptible (by "),
    ),
    Situation(main_thread_ended, (2,), (BLAMED, "its main thread ")),
    Situation(never_awaited, (2,), (BLAMED, "ranks 0, 1 in all_reduce #2", "in never_awaited")),
    Situation(uneven_data, (2,), ("last seen: all_reduce #4", "waited for by ranks 0, 1 in all_reduce #5")),
    Situation(two_culprits, (1, 2), ("rank 1 (last", "rank 2 (last", "in two_culprits"), asked=2),
    Situation(
        wrong_order, (1,), ("deadlock: rank 0 waits for rank 1", "rank 1 is in all_reduce #", "second")
    ),
    Situation(
        crossing_sends, (), ("deadlock: rank 0 waits for rank 1 in send", "rank 1 waits for rank 0"), 2
    ),
    Situation(receive_without_send, (2,), ("rank 2", "is waited for by rank 0 in recv #1", "in idle"), 1),
    Situation(wrong_tag, (2,), ("rank 2", "is waited for by rank 0 in recv #1", "in idle")),
    Situation(in_another_group, (2,), ("deadlock: ", "rank 2 is in all_reduce #", "evaluation")),
    Situation(chain_of_groups, (2,), ("waited for by rank 1", "second", "in idle")),
    Situation(
        irecv_in_advance,
        (2,),
        (BLAMED, "ranks 0, 1 in all_reduce #2", "in irecv_in_advance; no thread of it waits for recv #1"),
        without="deadlock",
    ),
    Situation(
        work_in_advance,
        (2,),
        (BLAMED, "in all_reduce #2 of group training", "in work_in_advance; no thread of it waits for all_"),
        without="deadlock",
    ),
    Situation(irecv_awaited, (0,), ("deadlock: rank 0 waits for rank 2", "rank 0 has sent 0 messages")),
    Situation(
        one_message_too_few, (1,), ("rank 1 has sent 7 messages to rank 2", "which waits for the 8th"), 2
    ),
    Situation(
        one_receive_too_few,
        (1,),
        ("rank 1 has received 2 messages from rank 0", "which waits to send the 3rd"),
    ),
    Situation(loading, (2,), (BLAMED, "its main thread is in torch's load, called at hangs.py")),
    Situation(
        control_plane_closed,
        (2,),
        ("rank 2 is waited for by ranks 0, 1", "its control plane is gone", "is asleep (state S)"),
        without="interpreter lock",
    ),
    Situation(store_gone, (2,), (BLAMED, "in idle")),
    Situation(store_stopped, (2,), (BLAMED, "in idle")),
    Situation(split_without_one, (2,), ("rank 2 (last seen: never in this group) is waited for", "in idle")),
    Situation(
        new_group_without_one, (2,), ("ranks 0, 1 are in dist2's new_group", "rank 2: its main thread")
    ),
    Situation(late_start, (2,), ("rank 2 is waited for", "never called observability.start, or not yet")),
)


def main(name: str, folder: str) -> None:
    """Be a rank of a launcher."""
    situation = next(each for each in SITUATIONS if str(each) == name)
    pg = dist2.new_group(situation.backend, 60, name="training")
    pg.barrier()
    situation.part(pg, Path(folder))
    idle()


if __name__ == "__main__":
    main(*sys.argv[1:])
