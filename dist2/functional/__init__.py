"""Out-of-place collectives with gradients, which `torch.compile` and `torch.export` trace.

::

    y = dist2.functional.all_reduce(x, pg)
    z = dist2.functional.all_reduce(x, pg, async_op=True)  # returns at once; waits when it is first read
    y.square().sum().backward()  # every rank calls backward: it communicates as well

Each function returns a new tensor and leaves its input unchanged. Gradients are those of the sum of all
ranks' losses: the gradient of a rank's input adds up its effects on the outputs of every rank. The backward
pass of a collective is a collective, so every rank must run it, in the same order: ``x`` requires a gradient
on all ranks or on none, and so are results with a gradient used. Compiled programs keep calls with unused
results.

The functions are custom operators of torch (``torch.ops.dist2``): `torch.compile(fullgraph=True)` and
`torch.export` keep them in their graphs, which know the group by its name and number of ranks.
`torch.func.grad`, `jvp` and `vmap` work; second derivatives too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dist2.errors import InvalidUsageError
from dist2.functional import gradients
from dist2.functional.handles import handle_of, reduction_name
from dist2.functional.started import startable, wait
from dist2.group.process_group import ProcessGroup
from dist2.operation.kinds import AnyReduceOp, ReduceOp

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
    "wait",
]

_SUM = ReduceOp.SUM

_INSTEAD = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "permute_tensor": "sendrecv",
    "isend": "send",
    "irecv": "recv",
}
"""Names of group methods and of torch's functional collectives, and the function that does the same here."""

if not TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name):
        instead = f": use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


@startable
def all_reduce(
    x: torch.Tensor, pg: ProcessGroup, op: AnyReduceOp = _SUM, *, async_op: bool = False
) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks.

    Where several ranks have the minimum or maximum, they share its gradient.

    Args:
        x: Same shape and dtype on all ranks.
        pg: The group.
        op: A `ReduceOp` or `dist2.premul_sum`.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> dist2.functional.all_reduce(x, pg).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """
    return gradients.all_reduce(x, reduction_name(op), handle_of(x, pg))


@startable
def reduce(
    x: torch.Tensor, pg: ProcessGroup, root: int = 0, op: AnyReduceOp = _SUM, *, async_op: bool = False
) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks at the root; zeros of its shape elsewhere.

    Args:
        x: Same shape and dtype on all ranks.
        pg: The group.
        root: Group rank.
        op: A `ReduceOp` or `dist2.premul_sum`.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> y = dist2.functional.reduce(torch.ones(2), pg, root=0)
        >>> y.tolist() == ([2.0, 2.0] if pg.rank() == 0 else [0.0, 0.0])
        True
    """
    return gradients.reduce(x, root, reduction_name(op), handle_of(x, pg))


@startable
def broadcast(x: torch.Tensor, pg: ProcessGroup, root: int = 0, *, async_op: bool = False) -> torch.Tensor:
    """Return the tensor of the root.

    Args:
        x: Read at the root. Elsewhere it has the same shape and dtype, requires a gradient if the root's
            does, and its gradient is zero.
        pg: The group.
        root: Group rank.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> dist2.functional.broadcast(torch.full((2,), float(pg.rank())), pg, root=1)
        tensor([1., 1.])
    """
    return gradients.broadcast(x, root, handle_of(x, pg))


