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

from dist2.backends.base import Helped, StreamOrdered
from dist2.backends.nccl.device import Device, Event, Stream
from dist2.backends.socket.transport.messages.transfer import Transfer
from dist2.errors import Dist2Error
from dist2.operation.record import Operation

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
        device: Its device.
        stream: Its stream.
        block: Waits for it on the host.
        health: Of the group.

    Attributes:
        operation: The operation.
        stream: Its stream.
        notice: Tells whether the other side of a message has made its call.
        start: Passes when the operation begins; None where that is not measured.
        end: Passes when it is done; None before it was launched, and after it was given back.
        kept: The tensors it uses: kept alive until it is over, or ordered before the caller's later work.
    """

    def __init__(
        self,
        operation: Operation,
        device: Device,
        stream: Stream,
        block: Await,
        health: Health,
    ) -> None:
        self._device = device
        self._health = health
        self.operation = operation
        self.stream = stream
        self.notice: Transfer | None = None
        self.start: Event | None = None
        self.end: Event | None = None
        self.kept: Sequence[torch.Tensor] = ()
        self._block = block
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Helped], None]] = []

    @property
    def over(self) -> bool:
        """Whether it is known to be done, or to have failed."""
        return self._over

    @property
    def handle(self) -> int:
        """The handle of its stream."""
        return self._device.handle(self.stream)

    def passed(self) -> bool:
        """Whether it is over, or the device has done it."""
        return self._over or self._has_ended()

    def _has_ended(self) -> bool:
        return self.end is not None and self._device.passed(self.end)

    def is_placed(self) -> bool:
        """Whether it is over, or its place on the stream is known: not while it waits for a connection."""
        return self._over or self.end is not None

    def launched(self, start: Event | None, end: Event, kept: Sequence[torch.Tensor]) -> None:
        """Note the operation's place on the stream, and the tensors to keep alive."""
        self.kept = kept
        self.start, self.end = start, end

    def _await_place(self) -> None:
        if not self.is_placed():
            self._block(self, self.operation.deadline_ns, self.is_placed)

    def settle(self, error: BaseException | None = None) -> None:
        """Be over, unless it is. An operation that is known to be done does not fail any more."""
        with self._lock:
            if self._over:
                return
            broken = self._health.error
            self._error = again(broken) if error is None and broken is not None else error
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
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

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def exception(self) -> BaseException | None:
        return self._error

    def help(self, deadline_ns: int) -> None:
        """Wait on the host; a failure is passed to callbacks of `add_done_callback`."""
        if not self._over:
            self._block(self, deadline_ns, self.passed)

    def poll(self) -> None:
        if not self._over and self._has_ended():
            self.settle()

    def order(self) -> None:
        device = self._device
        if device.blocks:
            if not self._over:
                self._block(self, self.operation.deadline_ns, self.passed)
            return
        self._await_place()
        with self._lock:  # the event is not given back meanwhile
            if self._error is None and self.end is not None:
                device.wait(device.current(), self.end)
                self.kept = ()

    def future(self, outputs: Sequence[torch.Tensor]) -> torch.futures.Future[Any] | None:
        if not self._device.blocks:
            self._await_place()
        return self._device.future(outputs, self.stream) if self._error is None else None

    def duration_ms(self) -> float | None:
        if self.start is None or not self._has_ended():
            return None
        return self._device.elapsed_ms(self.start, self.end)
