"""What a process uses: connections of both planes, requests to stores, shared memory, time spent waiting."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.processes import run_processes
from support.ranks import Tenant, run_ranks

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


def waits(pg: ProcessGroup) -> tuple[float, float]:
    """Return for how long a rank waited, before and after the other one came late."""
    pg.barrier()
    before_ns = pg.waited_ns()
    assert before_ns is not None
    if pg.rank() == 1:
        time.sleep(0.2)
    pg.all_reduce(torch.ones(1000))
    after_ns = pg.waited_ns()
    assert after_ns is not None
    return before_ns / 1e9, after_ns / 1e9


def test_waiting_for_a_late_rank_is_told_from_moving_data(tmp_path: Path) -> None:
    (before, waited), (late_before, late) = run_processes(2, waits, tmp_path, transport="shm")
    assert 0.15 < waited - before < 5
    assert late - late_before < 0.15


def test_a_backend_that_cannot_tell_says_so() -> None:
    with dist2.new_group("fake", rank=0, world_size=2) as pg:
        assert pg.waited_ns() is None
