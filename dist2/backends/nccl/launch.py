"""`Launch`: one operation on its way to a stream: copies before, NCCL's calls, copies after.

NCCL takes contiguous memory of dtypes that it knows. Where a tensor is not like that, a copy on the same
stream stands for it. The calls are issued together once all earlier work is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist2.backends.nccl.arithmetic import Arithmetic, moved
from dist2.backends.nccl.communicator import Communicator
from dist2.backends.nccl.device import Device, Stream
from dist2.operation.storage import flattened

Tensor = torch.Tensor


class Launch:
    """Collects the steps of one operation on a stream.

    Args:
        device: The stream's device.
        stream: The stream.
        communicator: The communicator that its calls use.

    Attributes:
        kept: Copies, to be kept until the operation is over.
        plain: The tensors that are added now are known to be plain; see `Backend.plan_plain`.
    """

    def __init__(self, device: Device, stream: Stream, communicator: Communicator) -> None:
        self._device = device
        self._stream = stream
        self._handle = device.handle(stream)
        self._communicator = communicator
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
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
        """Return the elements of a tensor in row-major order, to be read."""
        if self.plain or is_plain(tensor):
            return _flat(tensor)
        plain = tensor.detach()
        copy = self.scratch(plain.numel(), plain.dtype)
        self.run(lambda: copy.view(plain.shape).copy_(plain))
        return copy

    def target(self, tensor: Tensor, *, loaded: bool = False) -> Tensor:
        """Return flat memory in place of a tensor, to be written.

        Args:
            tensor: Overwritten.
            loaded: The operation reads it as well.
        """
        if self.plain or is_plain(tensor):
            return _flat(tensor)
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

    # Flat memory as NCCL reduces it

    def operand(self, flat: Tensor, how: Arithmetic, *, written: bool = False) -> Tensor:
        """Return the operand of an NCCL call for flat memory; if ``written``, the call writes it as well."""
        if not how.converts:
            return _viewed(flat, how)
        wide = self.result(flat, how) if written else self.scratch(flat.numel(), how.dtype)
        self.run(lambda: wide.copy_(flat))
        return wide

    def result(self, flat: Tensor, how: Arithmetic) -> Tensor:
        """Return the memory that NCCL writes in place of flat memory."""
        if not how.converts:
            return _viewed(flat, how)
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
            issue = self._communicator.issue if len(self._calls) == 1 else self._communicator.issue_group
            issue(self._issue)
        for work in self._after:
            self.run(work)

    def _issue(self, calls: Any) -> None:
        for name, arguments in self._calls:
            getattr(calls, name)(*arguments, self._handle)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its values one after the other."""
    is_conjugated = tensor.is_complex() and tensor.is_conj()
    return tensor.is_contiguous() and not is_conjugated and not tensor.is_neg()


def _flat(tensor: Tensor) -> Tensor:
    """Return plain memory as one dimension, outside autograd unless it is that already."""
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.stride(0) == 1:
        return tensor
    return flattened(tensor.detach())


def _viewed(flat: Tensor, how: Arithmetic) -> Tensor:
    if flat.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    return flat if flat.dtype is how.dtype else flat.view(how.dtype)
