# cython: annotation_typing=False
"""`Launch`: one operation on its way to a stream: copies before, NCCL's calls, copies after.

NCCL takes contiguous memory of dtypes that it knows. Where a tensor is not like that, a copy on the same
stream stands for it. The calls are issued together once all earlier work is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from dist2.backends.base import Tensors
from dist2.backends.nccl.arithmetic import Arithmetic, moved
from dist2.backends.nccl.communicator import Communicator, Issued
from dist2.backends.nccl.device import Device, Stream
from dist2.operation.kinds import OpKind
from dist2.operation.signature import Signature
from dist2.operation.storage import flattened
from dist2.runtime.built import check_built

check_built(__name__, __file__)

Tensor = torch.Tensor


class Launch:
    """Collects the steps of one operation on a stream.

    Args:
        device: The stream's device.
        stream: The stream.
        handle: NCCL's handle of it.
        communicator: The communicator that its calls use.

    Attributes:
        kept: Copies, to be kept until the operation is over.
        plain: The tensors that are added now are known to be plain; see `Backend.plan_plain`.
    """

    def __init__(self, device: Device, stream: Stream, handle: int, communicator: Communicator) -> None:
        self._device = device
        self._stream = stream
        self._handle = handle
        self._communicator = communicator
        self._calls: list[Issued] = []
        self._after: list[Callable[[], object]] = []
        self.kept: list[Tensor] = []
        self.plain = False

    def run(self, work: Callable[[], object]) -> None:
        """Run torch operations on the stream, before the calls."""
        self._device.run(self._stream, work)

    def then(self, work: Callable[[], object]) -> None:
        """Run torch operations on the stream, after the calls."""
        self._after.append(work)

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return flat memory that is kept until the operation is over."""
        with self._device.on(self._stream):
            made = self._device.empty(numel, dtype)
        self.kept.append(made)
        return made

    # Tensors as flat memory

    def source(self, tensor: Tensor) -> Tensor:
        """Return memory with the elements of a tensor in row-major order, to be read."""
        if self.plain or is_plain(tensor):
            return tensor
        plain = tensor.detach()
        copy = self.scratch(plain.numel(), plain.dtype)
        self.run(lambda: copy.view(plain.shape).copy_(plain))
        return copy

    def target(self, tensor: Tensor, *, loaded: bool = False) -> Tensor:
        """Return memory of the elements in row-major order in place of a tensor, to be written.

        Args:
            tensor: Overwritten.
            loaded: The operation reads it as well.
        """
        if self.plain or is_plain(tensor):
            return tensor
        plain = tensor.detach()
        copy = self.scratch(plain.numel(), plain.dtype)
        if loaded:
            self.run(lambda: copy.view(plain.shape).copy_(plain))
        self.then(lambda: plain.copy_(copy.view(plain.shape)))
        return copy

    def joined(self, tensors: list[Tensor]) -> Tensor:
        """Return the elements of several tensors, one after the other, to be read."""
        flat = [each.detach() for each in tensors]
        copy = self.scratch(sum(each.numel() for each in flat), flat[0].dtype)
        parts = copy.split([each.numel() for each in flat])

        def join() -> None:
            for part, each in zip(parts, flat, strict=True):
                part.view(each.shape).copy_(each)

        self.run(join)
        return copy

    def parted(self, tensors: list[Tensor]) -> Tensor:
        """Return flat memory in place of several tensors, one after the other, to be written."""
        flat = [each.detach() for each in tensors]
        copy = self.scratch(sum(each.numel() for each in flat), flat[0].dtype)
        parts = copy.split([each.numel() for each in flat])

        def part_them() -> None:
            for part, each in zip(parts, flat, strict=True):
                each.copy_(part.view(each.shape))

        self.then(part_them)
        return copy

    # Memory as NCCL reduces it

    def operand(self, memory: Tensor, how: Arithmetic, *, written: bool = False) -> Tensor:
        """Return the operand of an NCCL call for memory; if ``written``, the call writes it as well."""
        if not how.converts:
            return memory
        flat = flattened(memory.detach())
        wide = self.result(memory, how) if written else self.scratch(flat.numel(), how.dtype)
        self.run(lambda: wide.copy_(flat))
        return wide

    def result(self, memory: Tensor, how: Arithmetic) -> Tensor:
        """Return the memory that NCCL writes in place of this."""
        if not how.converts:
            return memory
        flat = flattened(memory.detach())
        wide = self.scratch(flat.numel(), how.dtype)
        self._after.insert(0, lambda: flat.copy_(wide))  # before it is copied on
        return wide

    def op(self, how: Arithmetic) -> int:
        """Return NCCL's code of a reduction."""
        return self._communicator.premul_sum(how.factor, how.code) if how.op < 0 else how.op

    # The calls

    def call(self, name: str, *arguments: Any) -> None:
        """Issue a call of cupy's communicator; the stream is added to its arguments."""
        self._calls.append((name, arguments))

    def send(self, flat: Tensor, peer: int) -> None:
        """Send bytes, unless there are none: the other side expects none either."""
        if flat.numel():
            self.call("send", flat.data_ptr(), *moved(flat.nbytes), peer)

    def recv(self, flat: Tensor, peer: int) -> None:
        """Receive bytes, unless there are none."""
        if flat.numel():
            self.call("recv", flat.data_ptr(), *moved(flat.nbytes), peer)

    def finish(self) -> None:
        """Issue the calls as one group, and enqueue the steps that follow them."""
        if self._calls:
            self._communicator.issue(self._calls, self._handle)
        for work in self._after:
            self.run(work)


Steps = Callable[[Launch, Tensors, Tensors], None]
"""Puts an operation on a launch: see `Execute` for its tensors."""


@attrs.frozen(eq=False)
class Planned:
    """What is the same for all operations of one signature.

    Attributes:
        steps: Puts an operation on a launch.
        lane: Which communicator and stream it takes: ``main``; for messages to higher ranks ``up``, to lower
            ones ``down``.
        peer: The rank at the other end of a message.
        source: Where a message comes from; -1 elsewhere.
    """

    steps: Steps
    lane: str
    peer: int | None
    source: int

    @classmethod
    def of(cls, signature: Signature, steps: Steps) -> Planned:
        """Return what is known of a signature."""
        kind, peer = signature.kind, signature.peer
        if not kind.is_p2p:
            return cls(steps, "main", None, -1)
        assert peer is not None
        sends = kind is OpKind.SEND
        goes_up = (signature.group.rank < peer) is sends
        return cls(steps, "up" if goes_up else "down", peer, -1 if sends else peer)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its values one after the other."""
    is_conjugated = tensor.is_complex() and tensor.is_conj()
    return tensor.is_contiguous() and not is_conjugated and not tensor.is_neg()
