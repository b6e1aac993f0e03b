"""Tensors on GPUs by way of the host, for backends that move the host's memory.

Tensors on a GPU are copied to pinned memory, the operation runs on the copies, and its outputs are copied
back. The copies of one call overlap with each other. A synchronous call waits for the caller's current
stream. An asynchronous one runs on another thread, which does not know that stream: it waits for the whole
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from dist2.operation.execution import Execute, Helped, Tensors
from dist2.operation.record import Operation


def is_staged(tensors: Sequence[torch.Tensor], types: Sequence[str]) -> bool:
    """Whether some of these are on devices of these types, as none is in most groups."""
    return bool(types) and any(tensor.device.type in types for tensor in tensors)


def through_host(execute: Execute, types: Sequence[str]) -> Execute:
    """Return a callable that runs a call whose tensors may be on devices of these types.

    Args:
        execute: Runs it on tensors in the host's memory.
        types: Types of devices; other tensors are left where they are.
    """

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
        devices = {each.device for each in (*inputs, *outputs) if each.is_cuda}
        if operation.is_async:
            for device in devices:
                torch.cuda.synchronize(device)
        copies = {id(each): _copy(each) for each in inputs if each.device.type in types}
        read = [copies.get(id(each), each) for each in inputs]
        staged = [each for each in outputs if each.device.type in types]
        landings = {id(each): copies[id(each)] if id(each) in copies else _memory(each) for each in staged}
        written = read if outputs is inputs else [landings.get(id(each), each) for each in outputs]
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        pending = execute(operation, read, written)

        def land() -> None:
            for each in staged:
                each.detach().copy_(landings[id(each)])

        if pending is None:
            land()
            return None
        assert isinstance(pending, Helped)  # those that move the host's memory make no other futures
        return Landing(pending, land) if staged else pending

    return run


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for the values of a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, which is there when the current stream has made it."""
    return _memory(tensor).copy_(tensor.detach(), non_blocking=tensor.is_cuda)


class Landing(Helped):
    """A message that is copied to the device after its arrival.

    Args:
        message: The message.
        land: Copies it.
    """

    def __init__(self, message: Helped, land: Callable[[], None]) -> None:
        self._message = message
        self._land = land

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        def done(message: Helped) -> None:
            if message.exception() is None:
                self._land()
            callback(self)

        self._message.add_done_callback(done)

    def exception(self) -> BaseException | None:
        return self._message.exception()

    def help(self, deadline_ns: int) -> None:
        self._message.help(deadline_ns)
