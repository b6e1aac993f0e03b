"""Wrong calls, missing ranks and lost ranks, over every backend whose ranks compare their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs
import pytest
import torch
from torch.distributed import ReduceOp

from dist2 import (
    GroupAbortedError,
    GroupRevokedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
)
from dist2.testing.ranks import BackendCase

__all__ = [
    "test_a_message_of_another_size_or_dtype_raises_on_both_sides",
    "test_a_missing_rank_is_named",
    "test_a_missing_sender_is_named",
    "test_mismatched_calls_raise_on_all_ranks_and_the_survivors_go_on",
    "test_ranks_that_wait_for_one_that_is_gone_are_freed",
    "test_revoked_groups_shrink",
    "test_right_calls_of_other_shapes_pass",
]

Call = Callable[[ProcessGroup], object]


def _rows(pg: ProcessGroup, sizes: list[int]) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def _all_gather_v(pg: ProcessGroup, last: int) -> object:
    """Gather one element of each rank, and ``last`` of the last one."""
    sizes = [1] * (pg.size() - 1) + [last]
    return pg.all_gather_v(_rows(pg, sizes), torch.ones(sizes[pg.rank()]))


def _reduce_scatter_v(pg: ProcessGroup, last: int) -> object:
    sizes = [1] * (pg.size() - 1) + [last]
    return pg.reduce_scatter_v(torch.ones(sizes[pg.rank()]), _rows(pg, sizes))


def _all_to_all_single(pg: ProcessGroup, rows: int) -> object:
    """Exchange one row with each rank, and send more to the last one, which expects one."""
    sent, received = [1] * (pg.size() - 1) + [rows], [1] * pg.size()
    return pg.all_to_all_single(
        torch.ones(sum(received)), torch.ones(sum(sent)), output_splits=received, input_splits=sent
    )


def _all_to_all(pg: ProcessGroup, numel: int) -> object:
    return pg.all_to_all(_rows(pg, [1] * pg.size()), _rows(pg, [1] * (pg.size() - 1) + [numel]))


def _gather(pg: ProcessGroup, root: int) -> object:
    return pg.gather(_rows(pg, [2] * pg.size()) if pg.rank() == root else None, torch.ones(2), root)


@attrs.frozen
class Mistake:
    """A wrong call of one rank.

    Attributes:
        usual: The call of the others.
        odd: The call of that rank.
        shows: A text that every error contains.
    """

    usual: Call
    odd: Call
    shows: str


MISTAKES = {
    "operation": Mistake(lambda pg: pg.all_reduce(torch.ones(2)), lambda pg: pg.barrier(), "barrier("),
    "order": Mistake(
        lambda pg: (pg.broadcast(torch.ones(2), 0), pg.all_reduce(torch.ones(2))),
        lambda pg: (pg.all_reduce(torch.ones(2)), pg.broadcast(torch.ones(2), 0)),
        "broadcast(",
    ),
    "order of empty tensors": Mistake(
        lambda pg: (pg.broadcast(torch.ones(0), 0), pg.all_reduce(torch.ones(2))),
        lambda pg: (pg.all_reduce(torch.ones(2)), pg.broadcast(torch.ones(0), 0)),
        "broadcast(",
    ),
    "reduction": Mistake(
        lambda pg: pg.all_reduce(torch.ones(2)),
        lambda pg: pg.all_reduce(torch.ones(2), ReduceOp.MAX),
        "op=max",
    ),
    "dtype": Mistake(
        lambda pg: pg.all_reduce(torch.ones(2)),
        lambda pg: pg.all_reduce(torch.ones(2, dtype=torch.int32)),
        "int32",
    ),
    "shape": Mistake(
        lambda pg: pg.all_reduce(torch.ones(2)), lambda pg: pg.all_reduce(torch.ones(3)), "float32[3]"
    ),
    "asynchronous": Mistake(
        lambda pg: pg.all_reduce(torch.ones(2), async_op=True).wait(),
        lambda pg: pg.all_reduce(torch.ones(3), async_op=True).wait(),
        "float32[3]",
    ),
    "root": Mistake(
        lambda pg: pg.broadcast(torch.ones(2), 0), lambda pg: pg.broadcast(torch.ones(2), 1), "root=1"
    ),
    "root of reduce": Mistake(
        lambda pg: pg.reduce(torch.ones(2), 0), lambda pg: pg.reduce(torch.ones(2), 1), "root=1"
    ),
    "root of gather": Mistake(lambda pg: _gather(pg, 0), lambda pg: _gather(pg, 1), "root=1"),
    "parts": Mistake(
        lambda pg: pg.reduce_scatter_single(torch.ones(2), torch.ones(2 * pg.size())),
        lambda pg: pg.reduce_scatter_single(torch.ones(3), torch.ones(3 * pg.size())),
        "reduce_scatter_single(",
    ),
    "sizes of all_gather_v": Mistake(
        lambda pg: _all_gather_v(pg, 1), lambda pg: _all_gather_v(pg, 2), "shape differs"
    ),
    "sizes of reduce_scatter_v": Mistake(
        lambda pg: _reduce_scatter_v(pg, 1), lambda pg: _reduce_scatter_v(pg, 2), "shape differs"
    ),
}
"""Mistakes that every backend notices which compares calls."""

EXCHANGES = {
    "all_to_all": Mistake(lambda pg: _all_to_all(pg, 1), lambda pg: _all_to_all(pg, 3), ""),
    "all_to_all_single": Mistake(
        lambda pg: _all_to_all_single(pg, 1), lambda pg: _all_to_all_single(pg, 3), ""
    ),
}
"""Exchanges whose sizes do not fit: rank 1 sends more than the last rank receives."""


def _total(pg: ProcessGroup) -> float:
    pg.all_reduce(mine := torch.tensor([float(pg.rank() + 1)]))
    return mine.item()


@pytest.mark.parametrize("name", [*MISTAKES, *EXCHANGES])
def test_mismatched_calls_raise_on_all_ranks_and_the_survivors_go_on(tenant: BackendCase, name: str) -> None:
    if name in EXCHANGES and not tenant.compares_exchanges:
        pytest.skip("sizes of exchanges are not compared")
    mistake = (MISTAKES | EXCHANGES)[name]

    def body(pg: ProcessGroup) -> str:
        pg.barrier()
        with pytest.raises(MismatchError) as caught:
            (mistake.odd if pg.rank() == 1 else mistake.usual)(pg)
            pg.barrier()  # where the others needed nothing of this rank
        assert isinstance(pg.get_error(), MismatchError)
        usual = {call.op for rank, call in caught.value.calls.items() if rank != 1}
        assert len(usual) == 1 or name in EXCHANGES, caught.value
        with pg.shrink() as left:
            assert _total(left) == 6.0
        return str(caught.value)

    for rank, text in enumerate(tenant.run(3, body)):
        assert mistake.shows in text, (rank, text)
        assert "rank 1" in text, (rank, text)


def test_right_calls_of_other_shapes_pass(tenant: BackendCase) -> None:
    """Equal numbers of elements match, whatever their shape; so do sizes that fit."""

    def body(pg: ProcessGroup) -> None:
        pg.all_reduce(torch.ones(2, 3) if pg.rank() else torch.ones(6))
        _all_gather_v(pg, 4)
        _reduce_scatter_v(pg, 4)
        sent = [pg.rank() + 1] * pg.size()
        received = [rank + 1 for rank in range(pg.size())]
        got, mine = torch.zeros(sum(received)), torch.ones(sum(sent))
        pg.all_to_all_single(got, mine, output_splits=received, input_splits=sent)
        assert bool((got == 1).all())

    tenant.run(3, body)


def _missing_pair(pg: ProcessGroup, target: torch.Tensor, from_any: bool) -> None:
    if pg.rank() == 0:
        pg.send(torch.ones(3), 1, tag=4)
    elif pg.rank() == 1:
        pg.recv(target, None if from_any else 0, tag=4)
    pg.barrier()


@pytest.mark.parametrize("from_any", [False, True])
@pytest.mark.parametrize("target", ["longer", "shorter", "integers"])
def test_a_message_of_another_size_or_dtype_raises_on_both_sides(
    tenant: BackendCase, target: str, from_any: bool
) -> None:
    if not tenant.p2p:
        pytest.skip("no messages")
    targets = {
        "longer": torch.ones(5),
        "shorter": torch.ones(1),
        "integers": torch.ones(3, dtype=torch.int32),
    }

    def body(pg: ProcessGroup) -> str:
        pg.barrier()
        with pytest.raises(MismatchError) as caught:
            _missing_pair(pg, targets[target].clone(), from_any)
        with pg.shrink() as left:
            assert _total(left) == 3.0
        return str(caught.value)

    for text in tenant.run(2, body):
        assert "send(float32[3]" in text
        assert "recv(" in text


def test_a_missing_rank_is_named(tenant: BackendCase) -> None:
    over = threading.Barrier(3, timeout=20)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() < 2:
            with pytest.raises(OperationTimeoutError) as caught:
                pg.all_reduce(torch.ones(2), timeout=0.3)
            assert caught.value.missing == (2,)
        over.wait()

    tenant.run(3, body)


def test_a_missing_sender_is_named(tenant: BackendCase) -> None:
    if not tenant.p2p:
        pytest.skip("no messages")
    over = threading.Barrier(3, timeout=20)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 1:
            for receive in (pg.recv, lambda *call, **limit: pg.irecv(*call, **limit).wait()):
                with pytest.raises(OperationTimeoutError) as caught:
                    receive(torch.ones(2), 2, timeout=0.3)
                assert caught.value.missing == (2,)
        over.wait()

    tenant.run(3, body)


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_ranks_that_wait_for_one_that_is_gone_are_freed(tenant: BackendCase, how: str) -> None:
    begun = threading.Barrier(3, timeout=20)

    def body(pg: ProcessGroup) -> tuple[int, ...]:
        pg.barrier()
        begun.wait()
        if pg.rank() == 1:
            getattr(pg, how)()
            with pytest.raises(GroupAbortedError, match="shut down" if how == "shutdown" else "aborted"):
                pg.barrier()
            return (1,)
        with pytest.raises(PeerLostError) as caught:
            pg.all_reduce(torch.ones(2))
        return caught.value.ranks

    assert tenant.run(3, body) == [(1,)] * 3


def test_revoked_groups_shrink(tenant: BackendCase) -> None:
    begun = threading.Barrier(3, timeout=20)

    def body(pg: ProcessGroup) -> float:
        pg.barrier()
        begun.wait()
        if pg.rank() == 0:
            pg.revoke()
        with pytest.raises(GroupRevokedError):
            pg.all_reduce(torch.ones(2)) if pg.rank() != 1 or not tenant.p2p else pg.recv(torch.ones(1), 2)
        assert pg.agree(0b110 | pg.rank()).flags == 0b110
        with pg.shrink() as left:
            return _total(left)

    assert tenant.run(3, body) == [6.0] * 3
