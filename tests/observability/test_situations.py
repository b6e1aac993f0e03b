"""Situations in which a job hangs, injected into three processes: any healthy rank names the culprit in
seconds.

A situation defines the behaviour of each rank once the group and the control planes are there. The ranks do
not know that they are observed: the test queries them from outside, as an operator does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.processes import started

import dist2
import observability
from dist2 import ProcessGroup
from dist2.cli.app import cli
from dist2.errors import Dist2Error
from observability.server import running

WORLD = 3
AFTER_S = 0.3
WITHIN_S = 5.0
"""The promise: how long after the hang begins a culprit may stay unnamed, on a quiet machine."""
PATIENCE_S = 25.0

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
            with suppress(Dist2Error):
                reduce_on(pg)
            idle()

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
    with suppress(Dist2Error):
        pg.broadcast(torch.ones(4), root=0)
    idle()


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
    """

    part: Part
    culprits: tuple[int, ...]
    words: tuple[str, ...]
    asked: int = 0
    backend: str = "socket"
    without: str = "so this is no"

    def __str__(self) -> str:
        return f"{self.part.__name__}-{self.backend}"


BLAMED = "rank 2 (last seen: barrier #1 at test_situations.py:"

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
    Situation(death, (2,), ("rank 2", "was killed by SIGKILL")),
    Situation(swallowed_exception, (2,), (BLAMED, "handling ValueError: a bad batch")),
    Situation(
        different_branch, (2,), ("diverges at operation #2: ranks 0, 1: all_reduce", "rank 2: broadcast")
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
    Situation(loading, (2,), (BLAMED, "its main thread is in torch's load, called at test_situations.py")),
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


def run_rank(pipe: Connection, situation: Situation, rank: int, port: int, folder: Path) -> None:
    """Be a rank of a situation: build the group, send the address of the control plane, hang."""
    if port:
        store: Any = dist2.TCPStore("127.0.0.1", port, is_master=False)
    else:
        store = dist2.FileStore(str(folder / "store"), WORLD)
    pg = dist2.new_group(situation.backend, 60, store=store, rank=rank, world_size=WORLD, name="training")
    if situation.part is late_start and rank == 2:
        pipe.send(None)
        idle()
    server = observability.start(pg, waiting_after_s=AFTER_S)
    pipe.send((server.url, server.token))
    assert pipe.recv() == "all are there"
    if situation.part is not late_start:
        pg.barrier()
    situation.part(pg, folder)
    idle()


def serve_store(pipe: Connection) -> None:
    """Serve the store of a job, until killed."""
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("pid", str(os.getpid()))
    pipe.send(store.port)
    idle()


def ask(url: str, token: str, path: str) -> Any:
    try:
        return json.loads(observability.fetch(url + path, token, timeout_s=20))
    except HTTPError as error:
        with error:
            return json.loads(error.read())


@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
def test_the_culprit_is_named(situation: Situation, tmp_path: Path) -> None:
    with started(serve_store, *([()] if situation.part in (store_gone, store_stopped) else [])) as stores:
        port = stores[0].recv() if stores else 0
        ranks = [(situation, rank, port, tmp_path) for rank in range(WORLD)]
        with started(run_rank, *ranks) as pipes:
            planes = [pipe.recv() for pipe in pipes]
            url, token = planes[situation.asked]
            _let_all_register(url, token, sum(plane is not None for plane in planes))
            if stores:
                _end_the_store(port, signal.SIGKILL if situation.part is store_gone else signal.SIGSTOP)
            for pipe, plane in zip(pipes, planes, strict=True):
                if plane is not None:
                    pipe.send("all are there")
            found = _found(situation, url, token)
            verdict = "\n".join(found["verdict"])
            assert found["culprits"] == list(situation.culprits), verdict
            assert found["took_s"] < WITHIN_S
            assert situation.without not in verdict
            said = CliRunner().invoke(
                cli,
                ["why", url, "--after", "0.2", "--limit", "0.5"],  # the token is that of a job of this user
            )
            assert said.exit_code == 1, said.output
            assert all(words in said.output for words in situation.words), said.output


def _let_all_register(url: str, token: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while ask(url, token, "/job")["answered"] < count:
        assert time.monotonic() < deadline, ask(url, token, "/job")
        time.sleep(0.02)


def _end_the_store(port: int, by: signal.Signals) -> None:
    """Have the server of the store end, as if its host had gone, or stop: it listens and never answers."""
    client = dist2.TCPStore("127.0.0.1", port, is_master=False)
    os.kill(int(client.get("pid")), by)
    if by is signal.SIGSTOP:
        return
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            continue
        return


def _found(situation: Situation, url: str, token: str) -> Any:
    """Return the first diagnosis that is as expected, or the last one after a while."""
    began = time.monotonic()
    while True:
        found = ask(url, token, "/desync?after_ms=200&limit_ms=500")
        took_s = time.monotonic() - began
        said = "\n".join(found["verdict"])
        if all(words in said for words in situation.words) or took_s > PATIENCE_S:
            return found
        time.sleep(0.05)
