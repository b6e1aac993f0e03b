# cython: annotation_typing=False
"""`Ticket`: an operation that was put on a stream, until the device has done it.

A ticket is over when its end event has passed, or when it has failed. The watchdog finds that, or a thread
that waits for the ticket or polls it; the first of them settles it. Until then the ticket keeps references to
the operation's tensors, which the device reads and writes after Python may have dropped them. Once a caller's
stream was ordered after the end event, memory freed there cannot be reused too early, and the references are
dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from dist2.backends.nccl.device import Device, Event, Stream
from dist2.backends.nccl.launch import Planned
from dist2.backends.socket.transport.messages.transfer import Transfer
from dist2.errors import Dist2Error
from dist2.operation.execution import StreamOrdered
from dist2.operation.record import Operation
from dist2.runtime.built import check_built

check_built(__name__, __file__)

Await = Callable[["Ticket", int, Callable[[], bool]], None]
"""Blocks until a predicate of a ticket is true or a deadline passes; with a deadline that is past, has others
see to it."""


@attrs.define(eq=False)
class Health:
    """The error that broke the communicators of a group.

    Aborting communicators also ends their operations, and lets their events pass. So this is set before: an
    operation that is not known to be done by then has failed.

    Attributes:
        error: None while they work.
    """

    error: BaseException | None = None


def again(error: BaseException) -> BaseException:
    """Return an error for another operation that it fails: each gets one that names it."""
    return error.again(str(error)) if isinstance(error, Dist2Error) else error


class Ticket(StreamOrdered):
    """One operation on a stream.

    Args:
        operation: The operation.
        planned: What is known of all operations like this.
        inputs: The tensors that it reads.
        outputs: The tensors that it writes.
        device: Its device.
        stream: Its stream.
        block: Waits for it on the host.
        health: Of the group.

    Attributes:
        operation: The operation.
        planned: What is known of all operations like this, if it is one: a `Planned`.
        inputs: The tensors that it reads, before it is on the stream.
        outputs: The tensors that it writes, before it is on the stream.
        stream: Its stream.
        handle: NCCL's handle of that.
        notice: Tells whether the other side of a message has made its call.
        start: Passes when the operation begins; None where that is not measured.
        end: Passes when it is done; None before it was launched, and after it was given back.
        kept: The tensors it uses: kept alive until it is over, or ordered before the caller's later work.
    """

    operation: Operation
    planned: Any
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    stream: Stream
    handle: int
    notice: Transfer | None
    start: Event | None
    end: Event | None
    kept: Sequence[torch.Tensor]
    _error: BaseException | None

    def __init__(
        self,
        operation: Operation,
        planned: Planned | None,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        device: Device,
        stream: Stream,
        block: Await,
        health: Health,
    ) -> None:
        self.operation = operation
        self.planned, self.inputs, self.outputs = planned, inputs, outputs
        self._device = device
        self._health = health
        self.stream = stream
        self.handle = device.handle(stream)
        self._block = block
        self._lock = threading.Lock()
        self.kept = ()
        self._callbacks: tuple[Callable[[Any], None], ...] = ()

    def connects_to(self) -> int | None:
        """Return the rank at the other end of a message; None if it is empty: NCCL is not called."""
        is_empty = not any(each.numel() for each in (*self.inputs, *self.outputs))
        peer: int | None = None if is_empty else self.planned.peer
        return peer

    def passed(self) -> bool:
        """Whether it is over, or the device has done it."""
        return self.over or self._has_ended()

    def _has_ended(self) -> bool:
        end = self.end  # it may be given back meanwhile
        return end is not None and self._device.passed(end)

    def is_placed(self) -> bool:
        """Whether it is over, or its place on the stream is known: not while it waits for a connection."""
        return self.over or self.end is not None

    def _await_place(self) -> None:
        if not self.is_placed():
            self._block(self, self.operation.deadline_ns, self.is_placed)

    def settle(self, error: BaseException | None = None) -> None:
        """Be over, unless it is. An operation that is known to be done does not fail any more."""
        with self._lock:
            if self.over:
                return
            broken = self._health.error
            self._error = again(broken) if error is None and broken is not None else error
            self.over = True
            callbacks, self._callbacks = self._callbacks, ()
            self.kept = ()
        for callback in callbacks:
            callback(self)

    def recycle(self) -> None:
        """Give the end event back after success: nothing has to wait for it any more."""
        with self._lock:
            if self.end is None or self.start is not None or self._error is not None:
                return
            end, self.end = self.end, None
        self._device.give_back(end)

    # Called by the group

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See `Helped`."""
        with self._lock:
            if not self.over:
                self._callbacks = (*self._callbacks, callback)
                return
        callback(self)

    def exception(self) -> BaseException | None:
        """See `Helped`."""
        return self._error

    def help(self, deadline_ns: int) -> None:
        """Wait on the host; a failure is passed to callbacks of `add_done_callback`."""
        if not self.over:
            self._block(self, deadline_ns, self.passed)

    def poll(self) -> None:
        """See `StreamOrdered`."""
        if not self.over and self._has_ended():
            self.settle()

    def order(self) -> None:
        """See `StreamOrdered`."""
        device = self._device
        if device.blocks:
            if not self.over:
                self._block(self, self.operation.deadline_ns, self.passed)
            return
        self._await_place()
        with self._lock:  # the event is not given back meanwhile
            if self._error is None and self.end is not None:
                device.wait(device.current(), self.end)
                self.kept = ()

    def future(self, outputs: Sequence[torch.Tensor]) -> torch.futures.Future[Any] | None:
        """See `StreamOrdered`."""
        if not self._device.blocks:
            self._await_place()
        return self._device.future(outputs, self.stream) if self._error is None else None

    def duration_ms(self) -> float | None:
        """See `StreamOrdered`."""
        if self.start is None or not self._has_ended():
            return None
        return self._device.elapsed_ms(self.start, self.end)