@startable
def all_gather(
    x: torch.Tensor,
    pg: ProcessGroup,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Return the tensors of all ranks, one after the other in a dimension.

    Args:
        x: Same dtype on all ranks and, except in ``dim``, same shape. A tensor without dimensions counts as
            one of shape (1,).
        pg: The group.
        dim: Dimension that grows.
        sizes: Size of ``dim`` on each rank; None if it is the same on all ranks.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Raises:
        InvalidUsageError: ``sizes`` has not one entry for each rank, or differs from ``x`` on this rank.

    Examples:
        >>> dist2.functional.all_gather(torch.full((2,), float(pg.rank())), pg)
        tensor([0., 0., 1., 1.])
        >>> dist2.functional.all_gather(torch.ones(pg.rank() + 1), pg, sizes=[1, 2])
        tensor([1., 1., 1.])
    """
    group = handle_of(x, pg)
    x = x.reshape(1) if x.dim() == 0 else x
    rows = x.movedim(dim, 0)
    if sizes is None:
        whole = gradients.all_gather(rows, [rows.shape[0]] * pg.size(), 0, group)
    else:
        _check_sizes(sizes, pg, rows.shape[0], pg.rank())
        whole = gradients.all_gather(rows, sizes, pg.rank(), group)
    return whole.movedim(0, dim)


@startable
def reduce_scatter(
    x: torch.Tensor,
    pg: ProcessGroup,
    op: AnyReduceOp = _SUM,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Return this rank's part of the reduction of the tensors of all ranks.

    Args:
        x: Same shape and dtype on all ranks.
        pg: The group.
        op: A `ReduceOp` or `dist2.premul_sum`.
        dim: Dimension that is cut.
        sizes: Size of ``dim`` in the result of each rank; None for equal parts.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Raises:
        InvalidUsageError: ``dim`` cannot be cut into equal parts, or not into ``sizes``.

    Examples:
        >>> y = dist2.functional.reduce_scatter(torch.tensor([1.0, 2.0]), pg)
        >>> y.tolist() == [2.0 * (pg.rank() + 1)]
        True
    """
    group, word = handle_of(x, pg), reduction_name(op)
    rows = x.movedim(dim, 0)
    if sizes is None:
        part = gradients.reduce_scatter(rows, word, [_part(x, dim, pg)] * pg.size(), 0, group)
    else:
        _check_sizes(sizes, pg, _size(x, dim), None)
        part = gradients.reduce_scatter(rows, word, sizes, pg.rank(), group)
    return part.movedim(0, dim)


@startable
def gather(
    x: torch.Tensor, pg: ProcessGroup, root: int = 0, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    """Return the tensors of all ranks at the root, one after the other in a dimension.

    On the other ranks, the size of that dimension is 0; they call backward on it (``y.sum()``) as the root
    does.

    Args:
        x: Same shape and dtype on all ranks.
        pg: The group.
        root: Group rank.
        dim: Dimension that grows.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> y = dist2.functional.gather(torch.ones(2), pg, root=0)
        >>> tuple(y.shape) == ((4,) if pg.rank() == 0 else (0,))
        True
    """
    group = handle_of(x, pg)
    x = x.reshape(1) if x.dim() == 0 else x
    return gradients.gather(x.movedim(dim, 0), root, pg.rank(), group).movedim(0, dim)


@startable
def scatter(
    x: torch.Tensor, pg: ProcessGroup, root: int = 0, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    """Return this rank's part of the root's tensor, which is cut into equal parts.

    Args:
        x: Read at the root. Elsewhere it has the same shape and dtype, requires a gradient if the root's
            does, and its gradient is zero.
        pg: The group.
        root: Group rank.
        dim: Dimension that is cut.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Raises:
        InvalidUsageError: ``dim`` cannot be cut into equal parts.

    Examples:
        >>> y = dist2.functional.scatter(torch.tensor([0.0, 1.0]), pg, root=0)
        >>> y.item() == pg.rank()
        True
    """
    group, rows = handle_of(x, pg), _part(x, dim, pg)
    part = gradients.scatter(x.movedim(dim, 0), rows, root, pg.rank(), group)
    return part.movedim(0, dim)


@startable
def all_to_all(
    x: torch.Tensor,
    pg: ProcessGroup,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    *,
    async_op: bool = False,
) -> torch.Tensor:
    """Send parts of dimension 0 to the ranks and return those that the ranks sent to this one, by rank.

    Args:
        x: The parts, by rank.
        pg: The group.
        output_sizes: Rows that each rank sends to this one; None for equal parts.
        input_sizes: Rows sent to each rank; None for equal parts.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Raises:
        InvalidUsageError: Dimension 0 cannot be cut into equal parts, or not into ``input_sizes``; or one of
            the two is None.

    Examples:
        >>> y = dist2.functional.all_to_all(torch.tensor([0.0, 1.0]), pg)
        >>> y.tolist() == [pg.rank(), pg.rank()]
        True
    """
    group = handle_of(x, pg)
    if (output_sizes is None) != (input_sizes is None):
        raise InvalidUsageError(
            f"output_sizes is {output_sizes} and input_sizes is {input_sizes}: pass both, or neither for "
            f"equal parts"
        )
    if output_sizes is None or input_sizes is None:
        output_sizes = input_sizes = [_part(x, 0, pg)] * pg.size()
    else:
        _check_sizes(input_sizes, pg, _size(x, 0), None, "input_sizes")
        _check_sizes(output_sizes, pg, sum(output_sizes), None, "output_sizes")
    return gradients.all_to_all(x, output_sizes, input_sizes, group)


@startable
def send(
    x: torch.Tensor, pg: ProcessGroup, dst: int, tag: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    """Send a tensor to a rank; return a zero without dimensions.

    Add the zero to the loss: the backward pass then receives the gradient from ``dst``.

    Args:
        x: The message.
        pg: The group.
        dst: Group rank.
        tag: Tells messages between two ranks apart, in both directions.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> if pg.rank() == 0:
        ...     loss = dist2.functional.send(x, pg, dst=1)
        ... else:
        ...     loss = 3 * dist2.functional.recv(x, pg, src=0).sum()
        >>> loss.backward()
        >>> x.grad.tolist() == ([3.0, 3.0] if pg.rank() == 0 else [0.0, 0.0])
        True
    """
    return gradients.send(x, dst, tag, handle_of(x, pg))


@startable
def recv(
    x: torch.Tensor, pg: ProcessGroup, src: int, tag: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    """Return the tensor that a rank sends.

    Args:
        x: Has the shape and dtype of the message; its values are not read. If it requires a gradient, the
            backward pass sends the gradient to ``src``.
        pg: The group.
        src: Group rank.
        tag: Takes only a message of this tag.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> other = 1 - pg.rank()
        >>> work = pg.isend(torch.full((2,), float(pg.rank())), dst=other)
        >>> dist2.functional.recv(torch.empty(2), pg, src=other).tolist() == [other, other]
        True
    """
    return gradients.recv(x, src, tag, handle_of(x, pg))


@startable
def sendrecv(
    x: torch.Tensor, pg: ProcessGroup, dst: int, src: int, tag: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    """Send a tensor to a rank and return the tensor of the same shape that another rank sends.

    On a ring: ``sendrecv(x, pg, dst=(rank + 1) % size, src=(rank - 1) % size)``.

    Args:
        x: The message.
        pg: The group.
        dst: Group rank that receives ``x``.
        src: Group rank whose message is returned.
        tag: Of both messages.
        async_op: Return at once; the result waits when it is first read, see `wait`.

    Examples:
        >>> other = 1 - pg.rank()
        >>> x = torch.tensor([float(pg.rank())])
        >>> dist2.functional.sendrecv(x, pg, dst=other, src=other).item() == other
        True
    """
    return gradients.sendrecv(x, dst, src, tag, handle_of(x, pg))


def _size(x: torch.Tensor, dim: int) -> int:
    """Return the size of the dimension that is cut."""
    if x.dim() == 0:
        raise InvalidUsageError("x has no dimensions: it cannot be cut into parts, one for each rank")
    return x.shape[dim]


def _part(x: torch.Tensor, dim: int, pg: ProcessGroup) -> int:
    """Return the size of a rank's part of a dimension."""
    rows = _size(x, dim)
    if rows % pg.size():
        raise InvalidUsageError(
            f"dimension {dim} of x has size {rows}: it cannot be cut into {pg.size()} equal parts, one for "
            f"each rank"
        )
    return rows // pg.size()


def _check_sizes(
    sizes: Sequence[int], pg: ProcessGroup, rows: int, rank: int | None, argument: str = "sizes"
) -> None:
    """Check that there is one size for each rank, and that they fit the rows of this rank's tensor."""
    if len(sizes) != pg.size():
        raise InvalidUsageError(f"{argument} must have one entry for each of {pg.size()} ranks, got {sizes}")
    if min(sizes) < 0:
        raise InvalidUsageError(f"{argument} must not be negative, got {sizes}")
    expected = sum(sizes) if rank is None else sizes[rank]
    if expected != rows:
        named = argument if rank is None else f"{argument}[{rank}]"
        raise InvalidUsageError(f"{named} is {expected} rows, but x has {rows}")
