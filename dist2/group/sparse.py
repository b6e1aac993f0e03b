"""The sum of sparse tensors: ``all_reduce`` of a COO tensor, as DDP calls it for ``Embedding(sparse=True)``.

Ranks have different numbers of elements at different places, so nothing can be added in place. All ranks
gather the shapes, then the indices, then the values, and add the elements in the order of ranks. The three
exchanges are collectives of dense tensors: the recorder and the metrics show these.
"""

from __future__ import annotations

from typing import Any

import torch

from dist2.errors import InvalidUsageError
from dist2.operation.kinds import ReduceKind, Reduction
from dist2.operation.runner import Timeout
from dist2.operation.validation import check_device
from dist2.operation.work import Work

_SUMS = (ReduceKind.SUM, ReduceKind.AVG)


def all_reduce_sparse(pg: Any, tensor: torch.Tensor, reduction: Reduction, timeout: Timeout) -> Work:
    """Add the sparse tensors of all ranks; every rank's tensor becomes the result, which is coalesced.

    Args:
        pg: The group.
        tensor: Read and overwritten. Same shape, and same number of sparse dimensions, on all ranks.
        reduction: A sum or an average.
        timeout: Limit of each of the three exchanges.

    Returns:
        A Work that is complete.

    Raises:
        InvalidUsageError: Ranks disagree on the shape, or the reduction does not support sparse tensors.
    """
    check_device(tensor, "tensor", pg._taken_types)
    if reduction.kind not in _SUMS or reduction.factor is not None:
        raise InvalidUsageError(f"op {reduction} does not support sparse tensors: SUM and AVG do")
    mine = tensor.detach().coalesce()
    counts = _counts(pg, mine, timeout)
    indices, _ = _gathered(pg, mine.indices().t().contiguous(), counts, timeout)
    values, work = _gathered(pg, mine.values(), counts, timeout)
    total = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False).coalesce()
    if reduction.kind is ReduceKind.AVG:
        total = (total / pg.size()).to(tensor.dtype)
    with torch.no_grad():  # a detached sparse tensor would be another one, with elements of its own
        tensor.copy_(total)
    return Work(work.operation, (tensor,))


def _counts(pg: Any, mine: torch.Tensor, timeout: Timeout) -> list[int]:
    """Return how many elements each rank has, once all ranks have agreed on the shape."""
    shape = torch.tensor([mine._nnz(), mine.sparse_dim(), *mine.shape], device=mine.device)
    shapes = shape.new_empty((pg.size(), len(shape)))
    pg.all_gather_single(shapes, shape, timeout=timeout).wait()  # which a coalescing block refuses
    counts, rest = shapes[:, 0].tolist(), shapes[:, 1:].tolist()
    for rank, (sparse_dim, *theirs) in enumerate(rest):
        if rest[rank] != rest[0]:
            raise InvalidUsageError(
                f"sparse tensors must have the same shape on all ranks: {pg.info.names([rank])} has "
                f"{tuple(theirs)} with {sparse_dim} sparse dimensions, {pg.info.names([0])} has "
                f"{tuple(rest[0][1:])} with {rest[0][0]}"
            )
    return counts


def _gathered(pg: Any, mine: torch.Tensor, counts: list[int], timeout: Timeout) -> tuple[torch.Tensor, Work]:
    """Return the rows of all ranks, one rank after the other, and the Work of the exchange."""
    rows = mine.new_empty((sum(counts), *mine.shape[1:]))
    work = pg.all_gather_v(list(rows.split(counts)), mine.contiguous(), timeout=timeout)
    work.wait()
    return rows, work
