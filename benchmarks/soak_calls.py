"""The operations of a soak: each is called on a group, and returns whether the result is right."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from soak_plan import Step, reduced, values

from dist2 import ProcessGroup, ReduceOp

REDUCTIONS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX}


def _all_reduce(pg: ProcessGroup, step: Step) -> bool:
    tensor = values(step, pg.rank())
    pg.all_reduce(tensor, REDUCTIONS[step.reduction])
    return torch.equal(tensor, reduced(step, pg.size()))


def _async_all_reduce(pg: ProcessGroup, step: Step) -> bool:
    """Have several under way at once, with something else between issue and wait."""
    steps = [attrs.evolve(step, salt=step.salt + n) for n in range(3)]
    tensors = [values(each, pg.rank()) for each in steps]
    works = [pg.all_reduce(tensor, REDUCTIONS[step.reduction], async_op=True) for tensor in tensors]
    wanted = [reduced(each, pg.size()) for each in steps]
    for work in works:
        work.wait()
    return all(map(torch.equal, tensors, wanted))


def _broadcast(pg: ProcessGroup, step: Step) -> bool:
    root = step.salt % pg.size()
    tensor = values(step, pg.rank())
    pg.broadcast(tensor, root)
    return torch.equal(tensor, values(step, root))


def _reduce(pg: ProcessGroup, step: Step) -> bool:
    root = step.salt % pg.size()
    tensor = values(step, pg.rank())
    pg.reduce(tensor, root, REDUCTIONS[step.reduction])
    return pg.rank() != root or torch.equal(tensor, reduced(step, pg.size()))


def _all_gather(pg: ProcessGroup, step: Step) -> bool:
    everything = torch.empty(pg.size() * step.numel, dtype=step.dtype)
    pg.all_gather_single(everything, values(step, pg.rank()))
    return torch.equal(everything, torch.cat([values(step, rank) for rank in range(pg.size())]))


def _reduce_scatter(pg: ProcessGroup, step: Step) -> bool:
    mine = torch.empty(step.numel, dtype=step.dtype)
    pg.reduce_scatter_single(mine, values(step, pg.rank(), pg.size()), REDUCTIONS[step.reduction])
    return torch.equal(mine, reduced(step, pg.size(), pg.size()).split(step.numel)[pg.rank()])


def _all_to_all(pg: ProcessGroup, step: Step) -> bool:
    received = torch.empty(pg.size() * step.numel, dtype=step.dtype)
    pg.all_to_all_single(received, values(step, pg.rank(), pg.size()))
    wanted = [values(step, rank, pg.size()).split(step.numel)[pg.rank()] for rank in range(pg.size())]
    return torch.equal(received, torch.cat(wanted))


def _ring(pg: ProcessGroup, step: Step) -> bool:
    rank, size = pg.rank(), pg.size()
    received = torch.empty(step.numel, dtype=step.dtype)
    sending = pg.isend(values(step, rank), (rank + 1) % size)
    pg.recv(received, (rank - 1) % size)
    sending.wait()
    return torch.equal(received, values(step, (rank - 1) % size))


def _barrier(pg: ProcessGroup, step: Step) -> bool:
    pg.barrier()
    return True


CALLS: dict[str, Callable[[ProcessGroup, Step], bool]] = {
    "all_reduce": _all_reduce,
    "async_all_reduce": _async_all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ring": _ring,
    "barrier": _barrier,
}
