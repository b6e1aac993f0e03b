"""The operations of a native backend that combine tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import Tensors
from dist2.backends.carriers import Landing, carrier_of, finish, plain, scale_before
from dist2.backends.native.arguments import by_dtype, left, spread
from dist2.backends.native.core import NativeCore
from dist2.backends.native.steps import Started, in_order
from dist2.backends.native.turns import Steps
from dist2.operation import Operation


class Reductions(NativeCore):
    """Reductions run in a dtype that the library has (see ``carriers.py``)."""

    def _combine(
        self, operation: Operation, flat: torch.Tensor, start: Callable[..., Any], options: Any
    ) -> Steps:
        """Reduce a flat tensor, in place."""
        reduction = operation.signature.reduction
        assert reduction is not None  # the group gives one to every reducing operation
        carrier = carrier_of(flat.dtype, reduction, operation.signature.kind.value, self.library.name)
        scale_before(flat, reduction)
        carried = carrier.load(flat)
        options.reduceOp = getattr(c10d.ReduceOp, carrier.kind.name)
        options.timeout = left(operation)
        yield Started(start([carried], options))
        finish(carrier, carried, flat, reduction, self.world_size)

    def _all_combine(self, operation: Operation, flat: torch.Tensor) -> Steps:
        return self._combine(operation, flat, self.native.allreduce, c10d.AllreduceOptions())

    @in_order
    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        landing = Landing(outputs[0], loaded=True)
        yield from self._all_combine(operation, landing.flat)
        landing.land()

    @in_order
    def all_reduce_coalesced(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        for alike in by_dtype(outputs):
            merged = torch.cat([plain(outputs[index]) for index in alike])
            yield from self._all_combine(operation, merged)
            spread(merged, [outputs[index] for index in alike])

    @in_order
    def reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        # Gloo leaves partial sums on the other ranks: give it a copy there.
        landing = Landing(outputs[0], loaded=True) if outputs else None
        flat = plain(inputs[0]).clone() if landing is None else landing.flat
        options: Any = c10d.ReduceOptions()
        options.rootRank, options.rootTensor = operation.signature.root, 0
        yield from self._combine(operation, flat, self.native.reduce, options)
        if landing is not None:
            landing.land()

    @in_order
    def reduce_scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        yield from self._scatter_list(operation, inputs, outputs)

    @in_order
    def reduce_scatter_v(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        yield from self._scatter_list(operation, inputs, outputs)

    def _scatter_list(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        """Combine tensors of any sizes, and keep this rank's."""
        merged = torch.cat([plain(tensor) for tensor in inputs])
        yield from self._all_combine(operation, merged)
        start = sum(tensor.numel() for tensor in inputs[: self.rank])
        spread(merged[start:], outputs)

    @in_order
    def reduce_scatter_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        yield from self._scatter_parts(operation, inputs, outputs)

    @in_order
    def reduce_scatter_single_coalesced(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Steps:
        for alike in by_dtype(outputs):
            sources, results = [inputs[index] for index in alike], [outputs[index] for index in alike]
            yield from self._scatter_parts(operation, sources, results)

    def _scatter_parts(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        """Combine concatenations of one dtype, and keep this rank's part of each."""
        blocks = [plain(tensor).view(self.world_size, tensor.numel() // self.world_size) for tensor in inputs]
        rows = torch.cat(blocks, dim=1)
        yield from self._all_combine(operation, rows.view(-1))
        spread(rows[self.rank], outputs)
