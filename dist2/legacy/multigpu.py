"""The five functions of torch 1.5 for ranks with several tensors each, one a device.

Such a rank plays as many ranks as it has tensors: rank ``r`` with ``n`` plays ``r * n`` to ``r * n + n - 1``.
It combines its own tensors, communicates once, and copies the result to its tensors. With ``async_op=True``
the thread that completes the communication copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import ReduceOp

from dist2.errors import InvalidUsageError
from dist2.legacy.checks import Tensors, many
from dist2.legacy.world import Group, group_ranks_or_warn
from dist2.operation.kinds import ReduceKind, Reduction
from dist2.operation.stream_work import StreamWork
from dist2.operation.work import Work
from dist2.runtime.completion import Completion

Tensor = torch.Tensor

_COMBINE = {
    ReduceKind.SUM: torch.add,
    ReduceKind.PRODUCT: torch.mul,
    ReduceKind.MIN: torch.minimum,
    ReduceKind.MAX: torch.maximum,
    ReduceKind.BAND: torch.bitwise_and,
    ReduceKind.BOR: torch.bitwise_or,
    ReduceKind.BXOR: torch.bitwise_xor,
}


def broadcast_multigpu(
    tensor_list: Tensors, src: int, group: Group = None, async_op: bool = False, src_tensor: int = 0
) -> Work | None:
    """Copy ``tensor_list[src_tensor]`` of ``src`` over all tensors of all ranks."""
    if (found := group_ranks_or_warn(group, "broadcast_multigpu")) is None:
        return None
    tensors = _some(tensor_list, "tensor_list")
    root = found.group_rank(src, None)
    first = tensors[_place(src_tensor, tensors, "src_tensor")] if found.pg.rank() == root else tensors[0]
    work = found.pg.broadcast(first, root, async_op=async_op)
    return _and_then(work, tensors, partial(_copy, first, tensors), async_op)


def all_reduce_multigpu(
    tensor_list: Tensors, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine all tensors of all ranks, in place in each of them."""
    if (found := group_ranks_or_warn(group, "all_reduce_multigpu")) is None:
        return None
    tensors = _some(tensor_list, "tensor_list")
    total = _combined(tensors, op)
    work = found.pg.all_reduce(total, op, async_op=async_op)
    return _and_then(work, tensors, partial(_copy, total, tensors), async_op)


def reduce_multigpu(
    tensor_list: Tensors,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Combine all tensors of all ranks, in ``tensor_list[dst_tensor]`` of ``dst``; others stay unchanged."""
    if (found := group_ranks_or_warn(group, "reduce_multigpu")) is None:
        return None
    tensors = _some(tensor_list, "tensor_list")
    root, total = found.group_rank(dst, None), _combined(tensors, op)
    written = [tensors[_place(dst_tensor, tensors, "dst_tensor")]] if found.pg.rank() == root else []
    work = found.pg.reduce(total, root, op, async_op=async_op)
    return _and_then(work, written, partial(_copy, total, written), async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Tensors],
    input_tensor_list: Tensors,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collect the tensors of all ranks in each list of ``output_tensor_lists``, by rank and device."""
    if (found := group_ranks_or_warn(group, "all_gather_multigpu")) is None:
        return None
    inputs = _some(input_tensor_list, "input_tensor_list")
    outputs = _lists(output_tensor_lists, "output_tensor_lists", len(inputs), found.pg.size() * len(inputs))
    own = torch.stack([tensor.to(inputs[0].device) for tensor in inputs])
    whole = own.new_empty((found.pg.size() * len(inputs), *inputs[0].shape))
    work = found.pg.all_gather_single(whole, own, async_op=async_op)
    written = [tensor for tensors in outputs for tensor in tensors]
    return _and_then(work, written, partial(_deal, [*whole] * len(outputs), written), async_op)


def reduce_scatter_multigpu(
    output_tensor_list: Tensors,
    input_tensor_lists: Sequence[Tensors],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the lists of all ranks and devices; each tensor of ``output_tensor_list`` gets its part."""
    if (found := group_ranks_or_warn(group, "reduce_scatter_multigpu")) is None:
        return None
    outputs = _some(output_tensor_list, "output_tensor_list")
    inputs = _lists(input_tensor_lists, "input_tensor_lists", len(outputs), found.pg.size() * len(outputs))
    device = outputs[0].device
    whole = _combined([torch.stack([tensor.to(device) for tensor in tensors]) for tensors in inputs], op)
    own = whole.new_empty((len(outputs), *outputs[0].shape))
    work = found.pg.reduce_scatter_single(own, whole, op, async_op=async_op)
    return _and_then(work, outputs, partial(_deal, own, outputs), async_op)


def _some(tensors: object, argument: str) -> Tensors:
    """Return tensors without their part in autograd's graph, as they are written in place."""
    given = many(tensors, argument)
    if not given:
        raise InvalidUsageError(f"{argument} must hold at least one tensor")
    return [tensor.detach() for tensor in given]


def _lists(lists: Sequence[Tensors], argument: str, count: int, length: int) -> list[Tensors]:
    found = [_some(each, f"{argument}[{place}]") for place, each in enumerate(lists)]
    if len(found) != count or any(len(each) != length for each in found):
        raise InvalidUsageError(
            f"{argument} must be {count} lists of {length} tensors, got lengths {list(map(len, found))}"
        )
    return found


def _place(place: int, tensors: Tensors, argument: str) -> int:
    if not 0 <= place < len(tensors):
        raise InvalidUsageError(f"{argument} must be from 0 to {len(tensors) - 1}, got {place}")
    return place


def _copy(value: Tensor, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor is not value:
            tensor.copy_(value)


def _deal(values: Iterable[Tensor], tensors: Tensors) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _and_then(work: Work, outputs: Tensors, finish: Callable[[], None], async_op: bool) -> Work | None:
    """Have a last step follow an operation; return a Work of both if ``async_op``.

    The step on a stream is enqueued here, behind the operation.
    """
    if not async_op or isinstance(work, StreamWork):
        work.wait()
        finish()
        return work if async_op else None
    done = Completion()
    both = Work(work.operation, outputs, done)
    both.helper = work.helper

    def ended() -> None:
        error = work.exception()
        try:
            if error is None:
                finish()
        except BaseException as failure:  # noqa: BLE001 - it is delivered to those that wait
            error = failure
        both.helper = None  # it refers to the Work, as in the runner
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    work.add_done_callback(ended)
    return both


def _combined(tensors: Tensors, op: Any) -> Tensor:
    """Return the combination of a rank's own tensors, in new memory."""
    kind = Reduction.of(op).kind
    if kind not in _COMBINE:
        raise InvalidUsageError(f"op must be one of torch 1.5's reductions, got {kind.name}")
    combine: Any = _COMBINE[kind]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = combine(total, tensor.to(total.device))
    return total
