"""`StoreCollectives`: dist2's and torch's interoperate, and errors name missing ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch.distributed as dist
from support.threads import together
from support.time_limits import in_time
from support.torch_features import require

import dist2
from dist2 import StoreCollectives
from dist2.errors import InvalidUsageError, StoreError, StoreTimeoutError

LIMIT = timedelta(seconds=20)

TORCHS: Any = getattr(dist, "_StoreCollectives", None)
TEAMS: dict[str, Callable[[Any, int, int], Any]] = {
    "ours": StoreCollectives,
    "torchs": lambda store, rank, size: TORCHS(store, rank, size),
    "mixed": lambda store, rank, size: (StoreCollectives, TORCHS)[rank % 2](store, rank, size),
    "mixed the other way": lambda store, rank, size: (TORCHS, StoreCollectives)[rank % 2](store, rank, size),
}

STORES: dict[str, Callable[[], Any]] = {
    "hash": dist2.HashStore,
    "torchs_hash": dist.HashStore,
    "prefix": lambda: dist2.PrefixStore("p", dist2.HashStore()),
}


@pytest.fixture(params=TEAMS)
def team(request: pytest.FixtureRequest) -> Callable[[Any, int, int], Any]:
    if request.param != "ours":
        require("store_collectives")
    return TEAMS[request.param]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Any:
    return STORES[request.param]()


def run(
    team: Callable[[Any, int, int], Any], store: Any, size: int, body: Callable[[Any, int], Any]
) -> list[Any]:
    ranks = [team(store, rank, size) for rank in range(size)]
    return together(*(lambda rank=rank: body(ranks[rank], rank) for rank in range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_barrier(team: Any, store: Any, size: int) -> None:
    came: list[int] = []

    def body(collectives: Any, rank: int) -> int:
        time.sleep(0.01 * rank)
        came.append(rank)
        collectives.barrier("key", LIMIT, True)
        return len(came)

    assert run(team, store, size, body) == [size] * size


def test_a_barrier_need_not_block(team: Any, store: Any) -> None:
    ranks = [team(store, rank, 3) for rank in range(3)]
    for rank in (2, 1):
        ranks[rank].barrier("here first", LIMIT, False)  # no other rank comes until it returns
    ranks[0].barrier("here first", LIMIT, True)

    def body(collectives: Any, rank: int) -> None:
        collectives.barrier("key", LIMIT, rank == 0)

    run(team, store, 3, body)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_sum(team: Any, store: Any, size: int) -> None:
    sums = run(team, store, size, lambda collectives, rank: collectives.all_sum("key", rank - 10, LIMIT))
    assert sums == [sum(range(size)) - 10 * size] * size


def test_broadcast(team: Any, store: Any) -> None:
    def body(collectives: Any, rank: int) -> Any:
        if rank == 1:
            return collectives.broadcast_send("key", "data", LIMIT)
        return collectives.broadcast_recv("key", LIMIT)

    assert run(team, store, 3, body) == [b"data", None, b"data"]


def test_gather(team: Any, store: Any) -> None:
    def body(collectives: Any, rank: int) -> Any:
        if rank == 1:
            return collectives.gather_recv("key", "from 1", LIMIT)
        return collectives.gather_send("key", f"from {rank}", LIMIT)

    assert run(team, store, 3, body) == [None, [b"from 0", b"from 1", b"from 2"], None]


def test_scatter(team: Any, store: Any) -> None:
    def body(collectives: Any, rank: int) -> Any:
        if rank == 1:
            return collectives.scatter_send("key", ["for 0", "for 1", "for 2"], LIMIT)
        return collectives.scatter_recv("key", LIMIT)

    assert run(team, store, 3, body) == [b"for 0", b"for 1", b"for 2"]


def test_all_gather(team: Any, store: Any) -> None:
    gathered = run(team, store, 4, lambda collectives, rank: collectives.all_gather("key", str(rank), LIMIT))
    assert gathered == [[b"0", b"1", b"2", b"3"]] * 4


CALLS: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda it: it.barrier("key", timedelta(seconds=0.1), True),
    "all_sum": lambda it: it.all_sum("key", 1, timedelta(seconds=0.1)),
    "gather": lambda it: it.gather_recv("key", "x", timedelta(seconds=0.1)),
    "all_gather": lambda it: it.all_gather("key", "x", timedelta(seconds=0.1)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("team", ["ours", "torchs"], indirect=True)
def test_missing_ranks_are_named(call: str, team: Any) -> None:
    store = dist2.HashStore()
    one = team(store, 1, 4)
    with pytest.raises(RuntimeError, match=r"failed -- .*missing ranks: (0, 2, 3|0)"):
        CALLS[call](one)


@pytest.mark.parametrize("call", CALLS)
def test_all_missing_ranks_are_named_in_time(call: str) -> None:
    store = dist2.HashStore()
    start = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"timeout after 100ms, missing ranks: 0, 2, 3$") as caught:
        CALLS[call](StoreCollectives(store, 1, 4))
    took_s = time.monotonic() - start
    assert took_s >= 0.1
    in_time(took_s, 0.5)
    assert isinstance(caught.value, dist.DistStoreError)


@pytest.mark.parametrize("call", ["broadcast_recv", "scatter_recv"])
def test_a_missing_sender_is_named(call: str) -> None:
    collectives = StoreCollectives(dist2.HashStore(), 1, 2)
    with pytest.raises(StoreTimeoutError, match="missing ranks: the sending rank"):
        getattr(collectives, call)("key", 0.05)


def test_a_key_is_used_once_over_all_operations(team: Any) -> None:
    collectives = team(dist2.HashStore(), 0, 1)
    collectives.barrier("key", LIMIT, True)
    for call in (
        lambda: collectives.barrier("key", LIMIT, True),
        lambda: collectives.all_sum("key", 1, LIMIT),
        lambda: collectives.broadcast_send("key", "x", LIMIT),
        lambda: collectives.all_gather("key", "x", LIMIT),
        lambda: collectives.gather_recv("key", "x", LIMIT),
        lambda: collectives.scatter_send("key", ["x"], LIMIT),
    ):
        with pytest.raises(RuntimeError, match="Key key has already been used"):
            call()


def test_other_errors_are_not_taken_for_missing_ranks() -> None:
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True)
    collectives = StoreCollectives(store, 0, 2)
    store.close()
    with pytest.raises(StoreError, match="TCPStore is closed"):
        collectives.barrier("key", 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no store", 0, 1), "store must be a torch or dist2 Store, got 'no store'"),
        ((dist2.HashStore(), 2, 2), "rank must be a group rank between 0 and 1, got 2"),
        ((dist2.HashStore(), -1, 2), "got -1"),
        ((dist2.HashStore(), "0", 2), "got '0'"),
        ((dist2.HashStore(), 0, 0), "world_size must be a positive int, got 0"),
    ],
)
def test_bad_arguments(arguments: Any, words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        StoreCollectives(*arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    collectives = StoreCollectives(dist2.HashStore(), numpy.int64(0), numpy.int32(1))
    assert collectives.all_gather("key", "x", LIMIT) == [b"x"]


def test_bad_data() -> None:
    collectives = StoreCollectives(dist2.HashStore(), 0, 2)
    with pytest.raises(InvalidUsageError, match="one item for each of 2 ranks, got 1"):
        collectives.scatter_send("a", ["x"])
    with pytest.raises(TypeError, match="value must be a str or bytes, got 3"):
        collectives.broadcast_send("b", 3)
    with pytest.raises(ValueError, match="timeout must not be negative"):
        collectives.barrier("c", -1)
