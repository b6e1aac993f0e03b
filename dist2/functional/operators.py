"""The collectives as custom operators of torch: ``torch.ops.dist2.all_reduce`` and the like.

Theory of operation. An operator takes tensors, numbers and texts, and returns a new tensor, so that graphs
of `torch.compile` and `torch.export` can hold it. Numbers that a shape depends on (rank, rows of each rank)
are arguments, so that a fake implementation needs no group. The group itself is a text, see `handle_of`; the
reduction is its name, see `reduction_name`. All operators work on dimension 0; `dist2.functional` moves
others there.

torch may drop an operator from a graph if nothing uses its result, and merge two with equal arguments. The
graphs of other ranks may differ: they would wait for the missing call, or get the message of another. So
operators are declared to have a side effect, and in a graph each call has a ``mark``: an empty tensor of its
own, the result of an operator that torch never merges. Backward passes are made of operators without a side
effect, as torch may move others into the forward pass; the formulas use all results that have elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch.fx import has_side_effect
from torch.library import CustomOpDef, custom_op

from dist2.functional.handles import group_of, reduction_of, size_of
from dist2.functional.started import finish, run

Mark = torch.Tensor | None


@attrs.frozen
class Operator:
    """An operator, and the same without a side effect, for backward passes in graphs.

    Args:
        name: Its name in ``torch.ops.dist2``.
        called: Programs call it; a graph keeps it.
        in_backward: Named ``{name}_in_backward``; a graph drops it if nothing uses its result.
    """

    name: str
    called: CustomOpDef
    in_backward: CustomOpDef

    def register_fake(self, fake: Callable[..., torch.Tensor]) -> None:
        """Register the function that computes the shape of the result."""
        self.called.register_fake(fake)
        self.in_backward.register_fake(fake)


def _operator(function: Callable[..., torch.Tensor]) -> Operator:
    name = function.__name__
    called = custom_op(f"dist2::{name}", function, mutates_args=())
    has_side_effect(getattr(torch.ops.dist2, name).default)
    return Operator(name, called, custom_op(f"dist2::{name}_in_backward", function, mutates_args=()))


def _same_shape(name: str) -> Callable[..., torch.Tensor]:
    """Return a fake implementation whose output has the shape of the first input."""

    def fake(x: torch.Tensor, *others: object) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    fake.__name__ = f"{name}_fake"
    return fake


def _rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an empty tensor like ``x`` with another size of dimension 0."""
    return x.new_empty([rows, *x.shape[1:]])


def _gathered(x: torch.Tensor, root: int, rank: int, group: str) -> torch.Tensor:
    return _rows(x, x.shape[0] * size_of(group) if rank == root else 0)


@_operator
def all_reduce(x: torch.Tensor, op: str, group: str, mark: Mark) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    run(group_of(group).all_reduce, out, reduction_of(op))
    return out


@_operator
def reduce(x: torch.Tensor, root: int, op: str, group: str, mark: Mark) -> torch.Tensor:
    """Return the reduction at the root, zeros elsewhere."""
    pg = group_of(group)
    out = x.clone(memory_format=torch.contiguous_format)
    run(pg.reduce, out, root, reduction_of(op))
    return out if pg.rank() == root else torch.zeros_like(out)


@_operator
def broadcast(x: torch.Tensor, root: int, group: str, mark: Mark) -> torch.Tensor:
    """Return the tensor of the root."""
    out = x.clone(memory_format=torch.contiguous_format)
    run(group_of(group).broadcast, out, root)
    return out


@_operator
def all_gather(x: torch.Tensor, sizes: Sequence[int], rank: int, group: str, mark: Mark) -> torch.Tensor:
    """Return the rows of all ranks; rank r has ``sizes[r]``."""
    pg, out = group_of(group), _rows(x, sum(sizes))
    if len(set(sizes)) == 1:
        run(pg.all_gather_single, out, x)
    else:
        run(pg.all_gather_v, out.split(list(sizes)), x)
    return out


