"""Coalesced operations: lists of tensors in one operation, by one flat tensor for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.backends.socket.staging import Program
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature, TensorMeta

COALESCED = {
    OpKind.ALL_REDUCE_COALESCED: OpKind.ALL_REDUCE,
    OpKind.ALL_GATHER_SINGLE_COALESCED: OpKind.ALL_GATHER_SINGLE,
    OpKind.REDUCE_SCATTER_SINGLE_COALESCED: OpKind.REDUCE_SCATTER_SINGLE,
}
"""Each coalesced operation, and the one that its flat tensors go through."""

Tensors = Sequence[torch.Tensor]


@attrs.frozen(eq=False)
class Bucket:
    """The tensors of one dtype.

    Attributes:
        indices: Which of the list.
        program: Runs them as one.
        written: Elements of the flat output.
        dtype: The dtype of all tensors.
    """

    indices: tuple[int, ...]
    program: Program
    written: int
    dtype: torch.dtype


def coalesced(signature: Signature, world_size: int, make: Callable[[Signature], Program]) -> Program:
    """Return a program that packs the tensors of each dtype, runs the plain operation, and unpacks."""
    kind = COALESCED[signature.kind]
    dtypes = list(dict.fromkeys(meta.dtype for meta in signature.inputs))
    buckets = [_bucket(signature, kind, dtype, make) for dtype in dtypes]
    pack = _pack_by_rank if kind is OpKind.REDUCE_SCATTER_SINGLE else _pack
    unpack = _unpack_by_rank if kind is OpKind.ALL_GATHER_SINGLE else _unpack

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        for bucket in buckets:
            flat = pack([inputs[index].detach() for index in bucket.indices], world_size)
            result = (
                flat
                if kind is OpKind.ALL_REDUCE
                else torch.empty(bucket.written, dtype=bucket.dtype, device="cpu")
            )
            bucket.program(operation, [flat], [result])
            unpack(result, [outputs[index].detach() for index in bucket.indices], world_size)

    return run


def _bucket(
    signature: Signature, kind: OpKind, dtype: torch.dtype, make: Callable[[Signature], Program]
) -> Bucket:
    indices = tuple(index for index, meta in enumerate(signature.inputs) if meta.dtype is dtype)
    read = sum(signature.inputs[index].numel for index in indices)
    written = sum(signature.outputs[index].numel for index in indices)
    plain = attrs.evolve(
        signature,
        kind=kind,
        inputs=(TensorMeta((read,), dtype),),
        outputs=(TensorMeta((written,), dtype),),
    )
    return Bucket(indices, make(plain), written, dtype)


def _pack(tensors: Tensors, world_size: int) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: torch.Tensor, tensors: Tensors, world_size: int) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def _pack_by_rank(tensors: Tensors, world_size: int) -> torch.Tensor:
    """Put the parts of all tensors for rank 0 first, then those for rank 1, and so on."""
    rows = [tensor.reshape(world_size, tensor.numel() // world_size) for tensor in tensors]
    return torch.cat(rows, dim=1).reshape(-1)


def _unpack_by_rank(flat: torch.Tensor, tensors: Tensors, world_size: int) -> None:
    rows, start = flat.view(world_size, flat.numel() // world_size), 0
    for tensor in tensors:
        length = tensor.numel() // world_size
        tensor.copy_(rows[:, start : start + length].reshape(tensor.shape))
        start += length
