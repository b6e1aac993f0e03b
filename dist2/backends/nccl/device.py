"""`Device`: the narrow interface to the device that a group's tensors are on: streams, events, memory.

A stream runs work in the order in which it was queued; work on several streams runs at the same time unless
an event orders it. Python code that is given to `run` is part of that order. `CudaDevice` serves all devices
that torch calls ``cuda``, AMD's among them.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from dist2.runtime.cache import keep
from dist2.runtime.torch_versions import current_stream_handle

_RUNTIMES = (("libcudart.so.13", "cuda"), ("libcudart.so.12", "cuda"), ("libamdhip64.so", "hip"))
"""The runtime that torch has loaded, and how its functions begin."""
_RELAXED = 2
_MOST_EVENTS = 1024
"""Events that are kept: about as many operations can wait on a stream before a launch blocks."""

_MOST_STREAMS = 64
"""Streams whose objects are kept: torch takes several times as long to make one as to tell its handle."""

Stream = Any
"""A stream of the device; opaque but for `Device.handle`."""
Event = Any
"""An event of the device; opaque."""


class Device(ABC):
    """One device.

    Attributes:
        torch_device: The device, as torch's type.
        type: The type of its tensors' devices.
        blocks: The calling thread is the current stream: operations ordered on it must be waited for.
    """

    type: ClassVar[str]
    torch_device: torch.device
    blocks: bool = False

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""

    @abstractmethod
    def active(self) -> AbstractContextManager[object]:
        """Make it the current device of a ``with`` block."""

    @abstractmethod
    def current(self) -> Stream:
        """Return the calling thread's current stream."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Return a new stream."""

    @abstractmethod
    def close_stream(self, stream: Stream) -> None:
        """Give a stream of `new_stream` back; nothing runs on it."""

    @abstractmethod
    def handle(self, stream: Stream) -> int:
        """Return NCCL's handle of a stream."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream the current one of a ``with`` block."""

    @abstractmethod
    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        """Have torch operations run on a stream, in its order."""

    @abstractmethod
    def record(self, stream: Stream, timed: bool = False) -> Event:
        """Return an event that passes when the work enqueued on a stream so far is done."""

    def give_back(self, event: Event) -> None:  # noqa: B027 - not all keep events
        """Take an event that is no longer used, for a later `record`."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Have later work on a stream wait for an event."""

    def order(self, first: Stream, then: Stream) -> None:
        """Have later work on one stream wait for the work enqueued on another so far."""
        event = self.record(first)
        self.wait(then, event)
        self.give_back(event)  # the wait is for this record of it, whatever it records later

    @abstractmethod
    def passed(self, event: Event) -> bool:
        """Whether an event has passed."""

    @abstractmethod
    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Return the time between two timed events that have passed."""

    @abstractmethod
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then nothing runs, and no event
        passes."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return flat memory for work on the current stream."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the host's memory; waits for the current stream."""

    @abstractmethod
    def future(self, outputs: Sequence[torch.Tensor], stream: Stream) -> torch.futures.Future[Any] | None:
        """Return a torch future that is done in the order of a stream; None where only the host can tell."""

    def watching(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare the calling thread to ask for events while another captures a graph."""

    def when_reached(self, stream: Stream, tell: Callable[[], None]) -> None:  # noqa: B027 - most are polled
        """Have a stream call a function when it gets there, if it can."""


class CudaDevice(Device):
    """A GPU, through torch.

    Args:
        device: Which one.
        priority: Of the streams that are made here: -1 is high.
    """

    type = "cuda"

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._priority = priority
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._streams: dict[int, Stream] = {}
        self._events: list[Event] = []  # to free one, torch lets another thread have the interpreter

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.torch_device)

    def current(self) -> Stream:
        handle = current_stream_handle(self.torch_device.index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = torch.cuda.current_stream(self.torch_device.index)
            keep(self._streams, handle, stream, _MOST_STREAMS)
        return stream

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.torch_device, self._priority)

    def close_stream(self, stream: Stream) -> None:
        """Nothing to do: torch keeps streams in a pool."""

    def handle(self, stream: Stream) -> int:
        handle: int = stream.cuda_stream
        return handle

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: Stream, timed: bool = False) -> Event:
        try:
            event = torch.cuda.Event(enable_timing=True) if timed else self._events.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(stream)
        return event

    def give_back(self, event: Event) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def passed(self, event: Event) -> bool:
        done: bool = event.query()
        return done

    def elapsed_ms(self, start: Event, end: Event) -> float:
        elapsed: float = start.elapsed_time(end)
        return elapsed

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach().resolve_conj().resolve_neg().contiguous()
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        copy.copy_(source, non_blocking=True)
        self.current().synchronize()
        return copy

    def future(self, outputs: Sequence[torch.Tensor], stream: Stream) -> torch.futures.Future[Any]:
        made: torch.futures.Future[Any] = torch.futures.Future(devices=[self.torch_device])
        with torch.cuda.stream(stream):
            made.set_result(list(outputs))  # records where the stream is
        return made

    def watching(self) -> None:
        """Allow this thread CUDA calls that could disturb captures; queries of events do not.

        By default no thread may ask while another captures.
        """
        for library, prefix in _RUNTIMES:
            try:
                runtime = ctypes.CDLL(library, os.RTLD_NOLOAD | os.RTLD_NOW)
            except OSError:
                continue  # torch uses another one
            exchange = getattr(runtime, f"{prefix}ThreadExchangeStreamCaptureMode", None)
            if exchange is not None:
                exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
