"""Usage of a process: connections of both planes, requests to stores, shared memory, time spent waiting."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.processes import run_processes
from support.ranks import Tenant, run_ranks
from support.stores import exit_code, forked
from support.time_limits import in_time

import dist2
from dist2 import ProcessGroup
from dist2.errors import StoreTimeoutError
from dist2.runtime.deadline import Deadline
from dist2.runtime.shared_memory import Arena, touched_bytes
from dist2.runtime.usage import Usage, usage
from dist2.store.connection import Connection
from dist2.store.protocol import Request


def since(before: dict[str, tuple[int, int, int]], plane: str) -> tuple[int, ...]:
    """Return by how much the counts of a plane have changed: open, opened, took the place of a broken one."""
    now, then = usage.connections().get(plane, (0, 0, 0)), before.get(plane, (0, 0, 0))
    return tuple(new - old for new, old in zip(now, then, strict=True))


def test_store_connections_and_requests_are_counted() -> None:
    before, requests = usage.connections(), Counter(usage.requests())
    with_server = dist2.TCPStore("127.0.0.1", 0, is_master=True)
    with_server.set("key", "value")
    with_server.get("key")
    assert since(before, "store") == (1, 1, 0)
    told = Counter(usage.requests()) - requests
    assert (told["set"], told["get"]) == (1, 1)
    with_server.close()
    assert since(before, "store") == (0, 1, 0)


def test_a_connection_that_takes_the_place_of_a_broken_one_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True)
    before = usage.connections()

    def interrupted(self: Connection, request: Request, deadline: Deadline) -> NoReturn:
        raise StoreTimeoutError("the answer is late")

    with monkeypatch.context() as patched, pytest.raises(StoreTimeoutError):
        patched.setattr(Connection, "ask", interrupted)
        store.add("count", 1)
    assert store.add("count", 1) == 1
    assert since(before, "store") == (0, 1, 1)
    store.close()


def test_links_between_ranks_are_counted() -> None:
    before = usage.connections()

    def body(pg: ProcessGroup) -> None:
        pg.all_reduce(torch.ones(4))

    run_ranks(2, body, Tenant("tcp", "socket", {"transport": "tcp"}))
    _, opened, again = since(before, "data")
    assert opened >= 2  # both ends are in this process
    assert again == 0


def test_a_child_begins_anew() -> None:
    counts = Usage()
    counts.opened("data")
    counts.requested("get")
    counts.forget()
    assert counts.connections() == {}
    assert counts.requests() == {}


def test_a_fork_has_no_connections_and_counts_its_own() -> None:
    """Those of its parent, which it closes, were counted as closed alone: one less was open."""
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True)

    def body() -> int:
        inherited = usage.connections()
        own = dist2.TCPStore("127.0.0.1", store.port)
        counted = usage.connections()
        own.close()
        return int(inherited != {} or counted != {"store": (1, 1, 0)})

    assert exit_code(forked(body)) == 0
    store.close()


def test_shared_memory_counts_as_far_as_it_was_touched() -> None:
    before = touched_bytes()
    arena = Arena(64 << 20)
    try:
        assert touched_bytes() - before < 1 << 20
        arena.view[: 8 << 20] = bytes(8 << 20)
        assert 8 << 20 <= touched_bytes() - before < 9 << 20
    finally:
        arena.close()
    assert touched_bytes() == before


def waits(pg: ProcessGroup, *, messages: bool) -> tuple[float, float]:
    """Return for how long a rank waited, before and after the other one arrived late, in seconds."""
    pg.barrier()
    before_ns = pg.waited_ns()
    assert before_ns is not None
    if pg.rank() == 1:
        time.sleep(0.2)
    if not messages:
        pg.all_reduce(torch.ones(1000))
    elif pg.rank() == 1:
        pg.send(torch.ones(1000), 0)
    else:
        pg.recv(torch.ones(1000), 1)
    after_ns = pg.waited_ns()
    assert after_ns is not None
    return before_ns / 1e9, after_ns / 1e9


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("messages", [False, True], ids=["all_reduce", "recv"])
def test_waiting_for_a_late_rank_is_told_from_moving_data(
    tmp_path: Path, transport: str, messages: bool
) -> None:
    (before, waited), (late_before, late) = run_processes(
        2, partial(waits, messages=messages), tmp_path, transport=transport
    )
    assert 0.15 < waited - before < 5
    assert late - late_before < 0.15


def moves(pg: ProcessGroup) -> tuple[float, float]:
    """Return for how long a rank waited while ranks moved data without a break, and how long that took."""
    tensor = torch.ones(4 << 20)
    pg.all_reduce(tensor)
    before_ns, since_s = pg.waited_ns(), time.monotonic()
    assert before_ns is not None
    for _ in range(20):
        pg.all_reduce(tensor, dist2.ReduceOp.MAX)
    took_s, after_ns = time.monotonic() - since_s, pg.waited_ns()
    assert after_ns is not None
    return (after_ns - before_ns) / 1e9, took_s


def test_moving_data_over_sockets_is_no_waiting(tmp_path: Path) -> None:
    for waited_s, took_s in run_processes(2, moves, tmp_path, transport="tcp"):
        in_time(waited_s, took_s / 4)


def test_a_backend_that_cannot_tell_says_so() -> None:
    with dist2.new_group("fake", rank=0, world_size=2) as pg:
        assert pg.waited_ns() is None
