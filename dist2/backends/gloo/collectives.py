"""The collectives of a Gloo group; the others are built from these (see `Backend`).

Tensors that are only moved travel as bytes, so every dtype works. Reductions run in a
dtype that Gloo has (`carriers`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import Tensors
from dist2.backends.carriers import Landing, as_bytes, carrier_of, finish, plain, scale_before
from dist2.backends.gloo.core import GlooCore, left
from dist2.operation.record import Operation


class Collectives(GlooCore):
    """They block: the group runs asynchronous ones on the thread of its queue."""

    # Moving

    def broadcast(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing = Landing(outputs[0], loaded=True)
        options = _options(c10d.BroadcastOptions, operation)
        options.rootTensor = 0
        self.run(operation, lambda native: native.broadcast([landing.bytes], options))
        landing.land()

    def all_gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landings = [Landing(output) for output in outputs]
        parts, mine = [[landing.bytes for landing in landings]], [as_bytes(inputs[0])]
        options = _options(c10d.AllgatherOptions, operation)
        self.run(operation, lambda native: native.allgather(parts, mine, options))
        for landing in landings:
            landing.land()

    def all_gather_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing, mine = Landing(outputs[0]), as_bytes(inputs[0])
        options = _options(c10d.AllgatherOptions, operation)
        self.run(operation, lambda native: native._allgather_base(landing.bytes, mine, options))
        landing.land()

    def gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landings = [Landing(output) for output in outputs]
        parts = [[landing.bytes for landing in landings]] if landings else []
        mine, options = [as_bytes(inputs[0])], _options(c10d.GatherOptions, operation)
        self.run(operation, lambda native: native.gather(parts, mine, options))
        for landing in landings:
            landing.land()

    def scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing = Landing(outputs[0])
        parts = [[as_bytes(tensor) for tensor in inputs]] if inputs else []
        options = _options(c10d.ScatterOptions, operation)
        self.run(operation, lambda native: native.scatter([landing.bytes], parts, options))
        landing.land()

    def all_to_all(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        sent = torch.cat([as_bytes(tensor) for tensor in inputs])
        sizes, landings = [each.nbytes for each in inputs], [Landing(output) for output in outputs]
        received_sizes = [each.nbytes for each in outputs]
        received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=sent.device)
        options = _options(c10d.AllToAllOptions, operation)
        self.run(
            operation, lambda native: native.alltoall_base(received, sent, received_sizes, sizes, options)
        )
        for landing, part in zip(landings, received.split(received_sizes), strict=True):
            landing.bytes.copy_(part)
            landing.land()

    def barrier(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        options = _options(c10d.BarrierOptions, operation)
        self.run(operation, lambda native: native.barrier(options))

    # Reducing

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing = Landing(outputs[0], loaded=True)
        self._combine(operation, landing.flat, "allreduce", _options(c10d.AllreduceOptions, operation))
        landing.land()

    def reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        options = _options(c10d.ReduceOptions, operation)
        options.rootTensor = 0
        if outputs:
            landing = Landing(outputs[0], loaded=True)
            self._combine(operation, landing.flat, "reduce", options)
            landing.land()
        else:  # Gloo leaves partial sums on the other ranks: give it a copy there
            self._combine(operation, plain(inputs[0]).clone(), "reduce", options)

    def _combine(self, operation: Operation, flat: torch.Tensor, name: str, options: Any) -> None:
        """Reduce a flat tensor, in place, by a method of torch's object."""
        signature = operation.signature
        reduction = signature.reduction
        assert reduction is not None  # the group gives one to every reducing operation
        carrier = carrier_of(flat.dtype, reduction, signature.kind.value, signature.group.backend)
        scale_before(flat, reduction)
        carried = carrier.load(flat)
        options.reduceOp = getattr(c10d.ReduceOp, carrier.kind.name)
        self.run(operation, lambda native: getattr(native, name)([carried], options))
        finish(carrier, carried, flat, reduction, self.world_size)


def _options(kind: type[Any], operation: Operation) -> Any:
    """Return c10d options of a kind, with the operation's root and remaining time."""
    options = kind()
    options.timeout = left(operation)
    if operation.signature.root is not None:
        options.rootRank = operation.signature.root
    return options
