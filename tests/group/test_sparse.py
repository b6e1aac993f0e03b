"""`all_reduce` of sparse tensors, by the object, under c10d's name and from DDP."""

from __future__ import annotations

import pytest
import torch
from support.ranks import Tenant, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist2 import InvalidUsageError, ProcessGroup, ReduceOp

SOCKET = Tenant("socket", "socket")
BOTH = pytest.mark.parametrize("backend", ["socket", "gloo"])


def mine(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows 0 and ``rank`` of 4 x 2, row 0 twice; rank 2 has none."""
    places = torch.tensor([[0, rank, 0]])
    values = torch.arange(6.0).view(3, 2).to(dtype) * (rank + 1)
    count = 0 if rank == 2 else 3
    return torch.sparse_coo_tensor(places[:, :count], values[:count], (4, 2), check_invariants=True)


@BOTH
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_sum_of_all_ranks(backend: str, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64):
            expected = sum(mine(rank, dtype).to_dense() for rank in range(pg.size()))
            pg.all_reduce(tensor := mine(pg.rank(), dtype))
            assert tensor.is_sparse
            assert tensor.to_dense().equal(expected)
            (result,) = pg.allreduce([tensor := mine(pg.rank(), dtype)]).get_future().wait()
            assert result.to_dense().equal(expected)
            assert tensor.to_dense().equal(expected)
        pg.all_reduce(tensor := mine(pg.rank()), ReduceOp.AVG)
        torch.testing.assert_close(
            tensor.to_dense(), sum(mine(rank).to_dense() for rank in range(pg.size())) / pg.size()
        )

    run_ranks(world_size, body, Tenant(backend, backend))


def test_what_is_refused() -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match="max does not support sparse tensors"):
            pg.all_reduce(mine(0), ReduceOp.MAX)
        with pytest.raises(InvalidUsageError, match="inside a coalescing block"), pg.coalescing():
            pg.all_reduce(mine(0))
        other = torch.eye(3).to_sparse() if pg.rank() else mine(0)
        with pytest.raises(
            InvalidUsageError, match=r"rank 1 has \(3, 3\) with 2 sparse .* rank 0 has \(4, 2\) with 1"
        ):
            pg.all_reduce(other)
        pg.all_reduce(mine(pg.rank()))

    run_ranks(2, body, SOCKET)


def test_ddp_of_a_sparse_embedding() -> None:
    def body(pg: ProcessGroup) -> torch.Tensor:
        torch.manual_seed(0)
        words = nn.Embedding(8, 3, sparse=True)
        torch.manual_seed(0)
        alone = nn.Embedding(8, 3)
        model = DistributedDataParallel(words, process_group=pg)
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([pg.rank(), 5])).sum().backward()
        for rank in range(pg.size()):
            (alone(torch.tensor([rank, 5])).sum() / pg.size()).backward()
        assert words.weight.grad is not None
        assert words.weight.grad.is_sparse
        assert alone.weight.grad is not None
        torch.testing.assert_close(words.weight.grad.to_dense(), alone.weight.grad)
        return words.weight.grad.to_dense()

    first, second = run_ranks(2, body, SOCKET)
    assert first.equal(second)
