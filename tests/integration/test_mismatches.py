"""Ranks that call different operations: all errors name the calls of all ranks. Real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.processes import Crew, caught
from support.time_limits import Late, in_time

from dist2 import MismatchError, PrefixStore, ProcessGroup, ReduceOp

SIZES = (2, 3, 8)
TRANSPORTS = ("shm", "tcp")
SMALL, MIDDLE, LARGE = 2, 1 << 18, 1 << 24  # elements: 8 bytes, 1 MiB, 64 MiB

TOLD_S = 0.5 + 0.1  # of a busy machine
LOOKED_INTO_S = 0.15  # links of a process that computes are, within this time

Call = Callable[[ProcessGroup, int], object]
"""Calls an operation on tensors of about so many elements."""


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Crew]]:
    made: dict[int, Crew] = {}

    def crew(size: int) -> Crew:
        if size not in made:
            made[size] = Crew(size, tmp_path_factory.mktemp(f"crew{size}"))
        return made[size]

    yield crew
    for each in made.values():
        each.close()


# The calls of the odd rank, and of the others


def _all_reduce(pg: ProcessGroup, numel: int) -> object:
    return pg.all_reduce(torch.ones(numel))


def _all_reduce_async(pg: ProcessGroup, numel: int) -> object:
    return pg.all_reduce(torch.ones(numel), async_op=True).wait()


def _max(pg: ProcessGroup, numel: int) -> object:
    return pg.all_reduce(torch.ones(numel), ReduceOp.MAX)


def _doubles(pg: ProcessGroup, numel: int) -> object:
    return pg.all_reduce(torch.ones(numel, dtype=torch.float64))


def _same_bytes(pg: ProcessGroup, numel: int) -> object:
    return pg.all_reduce(torch.ones(numel, dtype=torch.int32))


def _longer(pg: ProcessGroup, numel: int) -> object:
    return pg.all_reduce(torch.ones(numel + 1))


def _broadcast(pg: ProcessGroup, numel: int) -> object:
    return pg.broadcast(torch.ones(numel), 0)


def _broadcast_from_last(pg: ProcessGroup, numel: int) -> object:
    return pg.broadcast(torch.ones(numel), pg.size() - 1)


def _reduce(pg: ProcessGroup, numel: int) -> object:
    return pg.reduce(torch.ones(numel), 0)


def _reduce_to_last(pg: ProcessGroup, numel: int) -> object:
    return pg.reduce(torch.ones(numel), pg.size() - 1)


def _gather(pg: ProcessGroup, numel: int) -> object:
    outputs = [torch.ones(numel) for _ in range(pg.size())] if pg.rank() == 0 else None
    return pg.gather(outputs, torch.ones(numel), 0)


def _scatter(pg: ProcessGroup, numel: int) -> object:
    inputs = [torch.ones(numel) for _ in range(pg.size())] if pg.rank() == 0 else None
    return pg.scatter(torch.ones(numel), inputs, 0)


def _all_gather(pg: ProcessGroup, numel: int) -> object:
    return pg.all_gather([torch.ones(numel) for _ in range(pg.size())], torch.ones(numel))


def _reduce_scatter(pg: ProcessGroup, numel: int) -> object:
    return pg.reduce_scatter_single(torch.ones(numel), torch.ones(numel * pg.size()))


def _all_to_all(pg: ProcessGroup, numel: int) -> object:
    return pg.all_to_all_single(torch.ones(numel * pg.size()), torch.ones(numel * pg.size()))


def _barrier(pg: ProcessGroup, numel: int) -> object:
    return pg.barrier()


@attrs.frozen
class Mistake:
    """A wrong call.

    Attributes:
        others: The call of all ranks but one.
        odd: The call of that one.
        shows: Texts that every message contains.
        field: A field of the odd rank's call, and
        value: its value.
    """

    others: Call
    odd: Call
    shows: str
    field: str
    value: Any


MISTAKES = {
    "reduction": Mistake(_all_reduce, _max, "op=max", "reduction", "max"),
    "reduction_async": Mistake(_all_reduce_async, _max, "op=max", "reduction", "max"),
    "dtype": Mistake(_all_reduce, _doubles, "float64[", "dtypes", ("float64",)),
    "dtype_of_one_size": Mistake(_all_reduce, _same_bytes, "int32[", "dtypes", ("int32",)),
    "shape": Mistake(_all_reduce, _longer, "float32[", "op", "all_reduce"),
    "root_of_broadcast": Mistake(_broadcast, _broadcast_from_last, "root=0", "op", "broadcast"),
    "root_of_reduce": Mistake(_reduce, _reduce_to_last, "root=0", "op", "reduce"),
    "barrier_for_all_reduce": Mistake(_all_reduce, _barrier, "barrier()", "op", "barrier"),
    "all_reduce_for_barrier": Mistake(_barrier, _all_reduce, "all_reduce(", "op", "all_reduce"),
    "reduce_for_broadcast": Mistake(_broadcast, _reduce, "reduce(", "op", "reduce"),
    "broadcast_for_gather": Mistake(_gather, _broadcast, "broadcast(", "op", "broadcast"),
    "gather_for_scatter": Mistake(_scatter, _gather, "gather(", "op", "gather"),
    "scatter_for_all_gather": Mistake(_all_gather, _scatter, "scatter(", "op", "scatter"),
    "all_to_all_for_reduce_scatter": Mistake(_reduce_scatter, _all_to_all, "all_to_all_single(", "seq", 2),
    "all_gather_for_all_to_all": Mistake(_all_to_all, _all_gather, "all_gather(", "op", "all_gather"),
}

Seen = tuple[str, dict[int, str], dict[int, Any], float]


def _told(pg: ProcessGroup, call: Callable[[], object]) -> Seen:
    """Call, and continue until the error: a rank that had done its part gets it at a later operation."""
    start = time.monotonic()
    try:
        call()
    except MismatchError as raised:
        error, elapsed = raised, time.monotonic() - start
        _stay_away(pg, 0.0)
    else:
        _stay_away(pg, TOLD_S)  # computing: the others get the error meanwhile
        time.sleep(LOOKED_INTO_S)
        error, elapsed = caught(MismatchError, pg.barrier)
    assert isinstance(pg.get_error(), MismatchError)
    return str(error), error.actual, error.calls, elapsed


def _stay_away(pg: ProcessGroup, limit_s: float) -> None:
    """Publish that this rank has its error, or computes; wait for the others to do so, up to a limit."""
    away = PrefixStore("away", pg.spec.store)
    away.set(str(pg.rank()), b"")
    everybody, deadline = [str(rank) for rank in range(pg.size())], time.monotonic() + limit_s
    while time.monotonic() < deadline and not away.check(everybody):
        time.sleep(0.01)


def _err(pg: ProcessGroup, name: str, odd: int, numel: int) -> Seen:
    pg.barrier()
    mistake = MISTAKES[name]
    call = mistake.odd if pg.rank() == odd else mistake.others
    return _told(pg, lambda: call(pg, numel))


def _told_in_time(results: list[Seen]) -> None:
    """Check that all ranks got the error in time, and reported their calls while others waited for them."""
    for rank, (message, _, _, elapsed) in enumerate(results):
        in_time(elapsed, TOLD_S, rank, message)
        if "did not describe in time" in message:
            raise Late(message)


def _check(name: str, odd: int, results: list[Seen]) -> None:
    mistake = MISTAKES[name]
    _told_in_time(results)
    for rank, (message, actual, calls, _) in enumerate(results):
        assert mistake.shows in message, (rank, message)
        assert f"{Path(__file__).name}:" in message
        if rank == odd:
            assert actual, (rank, message)
        else:
            assert odd in actual, (rank, message)
        assert f"rank {odd}" in message
        assert getattr(calls[odd], mistake.field) == mistake.value, (rank, calls[odd])
        assert calls[odd].file == __file__
        assert calls[odd].line > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_is_told_who_called_what(
    crews: Callable[[int], Crew], name: str, size: int, transport: str
) -> None:
    for odd in {size - 1, 1} if size == 3 else {size // 2}:
        _check(name, odd, crews(size).run(_err, name, odd, SMALL, transport=transport))


@pytest.mark.parametrize("numel", [MIDDLE, LARGE])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["reduction", "shape", "root_of_broadcast", "barrier_for_all_reduce"])
def test_also_where_tensors_are_long(
    crews: Callable[[int], Crew], name: str, numel: int, transport: str
) -> None:
    _check(name, 1, crews(2).run(_err, name, 1, numel, transport=transport))


# One rank an operation ahead, or at something else


def _ahead(pg: ProcessGroup, odd: int, ops: tuple[str, str]) -> Seen:
    """All call both, but for the odd one, which leaves the first out."""
    pg.barrier()
    first, second = (MISTAKES_BY_CALL[name] for name in ops)

    def calls() -> None:
        if pg.rank() != odd:
            first(pg, SMALL)
        second(pg, SMALL)

    return _told(pg, calls)


MISTAKES_BY_CALL: dict[str, Call] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_reduce": _all_reduce,
    "barrier": _barrier,
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "ops",
    [
        ("broadcast", "reduce"),
        ("reduce", "broadcast"),
        ("gather", "reduce"),
        ("scatter", "barrier"),
        ("all_reduce", "barrier"),
        ("barrier", "gather"),
    ],
    ids="-then-".join,
)
def test_a_rank_that_is_ahead_is_told_with_the_others(
    crews: Callable[[int], Crew], ops: tuple[str, str], size: int, transport: str
) -> None:
    odd = size - 1
    results = crews(size).run(_ahead, odd, ops, transport=transport)
    _told_in_time(results)
    for rank, (message, actual, calls, _) in enumerate(results):
        assert rank == odd or odd in actual, (rank, message)
        assert calls[odd].op == ops[1], (rank, message)


# Messages


def _other_message(pg: ProcessGroup, numel: int, receives: str, async_op: bool) -> Seen:
    pg.barrier()
    target = {
        "longer": torch.ones(numel + 1),
        "shorter": torch.ones(numel - 1),
        "doubles": torch.ones(numel, dtype=torch.float64),
        "integers": torch.ones(numel, dtype=torch.int32),
    }
    if pg.rank() == 0:
        message = torch.ones(numel)
        return _told(pg, lambda: pg.isend(message, 1).wait() if async_op else pg.send(message, 1))
    if pg.rank() == 1:
        received = target[receives]
        return _told(pg, lambda: pg.irecv(received, 0).wait() if async_op else pg.recv(received, 0))
    return _told(pg, lambda: None)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("numel", [SMALL, MIDDLE, LARGE // 4])
@pytest.mark.parametrize("receives", ["longer", "shorter", "doubles", "integers"])
def test_a_message_of_another_size_or_dtype_is_told_to_both_ends(
    crews: Callable[[int], Crew], receives: str, numel: int, transport: str
) -> None:
    results = crews(3).run(_other_message, numel, receives, False, transport=transport)
    _check_message(results, numel)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("numel", [SMALL, MIDDLE, LARGE // 4])
def test_also_if_the_message_is_asynchronous(
    crews: Callable[[int], Crew], numel: int, transport: str
) -> None:
    results = crews(3).run(_other_message, numel, "integers", True, transport=transport)
    _check_message(results, numel)


def _check_message(results: list[Seen], numel: int) -> None:
    _told_in_time(results)
    for rank, (message, actual, calls, _) in enumerate(results):
        assert f"send(float32[{numel}], peer=1" in message, (rank, message)
        assert "recv(" in message, (rank, message)
        assert calls[0].op == "send"
        assert calls[1].op == "recv"
        assert (calls[0].peer, calls[1].peer) == (1, 0)
        assert actual.keys() == {0: {1}, 1: {0}, 2: {0, 1}}[rank], (rank, message)


def _mismatched_before_a_barrier(pg: ProcessGroup) -> tuple[set[int], float]:
    pg.barrier()

    def calls() -> None:
        if pg.rank() == 1:
            pg.send(torch.ones(3), 0)
        if pg.rank() == 0:
            pg.recv(torch.ones(5), 1)
        pg.barrier()

    error, elapsed = caught(MismatchError, calls)
    return set(error.actual) | {pg.rank()}, elapsed


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_collective_that_waits_for_who_got_a_wrong_message_is_freed(
    crews: Callable[[int], Crew], transport: str
) -> None:
    for named, elapsed in crews(3).run(_mismatched_before_a_barrier, transport=transport):
        assert {0, 1} <= named
        in_time(elapsed, TOLD_S)
