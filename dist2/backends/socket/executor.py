"""Runs message schedules on an endpoint.

executor = MessageExecutor(endpoint)
plan = executor.bind(schedule, dtype, reduction, input_numels, output_numels)    # once a signature
executor.run(plan, operation, inputs, outputs)                                   # every call
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.memory import bytes_of, copy_bytes
from dist2.backends.socket.plan import Combine, Messages, Place, Plan, plan_of
from dist2.backends.socket.transport.base import Endpoint, Transfer
from dist2.operation import Operation
from dist2.ops import Reduction

SCRATCH_KEPT_BYTES = 64 << 20
"""Scratch up to this size is kept from call to call: new memory costs a page fault every 4 KiB."""

SLICES_KEPT = 1024

Tensors = Sequence[torch.Tensor]


class MessageExecutor:
    """Runs schedules of `Exchange`, `Copy` and `Fold` steps for one member of a group.

    One operation at a time, as groups run them.

    Args:
        endpoint: The group's messages.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._scratch = Scratch(0)

    def bind(
        self,
        schedule: Schedule,
        dtype: torch.dtype,
        reduction: Reduction | None,
        input_numels: Sequence[int],
        output_numels: Sequence[int],
    ) -> Plan:
        """Plan a schedule for lists of tensors with these numbers of elements.

        Raises:
            InvalidUsageError: The reduction has no meaning for the dtype.
        """
        return plan_of(schedule, dtype, reduction, self.endpoint.world_size, input_numels, output_numels)

    def run(self, plan: Plan, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run a plan.

        Args:
            plan: From `bind`.
            operation: Gives sequence number, fingerprint and deadline.
            inputs: Contiguous tensors of the lengths planned for.
            outputs: Likewise; they may be the inputs.

        Raises:
            OperationTimeoutError, PeerLostError, MismatchError, GroupAbortedError: See `Endpoint.wait`.
                The tensors are free when it raises; outputs hold anything.
        """
        scratch = self._scratch_of(plan.scratch)
        memories: list[Memory] = [Memory(tensor) for tensor in (*inputs, *outputs)]
        memories.append(scratch)
        for action in plan.actions:
            if isinstance(action, Messages):
                self._exchange(action, operation, memories)
            elif isinstance(action, Combine):
                srcs = [memories[src.memory].elements(src, plan.dtype) for src in action.srcs]
                action.fold(memories[action.dst.memory].elements(action.dst, plan.dtype), srcs)
            else:
                dst = memories[action.dst.memory].address + action.dst.start
                src = memories[action.src.memory].address + action.src.start
                if dst != src:  # else the caller's input is its output
                    copy_bytes(dst, src, action.dst.nbytes)

    def _exchange(self, messages: Messages, operation: Operation, memories: Sequence[Memory]) -> None:
        """Start messages, receives first so that payloads find their place, and wait for all."""
        endpoint, seq, fingerprint = self.endpoint, operation.seq, operation.signature.fingerprint
        transfers: list[Transfer] = []
        try:
            for peer, step, place in messages.recvs:
                buffer = memories[place.memory].bytes(place)
                transfers.append(endpoint.recv(peer, seq, step, fingerprint, buffer))
            for peer, step, place in messages.sends:
                data = memories[place.memory].bytes(place)
                transfers.append(endpoint.send(peer, seq, step, fingerprint, data))
        except BaseException:
            endpoint.cancel(transfers)
            raise
        endpoint.wait(transfers, operation.deadline_ns)

    def _scratch_of(self, nbytes: int) -> Scratch:
        if nbytes > SCRATCH_KEPT_BYTES:
            return Scratch(nbytes)
        if nbytes > self._scratch.nbytes:
            self._scratch = Scratch(max(nbytes, min(2 * self._scratch.nbytes, SCRATCH_KEPT_BYTES)))
        return self._scratch


class Memory:
    """One tensor as bytes and as elements.

    Attributes:
        address: Of its first byte.
    """

    __slots__ = ("_flat", "_view", "address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._view: memoryview | None = None
        self._flat: torch.Tensor | None = None

    def bytes(self, place: Place) -> memoryview:
        """Return a stretch as bytes."""
        if self._view is None:
            self._view = bytes_of(self.tensor)
        return self._view[place.start : place.stop]

    def elements(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        """Return a stretch as a flat tensor that may be written to."""
        if self._flat is None:
            self._flat = self.tensor.detach().view(-1)
        itemsize = dtype.itemsize
        if place.nbytes == self._flat.numel() * itemsize:
            return self._flat
        return self._flat[place.start // itemsize : place.stop // itemsize]


class Scratch(Memory):
    """Memory of the executor's own; remembers the tensors that plans made of it.

    Args:
        nbytes: How much.
    """

    __slots__ = ("_slices", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // 16)) * 16  # the largest element is a complex128
        super().__init__(torch.empty(self.nbytes, dtype=torch.uint8))
        self._slices: dict[tuple[Place, torch.dtype], torch.Tensor] = {}

    def elements(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        found = self._slices.get((place, dtype))
        if found is None:
            if len(self._slices) >= SLICES_KEPT:
                self._slices.clear()
            found = self._slices[place, dtype] = self.tensor[place.start : place.stop].view(dtype)
        return found
