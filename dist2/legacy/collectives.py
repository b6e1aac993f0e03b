"""The collectives of the global API: each finds its group and calls the method of it.

Common to all: ``group`` is the group to act on, by default the default group; a rank that is not in it gets a
warning and None. ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks of the group:
give one of the two. With ``async_op=True`` the result is a `Work`; otherwise the operation is complete and
the result is None. The method of the same name of `dist2.ProcessGroup` documents each operation and its
errors.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp
from typing_extensions import deprecated

from dist2.errors import InvalidUsageError
from dist2.legacy.checks import Tensors, limit, list_at_root, many, one, split_sizes
from dist2.legacy.world import Group, asked, group_or_warn, group_ranks_or_warn
from dist2.operation.work import Work

Tensor = torch.Tensor
TensorFuture = torch.futures.Future[list[Tensor]]


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the tensor of ``src`` over that of every other rank."""
    if (found := group_ranks_or_warn(group, "broadcast")) is None:
        return None
    root = found.group_rank(src, group_src)
    return asked(found.pg.broadcast(one(tensor, "tensor"), root, async_op=async_op), async_op)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine the tensors of all ranks, in place on every rank."""
    if (pg := group_or_warn(group, "all_reduce")) is None:
        return None
    return asked(pg.all_reduce(one(tensor, "tensor"), op, async_op=async_op), async_op)


@deprecated(
    "`all_reduce_coalesced` is deprecated: use `ProcessGroup.all_reduce_coalesced`", category=FutureWarning
)
def all_reduce_coalesced(
    tensors: Tensors, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> TensorFuture | None:
    """Combine each tensor of a list with its counterparts; with ``async_op``, return a future of them."""
    tensors = many([tensors] if isinstance(tensors, Tensor) else tensors, "tensors")
    if (pg := group_or_warn(group, "all_reduce_coalesced")) is None:
        return None
    work = pg.all_reduce_coalesced(tensors, op, async_op=async_op)
    return work.get_future() if async_op else None


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine the tensors of all ranks at ``dst``; the others keep theirs unchanged."""
    if (found := group_ranks_or_warn(group, "reduce")) is None:
        return None
    root = found.group_rank(dst, group_dst)
    return asked(found.pg.reduce(one(tensor, "tensor"), root, op, async_op=async_op), async_op)


