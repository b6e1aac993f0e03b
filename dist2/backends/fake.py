"""The backend without peers: one process plays one rank of a world that does not exist.

For runs where only shapes matter: tracing, memory estimates, a sharded model laid out on ``meta``
tensors. Nothing is sent, nothing waits, any world size costs nothing. Every other rank is taken to
have contributed the same as this one, and no arithmetic is done: reductions leave their tensor as it is.
torch's ``FakeProcessGroup`` does the same.
"""

from __future__ import annotations

import torch

from dist2.backends.base import Backend, GroupSpec, Tensors
from dist2.errors import UnknownOptionError
from dist2.operation.record import Operation


def create(spec: GroupSpec) -> FakeBackend:
    """Return the backend of a group without peers.

    Raises:
        UnknownOptionError: It has no options, so any is unknown.
    """
    for option in spec.options:
        raise UnknownOptionError(f"backend 'fake' has no option {option!r}; it has none")
    return FakeBackend(spec)


class FakeBackend(Backend):
    """Completes every operation at once, from this rank's tensors alone."""

    has_peers = False
    device_types = ("cpu", "cuda", "meta", "mps", "xpu", "hpu", "mtia")

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Leave the tensor as it is."""

    def all_reduce_coalesced(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Leave the tensors as they are."""

    def broadcast(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Leave the tensor as it is."""

    def reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Leave the tensor as it is."""

    def all_gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Copy the input to every output."""
        for output in outputs:
            _copy(inputs[0], output)

    def all_gather_v(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Copy the input to every output, as far as both reach."""
        self.all_gather(operation, inputs, outputs)

    def all_gather_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Fill the output with copies of the input."""
        source, target = inputs[0].detach().reshape(-1), outputs[0].detach()
        target.copy_(source.repeat(self.world_size).view(target.shape))

    def reduce_scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Copy the part of this rank."""
        _copy(inputs[self.rank], outputs[0])

    def gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Copy the input to every output, at the root."""
        self.all_gather(operation, inputs, outputs)

    def scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Copy the part of this rank at the root; elsewhere leave the output as it is."""
        if inputs:
            _copy(inputs[self.rank], outputs[0])

    def all_to_all(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Copy each input to the output beside it, as far as both reach."""
        for source, output in zip(inputs, outputs, strict=True):
            _copy(source, output)

    def barrier(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Return."""

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Drop the tensor."""

    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Leave the tensor as it is; from any rank means from this one."""
        peer = operation.signature.peer
        operation.source = self.rank if peer is None else peer

    def shutdown(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing can block."""


create.has_peers = FakeBackend.has_peers  # type: ignore[attr-defined]  # `new_group` waits for no rank


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy element by element in row-major order, up to the shorter of the two."""
    if source.shape == target.shape:
        target.detach().copy_(source.detach())
        return
    count = min(source.numel(), target.numel())
    merged = target.detach().reshape(-1).clone()
    merged[:count] = source.detach().reshape(-1)[:count]
    target.detach().copy_(merged.view(target.shape))
