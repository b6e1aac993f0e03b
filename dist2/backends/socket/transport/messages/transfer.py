"""Messages in flight: the handles that `Endpoint` returns for sends and receives."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from dist2.backends.socket.transport.base import Transfer
from dist2.backends.socket.transport.messages.loans import Borrowed, Lent
from dist2.backends.socket.wire import EAGER_BYTES
from dist2.runtime.deadline import FOREVER_NS

next_number = itertools.count(1).__next__
"""Numbers of messages, unique in the process."""


class Message(Transfer):
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
        loan: Its memory, or the sender's, is lent to the other side.
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
        self._callbacks: deque[Callable[[Transfer], None]] = deque()
        self.loan: Lent | Borrowed | None = None

    def let_go(self) -> None:
        """Ensure that no other process, and no running copy, uses the memory any more."""
        if self.loan is not None:
            self.loan.end()

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        self._callbacks.append(callback)
        if self.done:
            self.tell()

    def tell(self) -> None:
        """Call the registered callbacks; without the fabric's lock, and once each."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
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


class Sending(Message):
    """A send.

    Attributes:
        offset: Bytes handed to the link.
        accepted: The receiver has a buffer for it.
        unasked: It travels without the receiver's consent.
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
        super().__init__(context, peer, tagged, seq, tag, fingerprint, data, number)
        self.offset = 0
        self.accepted = False
        self.unasked = self.nbytes <= EAGER_BYTES

    @property
    def is_copied(self) -> bool:
        """Whether a link that has it to write has a copy."""
        return self.unasked and self.nbytes <= EAGER_BYTES

    def lend(self, lent: Lent) -> None:
        """Have the receiver read it where it lies, or ask for it."""
        self.loan = lent
        self.unasked = False


class Receiving(Message):
    """A receive.

    Attributes:
        missing: Bytes of an announced message still to come.
    """

    missing = 0
