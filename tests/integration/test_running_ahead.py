"""A rank that only sends hears when its receivers have given up, and why; no rank is lost by that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from support.processes import caught, hear, run_processes, tell
from support.time_limits import in_time

from dist2 import Dist2Error, OperationTimeoutError, PeerLostError, ProcessGroup

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

LIMIT_S, LONG_S = 0.2, 20.0
TOLD_S = 1.0


@attrs.frozen
class Case:
    """What rank 0 calls again and again after the others have failed.

    Attributes:
        call: The call of rank 0.
        fails: The call of the others that fails; None on a rank that calls nothing.
        kind: The error of both.
        ranks: The ranks that it names on rank 0.
        leaves: Rank 2 closes the group in good order.
    """

    call: Callable[[ProcessGroup], object]
    fails: dict[int, Callable[[ProcessGroup], object]]
    kind: type[Dist2Error] = OperationTimeoutError
    ranks: tuple[int, ...] = (0,)
    leaves: bool = False


def _broadcast(pg: ProcessGroup) -> None:
    pg.broadcast(torch.ones(4), 0, timeout=LONG_S if pg.rank() == 0 else LIMIT_S)


def _send(pg: ProcessGroup) -> None:
    pg.send(torch.ones(4), 1)


CASES = {
    "broadcast": Case(_broadcast, {1: _broadcast, 2: _broadcast}),
    "async": Case(
        lambda pg: pg.broadcast(torch.ones(4), 0, async_op=True).wait(), {1: _broadcast, 2: _broadcast}
    ),
    "send": Case(_send, {1: lambda pg: pg.recv(torch.ones(4), 0, timeout=LIMIT_S)}),
    "left": Case(_send, {1: lambda pg: pg.recv(torch.ones(4), 2)}, PeerLostError, (2,), leaves=True),
}


def _run_ahead(pg: ProcessGroup, name: str) -> tuple[str, tuple[int, ...], float]:
    """Return rank 0's error, the ranks that it names, and how long it went on."""
    case = CASES[name]
    group = pg.split(range(3), timeout=LONG_S)
    assert group is not None
    if pg.rank() == 2 and case.leaves:
        group.shutdown()
        hear(pg, "rank 0 knows")
        return "", (), 0.0
    told: tuple[str, tuple[int, ...], float] = ("", (), 0.0)
    if pg.rank() == 0:
        hear(pg, *(f"{rank} gave up" for rank in case.fails))
        start = time.monotonic()
        error, _ = caught(case.kind, lambda: _again_and_again(case.call, group))
        ranks = error.missing if isinstance(error, OperationTimeoutError) else error.ranks
        told = (str(error), ranks, time.monotonic() - start)
        tell(pg, "rank 0 knows")
    else:
        if pg.rank() in case.fails:
            caught(case.kind, lambda: case.fails[pg.rank()](group))
            tell(pg, f"{pg.rank()} gave up")
        hear(pg, "rank 0 knows")
    _go_on(group, (2,) if case.leaves else ())
    return told


def _again_and_again(call: Callable[[ProcessGroup], object], pg: ProcessGroup) -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        call(pg)


def _go_on(group: ProcessGroup, left: tuple[int, ...]) -> None:
    """All agree on the members that have left, and work without them."""
    assert group.agree(timeout=LONG_S).failed == left
    after = group.shrink(timeout=LONG_S)
    total = torch.ones(1)
    after.all_reduce(total)
    assert total.item() == 3 - len(left)
    after.barrier()
    after.shutdown()
    group.abort()


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_runs_ahead_is_told(transport: str, name: str, tmp_path: Path) -> None:
    text, ranks, took_s = run_processes(3, _run_ahead, tmp_path, name, transport=transport)[0]
    assert ranks == CASES[name].ranks, text
    assert "has given up (" in text or "gave up an earlier operation" in text, text
    in_time(took_s, TOLD_S)
