"""`HostDevice`: host memory as the memory of a device, with streams that run late.

The streams are the stub's threads. Each piece of work waits for a random time first, so that a read or a
release that comes too early is noticed. Memory that was freed is filled with a pattern and used again, as
CUDA's allocator does.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dist2.backends.nccl.device import Device
from support.nccl_stubs import stub

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_POISON = 0xA5


class HostStream:
    """A stream.

    Args:
        max_delay_us: How long each piece of work waits at most before it runs.
        seed: For the delays.
    """

    def __init__(self, max_delay_us: int, seed: int) -> None:
        self.handle: int = stub().stub_stream_create(max_delay_us, seed)


class HostEvent:
    """An event."""

    def __init__(self) -> None:
        self.pointer: int = stub().stub_event_create()
        weakref.finalize(self, stub().stub_event_destroy, self.pointer).atexit = False


class HostDevice(Device):
    """Host memory, of one rank. Each thread has a current stream of its own.

    Args:
        max_delay_us: Longest delay of work on its streams.
        blocks: The calling thread is the current stream, as in tests of CPU groups. Otherwise tests queue
            work by `run`.
        owns: Tells which tensors are on it.
    """

    type = "cpu"

    def __init__(
        self,
        max_delay_us: int = 0,
        blocks: bool = True,
        owns: Callable[[torch.Tensor], bool] = lambda tensor: True,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.blocks = blocks
        self._owns = owns
        self.errors: list[BaseException] = []
        self._max_delay_us = max_delay_us
        self._seeds = itertools.count(1)
        self._open: list[HostStream] = []
        self._events: list[HostEvent] = []
        self._queued: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._pool: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._current = threading.local()

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._owns(tensor)

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def current(self) -> HostStream:
        if not hasattr(self._current, "stream"):
            self._current.stream = self.new_stream()
        stream: HostStream = self._current.stream
        return stream

    def new_stream(self) -> HostStream:
        stream = HostStream(self._max_delay_us, next(self._seeds))
        self._open.append(stream)
        return stream

    def close_stream(self, stream: HostStream) -> None:
        if stream in self._open:
            self._open.remove(stream)
            stub().stub_stream_destroy(stream.handle)

    def close(self) -> None:
        """End all streams; raise the exceptions of their work."""
        for stream in list(self._open):
            self.close_stream(stream)
        if self.errors:
            raise self.errors[0]

    def handle(self, stream: HostStream) -> int:
        return stream.handle

    @contextmanager
    def on(self, stream: HostStream) -> Iterator[None]:
        before = self.current()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def run(self, stream: HostStream, work: Callable[[], object]) -> None:
        number = next(self._numbers)

        def call(_: int | None) -> None:
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:  # noqa: BLE001 - raised by `close`
                self.errors.append(error)
            self._queued.pop(number)

        callback = self._queued[number] = _CALLBACK(call)
        stub().stub_stream_run(stream.handle, ctypes.cast(callback, ctypes.c_void_p), None)

    def record(self, stream: HostStream, timed: bool = False) -> HostEvent:
        try:
            event = self._events.pop()
        except IndexError:
            event = HostEvent()
        stub().stub_event_record(event.pointer, stream.handle)
        return event

    def give_back(self, event: HostEvent) -> None:
        self._events.append(event)

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        stub().stub_stream_wait_event(stream.handle, event.pointer)

    def passed(self, event: HostEvent) -> bool:
        return bool(stub().stub_event_query(event.pointer))

    def elapsed_ms(self, start: HostEvent, end: HostEvent) -> float:
        elapsed: float = stub().stub_event_elapsed_ms(start.pointer, end.pointer)
        return elapsed

    def capturing(self) -> bool:
        return False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes, stream = numel * dtype.itemsize, self.current()
        free = self._pool.setdefault((stream.handle, nbytes), [])
        memory = free.pop() if free else torch.full((nbytes,), _POISON, dtype=torch.uint8)
        tensor = memory.view(dtype)

        def give_back() -> None:
            if stream in self._open:
                self.run(stream, lambda: memory.fill_(_POISON))
                free.append(memory)

        weakref.finalize(tensor, give_back).atexit = False
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def future(self, outputs: Sequence[torch.Tensor], stream: HostStream) -> None:
        return None

    def when_reached(self, stream: HostStream, tell: Callable[[], None]) -> None:
        self.run(stream, tell)
