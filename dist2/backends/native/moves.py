"""The operations of a native backend that move tensors between all ranks."""

from __future__ import annotations

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import Tensors
from dist2.backends.carriers import Landing, as_bytes, plain
from dist2.backends.native.arguments import by_dtype, nbytes, options_of, row_bytes, spread
from dist2.backends.native.core import NativeCore
from dist2.backends.native.steps import Started, in_order
from dist2.backends.native.turns import Steps
from dist2.operation import Operation


class Moves(NativeCore):
    """Tensors travel as bytes, so every dtype goes."""

    @in_order
    def broadcast(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        landing = Landing(outputs[0], loaded=True)
        options = options_of(c10d.BroadcastOptions, operation)
        options.rootTensor = 0
        yield Started(self.native.broadcast([landing.bytes], options))
        landing.land()

    @in_order
    def all_gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        landings = [Landing(output) for output in outputs]
        parts = [[landing.bytes for landing in landings]]
        options = options_of(c10d.AllgatherOptions, operation)
        yield Started(self.native.allgather(parts, [as_bytes(inputs[0])], options))
        for landing in landings:
            landing.land()

    @in_order
    def all_gather_v(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        # Gloo gathers equal parts only: pad to the longest.
        longest = max(output.numel() for output in outputs)
        padded = inputs[0].new_empty(longest)
        padded[: inputs[0].numel()] = plain(inputs[0])
        rows = inputs[0].new_empty(self.world_size, longest)
        yield from self._gather_rows(operation, rows, padded)
        for row, output in zip(rows, outputs, strict=True):
            spread(row, [output])

    @in_order
    def all_gather_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        landing = Landing(outputs[0])
        yield from self._gather_rows(operation, landing.flat, inputs[0])
        landing.land()

    @in_order
    def all_gather_single_coalesced(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        for alike in by_dtype(inputs):
            merged = torch.cat([plain(inputs[index]) for index in alike])
            rows = merged.new_empty(self.world_size, merged.numel())
            yield from self._gather_rows(operation, rows, merged)
            start = 0
            for index in alike:
                width = inputs[index].numel()
                spread(rows[:, start : start + width].reshape(-1), [outputs[index]])
                start += width

    def _gather_rows(self, operation: Operation, rows: torch.Tensor, mine: torch.Tensor) -> Steps:
        """Gather flat tensors of one size, one after the other."""
        options = options_of(c10d.AllgatherOptions, operation)
        yield Started(self.native._allgather_base(rows.view(-1).view(torch.uint8), as_bytes(mine), options))

    @in_order
    def gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        landings = [Landing(output) for output in outputs]
        parts = [[landing.bytes for landing in landings]] if landings else []
        options = options_of(c10d.GatherOptions, operation)
        yield Started(self.native.gather(parts, [as_bytes(inputs[0])], options))
        for landing in landings:
            landing.land()

    @in_order
    def scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        landing = Landing(outputs[0])
        parts = [[as_bytes(tensor) for tensor in inputs]] if inputs else []
        options = options_of(c10d.ScatterOptions, operation)
        yield Started(self.native.scatter([landing.bytes], parts, options))
        landing.land()

    @in_order
    def all_to_all(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        sent = torch.cat([as_bytes(tensor) for tensor in inputs])
        received = torch.empty(nbytes(outputs), dtype=torch.uint8, device=sent.device)
        yield from self._exchange(
            operation, received, sent, [nbytes([t]) for t in outputs], [nbytes([t]) for t in inputs]
        )
        parts = torch.split(received, [nbytes([output]) for output in outputs])
        for part, output in zip(parts, outputs, strict=True):
            landing = Landing(output)
            landing.bytes.copy_(part)
            landing.land()

    @in_order
    def all_to_all_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        signature = operation.signature
        landing = Landing(outputs[0])
        yield from self._exchange(
            operation,
            landing.bytes,
            as_bytes(inputs[0]),
            row_bytes(outputs[0], signature.output_splits, self.world_size),
            row_bytes(inputs[0], signature.input_splits, self.world_size),
        )
        landing.land()

    def _exchange(
        self,
        operation: Operation,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_bytes: list[int],
        sent_bytes: list[int],
    ) -> Steps:
        options = options_of(c10d.AllToAllOptions, operation)
        yield Started(self.native.alltoall_base(received, sent, received_bytes, sent_bytes, options))

    @in_order
    def barrier(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        yield Started(self.native.barrier(options_of(c10d.BarrierOptions, operation)))
