# cython: annotation_typing=False
"""Messages in flight: the handles that `FabricEndpoint` returns for sends and receives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from dist2.backends.socket.wire import EAGER_BYTES, TAGGED, Header, Kind
from dist2.runtime.built import check_built
from dist2.runtime.deadline import FOREVER_NS

check_built(__name__, __file__)

ANY_SOURCE = -1
"""As ``peer`` of `FabricEndpoint.recv_tagged`: take the first matching message from any member."""

next_number = itertools.count(1).__next__
"""Numbers of messages, unique in the process."""


class Transfer:
    """A posted send or receive; the fabric's lock guards it.

    Attributes:
        number: Unique in the process: names an announced message on the wire, and orders receives.
        context: The group's context id.
        peer: Group rank of the other side; `ANY_SOURCE` for a receive that takes any.
        tagged: Point-to-point, or part of a collective.
        seq: Number of the collective.
        tag: Tag, or step of the collective's schedule.
        fingerprint: The operation's fingerprint.
        data: The memory; None once done.
        done: It has ended, with `error` if it failed. The memory is free for other use.
        error: The cause of its failure.
        nbytes: Bytes moved, once done. A tagged receive may get fewer than its memory holds.
        source: Group rank of the other side; known for `ANY_SOURCE` once done.
        deadline_ns: Its deadline if no thread waits for it: a waiter has its own.
    """

    def __init__(
        self,
        context: int,
        peer: int,
        tagged: bool,
        seq: int,
        tag: int,
        fingerprint: int,
        data: memoryview,
        number: int | None = None,
    ) -> None:
        self.number = next_number() if number is None else number
        self.context = context
        self.peer = peer
        self.tagged = tagged
        self.seq = seq
        self.tag = tag
        self.fingerprint = fingerprint
        self.data: memoryview | None = data
        self.done = False
        self.error: BaseException | None = None
        self.nbytes = len(data)
        self.source = peer
        self.deadline_ns = FOREVER_NS
        self._callbacks: list[Callable[[Transfer], None]] | None = None  # made when there is one

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call back once it is done (at once if it is), from the thread that completes it."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self.done:
            self.tell()

    def tell(self) -> None:
        """Call the registered callbacks; without the fabric's lock, and once each."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread calls them as well, and was faster
                return
            callback(self)

    @property
    def watched(self) -> bool:
        """Whether there is a callback."""
        return bool(self._callbacks)

    @property
    def key(self) -> tuple[bool, int, int, int]:
        """The attributes that the other side's message must match."""
        return (self.tagged, self.peer, self.seq, self.tag)


class Sending(Transfer):
    """A send.

    Attributes:
        offset: Bytes handed to the link.
        accepted: The receiver has a buffer for it.
        unasked: It travels without the receiver's consent.
    """

    offset: int
    accepted: bool
    unasked: bool

    def header(self, kind: Kind, nbytes: int, transfer: int) -> Header:
        """Return the header of a frame about it, with so many bytes behind it."""
        flags = TAGGED if self.tagged else 0
        return Header(
            kind, flags, self.context, self.seq, self.tag, self.fingerprint, nbytes, transfer, self.nbytes
        )

    @property
    def is_copied(self) -> bool:
        """Whether a link that has it to write has a copy."""
        return self.unasked and self.nbytes <= EAGER_BYTES


class Receiving(Transfer):
    """A receive.

    Attributes:
        missing: Bytes of an announced message still to come.
    """

    missing: int

    def fits(self, header: Header) -> bool:
        """Whether a message may be delivered here."""
        if header.fingerprint != self.fingerprint:
            return False
        total = header.total
        return bool(total <= self.nbytes if self.tagged else total == self.nbytes)