@_operator
def reduce_scatter(
    x: torch.Tensor, op: str, sizes: Sequence[int], rank: int, group: str, mark: Mark
) -> torch.Tensor:
    """Return this rank's rows of the reduction; rank r has ``sizes[r]`` of them."""
    pg, out = group_of(group), _rows(x, sizes[rank])
    if len(set(sizes)) == 1:
        run(pg.reduce_scatter_single, out, x.contiguous(), reduction_of(op))
    else:
        run(pg.reduce_scatter_v, out, x.split(list(sizes)), reduction_of(op))
    return out


@_operator
def gather(x: torch.Tensor, root: int, rank: int, group: str, mark: Mark) -> torch.Tensor:
    """Return the rows of all ranks at the root, no rows elsewhere."""
    pg, out = group_of(group), _gathered(x, root, rank, group)
    run(pg.gather, list(out.chunk(pg.size())) if rank == root else None, x, root)
    return out


@_operator
def scatter(x: torch.Tensor, rows: int, root: int, rank: int, group: str, mark: Mark) -> torch.Tensor:
    """Return this rank's ``rows`` of the root's tensor."""
    pg, out = group_of(group), _rows(x, rows)
    run(pg.scatter, out, list(x.split([rows] * pg.size())) if rank == root else None, root)
    return out


@_operator
def all_to_all(
    x: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: str, mark: Mark
) -> torch.Tensor:
    """Send ``input_sizes[r]`` rows to rank r; return the rows received, ``output_sizes[r]`` from rank r."""
    out = _rows(x, sum(output_sizes))
    run(group_of(group).all_to_all_single, out, x, list(output_sizes), list(input_sizes))
    return out


@_operator
def send(x: torch.Tensor, dst: int, tag: int, group: str, mark: Mark) -> torch.Tensor:
    """Send a tensor; return a zero, which the backward pass starts from."""
    run(group_of(group).send, x, dst, tag)
    return x.new_zeros(())


@_operator
def recv(x: torch.Tensor, src: int, tag: int, group: str, mark: Mark) -> torch.Tensor:
    """Return a tensor received, of the shape of ``x``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(group_of(group).recv, out, src, tag)
    return out


@_operator
def sendrecv(x: torch.Tensor, dst: int, src: int, tag: int, group: str, mark: Mark) -> torch.Tensor:
    """Send a tensor to one rank while receiving one of its shape from another."""
    pg, out = group_of(group), torch.empty_like(x, memory_format=torch.contiguous_format)
    sending = pg.send(x, dst, tag, async_op=True)
    run(pg.recv, out, src, tag)
    finish(sending)
    return out


for _each in (all_reduce, reduce, broadcast, recv, sendrecv):
    _each.register_fake(_same_shape(_each.name))


@all_gather.register_fake
def _(x: torch.Tensor, sizes: Sequence[int], rank: int, group: str, mark: Mark) -> torch.Tensor:
    return _rows(x, sum(sizes))


@reduce_scatter.register_fake
def _(x: torch.Tensor, op: str, sizes: Sequence[int], rank: int, group: str, mark: Mark) -> torch.Tensor:
    return _rows(x, sizes[rank])


@gather.register_fake
def _(x: torch.Tensor, root: int, rank: int, group: str, mark: Mark) -> torch.Tensor:
    return _gathered(x, root, rank, group)


@scatter.register_fake
def _(x: torch.Tensor, rows: int, root: int, rank: int, group: str, mark: Mark) -> torch.Tensor:
    return _rows(x, rows)


@all_to_all.register_fake
def _(
    x: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: str, mark: Mark
) -> torch.Tensor:
    return _rows(x, sum(output_sizes))


@send.register_fake
def _(x: torch.Tensor, dst: int, tag: int, group: str, mark: Mark) -> torch.Tensor:
    return x.new_zeros(())