def all_gather(
    tensor_list: Tensors, tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Collect the tensor of every rank on every rank; sizes may differ by rank."""
    if (pg := group_or_warn(group, "all_gather")) is None:
        return None
    source = one(tensor, "tensor")
    outputs = many(tensor_list, "tensor_list", source)
    even = all(output.numel() == source.numel() for output in outputs)
    gather_all = pg.all_gather if even else pg.all_gather_v
    return asked(gather_all(outputs, source, async_op=async_op), async_op)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Collect the tensor of every rank, one after the other, in one tensor on every rank."""
    if (pg := group_or_warn(group, "all_gather_single")) is None:
        return None
    output, source = one(output_tensor, "output_tensor"), one(input_tensor, "input_tensor")
    return asked(pg.all_gather_single(output, source, async_op=async_op), async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Do `all_gather_single`."""
    return all_gather_single(output_tensor, input_tensor, group, async_op)


@deprecated("`_all_gather_base` is deprecated: use `all_gather_single`", category=FutureWarning)
def _all_gather_base(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    return all_gather_single(output_tensor, input_tensor, group, async_op)


@deprecated("`all_gather_coalesced` is deprecated: use `ProcessGroup.coalescing`", category=FutureWarning)
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: Tensors,
    group: Group = None,
    async_op: bool = False,
) -> TensorFuture | None:
    """Collect each tensor of a list: tensor i of rank r arrives in ``output_tensor_lists[r][i]``."""
    if (pg := group_or_warn(group, "all_gather_coalesced")) is None:
        return None
    inputs = many(input_tensor_list, "input_tensor_list")
    outputs = [many(row, "output_tensor_lists") for row in output_tensor_lists]
    work = pg.allgather_coalesced(outputs, inputs, async_op=async_op)
    return work.get_future() if async_op else None


def gather(
    tensor: Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collect the tensor of every rank at ``dst`` (by default global rank 0), which alone passes a list."""
    if (found := group_ranks_or_warn(group, "gather")) is None:
        return None
    root, source = found.group_rank(dst, group_dst, default=0), one(tensor, "tensor")
    outputs = list_at_root(gather_list, "gather_list", found.pg.rank() == root, "destination", source)
    return asked(found.pg.gather(outputs, source, root, async_op=async_op), async_op)


def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collect the tensor of every rank in one tensor at ``dst`` (by default global rank 0), in order of rank.

    Args:
        tensor: The caller's.
        gather_tensor: At ``dst``: contiguous, with the elements of all ranks; ignored elsewhere.
    """
    if (found := group_ranks_or_warn(group, "gather_single")) is None:
        return None
    root, source = found.group_rank(dst, group_dst, default=0), one(tensor, "tensor")
    at_root = found.pg.rank() == root
    if at_root and gather_tensor is None:
        raise InvalidUsageError("gather_tensor must be specified on the destination rank")
    whole = one(gather_tensor, "gather_tensor") if at_root else None
    return asked(found.pg.gather_single(whole, source, root=root, async_op=async_op), async_op)


def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Do `gather_single`."""
    return gather_single(tensor, gather_tensor, dst, group, async_op, group_dst)


def scatter(
    tensor: Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Give each rank its tensor of the list of ``src`` (by default global rank 0)."""
    if (found := group_ranks_or_warn(group, "scatter")) is None:
        return None
    root, output = found.group_rank(src, group_src, default=0), one(tensor, "tensor")
    inputs = list_at_root(scatter_list, "scatter_list", found.pg.rank() == root, "source", output)
    return asked(found.pg.scatter(output, inputs, root, async_op=async_op), async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Tensors,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine tensor r of the lists of all ranks at rank r; sizes may differ by r."""
    if (pg := group_or_warn(group, "reduce_scatter")) is None:
        return None
    result = one(output, "output")
    inputs = many(input_list, "input_list", result)
    even = all(tensor.numel() == result.numel() for tensor in inputs)
    scatter_all = pg.reduce_scatter if even else pg.reduce_scatter_v
    return asked(scatter_all(result, inputs, op, async_op=async_op), async_op)


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine the inputs of all ranks and leave the r-th part of the result at rank r."""
    if (pg := group_or_warn(group, "reduce_scatter_single")) is None:
        return None
    result, source = one(output, "output"), one(input, "input")
    return asked(pg.reduce_scatter_single(result, source, op, async_op=async_op), async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Do `reduce_scatter_single`."""
    return reduce_scatter_single(output, input, op, group, async_op)


@deprecated("`_reduce_scatter_base` is deprecated: use `reduce_scatter_single`", category=FutureWarning)
def _reduce_scatter_base(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    return reduce_scatter_single(output, input, op, group, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange row blocks of dimension 0, of the split sizes; by default of equal size."""
    if (pg := group_or_warn(group, "all_to_all_single")) is None:
        return None
    result, source = one(output, "output"), one(input, "input")
    splits = split_sizes(output_split_sizes), split_sizes(input_split_sizes)
    return asked(pg.all_to_all_single(result, source, *splits, async_op=async_op), async_op)


def all_to_all(
    output_tensor_list: Tensors, input_tensor_list: Tensors, group: Group = None, async_op: bool = False
) -> Work | None:
    """Send tensor r of a list to rank r, and receive one from each; sizes may differ."""
    if (pg := group_or_warn(group, "all_to_all")) is None:
        return None
    outputs = many(output_tensor_list, "output_tensor_list")
    inputs = many(input_tensor_list, "input_tensor_list")
    return asked(pg.all_to_all(outputs, inputs, async_op=async_op), async_op)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Return when every rank has called. ``device_ids`` is ignored: no device takes part."""
    if (pg := group_or_warn(group, "barrier")) is None:
        return None
    return asked(pg.barrier(limit(timeout), async_op=async_op), async_op)


def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when every rank has called; otherwise name the missing ranks. Works on every backend."""
    if isinstance(timeout, float):
        warnings.warn(f"Please specify timeout arg as a timedelta, got {timeout} s", stacklevel=2)
        timeout = timedelta(seconds=timeout)
    if (pg := group_or_warn(group, "monitored_barrier")) is not None:
        pg.monitored_barrier(limit(timeout), wait_all_ranks)
