"""Announced messages, moved by the thread that waits for them: announcement, acceptance, and segments.

The bytes on the wire are those that `Dispatch`, `Delivery` and `Link` make. One number says how much of a
payload has moved: the bytes of its segments so far, headers included.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from time import monotonic_ns

import attrs

from dist2 import compiled
from dist2.backends.socket.transport.spinning import Yielding
from dist2.backends.socket.wire import HEADER_BYTES, SEGMENT_BYTES, Header, Kind

_WAIT_MS = 1
_TURN_NS = 2_000_000
"""How long moving takes before its caller looks around."""


@attrs.frozen
class Segment:
    """A part of a payload, with a header of its own.

    Attributes:
        header: Its header.
        start: Where it begins in the payload.
        length: How long it is.
        inside: How much of it has moved, header included.
    """

    header: Header
    start: int
    length: int
    inside: int

    @property
    def moved(self) -> int:
        """How much of its payload has moved."""
        return max(0, self.inside - HEADER_BYTES)

    @property
    def rest(self) -> slice:
        """The stretch of the payload that is still missing of this segment."""
        return slice(self.start + self.moved, self.start + self.length)


def segment_at(done: int, context: int, number: int, nbytes: int, longest: int = SEGMENT_BYTES) -> Segment:
    """Return the current segment of a message."""
    start, inside = divmod(done, HEADER_BYTES + longest)
    start *= longest
    length = max(0, min(longest, nbytes - start))
    header = Header(Kind.DATA, context=context, tag=start, nbytes=length, transfer=number, total=nbytes)
    return Segment(header, start, length, inside)


def whole_of(nbytes: int, longest: int = SEGMENT_BYTES) -> int:
    """Return the state of a complete payload."""
    return nbytes + -(-nbytes // longest) * HEADER_BYTES


@attrs.define
class _Move:
    """A message on its way: see `move_message`."""

    fd: int
    back: int
    announcement: bytes
    consent: bytes
    header: bytes
    address: int
    nbytes: int
    longest: int
    number: int
    done: int
    asked: int
    agreed: bool
    staged: int
    filled: int
    writes: bool
    ended: bool = False

    def hand_over(self) -> None:
        """Do the next step of the sender."""
        if self.asked < HEADER_BYTES:
            self.asked += os.write(self.fd, Header.about(self.announcement, self.number)[self.asked :])
        elif self.agreed:
            segment = self._segment()
            parts = (segment.header.encode()[segment.inside :], self._memory(segment.rest))
            self.done += os.writev(self.fd, parts)
        elif self._stage(self.back) == Header.about(self.consent, self.number):
            self.agreed, self.filled = True, 0

    def take_over(self) -> None:
        """Do the next step of the receiver."""
        if not self.agreed:
            header = self._stage(self.fd)
            if len(header) == HEADER_BYTES:
                self.number = Header.number_of(header)
                if header == Header.about(self.announcement, self.number):
                    self.agreed, self.filled = True, 0
        elif self.asked < HEADER_BYTES:
            self.asked += os.write(self.back, Header.about(self.consent, self.number)[self.asked :])
        else:
            self._pull()

    def _pull(self) -> None:
        segment = self._segment()
        if not segment.inside:
            if self._stage(self.fd) == segment.header.encode():
                self.done, self.filled = self.done + HEADER_BYTES, 0
            return
        count = os.readv(self.fd, [self._memory(segment.rest)])
        self.done, self.ended = self.done + count, not count

    def _stage(self, fd: int) -> bytes:
        """Read a header; return the bytes of it that have come."""
        staged = (ctypes.c_char * HEADER_BYTES).from_address(self.staged)
        count = os.readv(fd, [memoryview(staged).cast("B")[self.filled :]])
        self.filled, self.ended = self.filled + count, not count
        return staged.raw[: self.filled]

    def _segment(self) -> Segment:
        return segment_at(
            self.done, Header.decode(self.header).context, self.number, self.nbytes, self.longest
        )

    def _memory(self, where: slice) -> memoryview:
        length = where.stop - where.start
        return memoryview((ctypes.c_char * length).from_address(self.address + where.start)).cast("B")

    @property
    def is_through(self) -> bool:
        """Whether there is nothing more to do."""
        return self.done == whole_of(self.nbytes, self.longest) or self.filled == HEADER_BYTES or self.ended

    def run(self, sends: bool) -> tuple[int, int, int, bool, int, bool]:
        """Do all, by yielding and then asleep, for as long as that goes well."""
        move = self.hand_over if sends else self.take_over
        start, yielding = monotonic_ns(), Yielding()
        while not self.is_through and monotonic_ns() - start <= _TURN_NS:
            try:
                move()
                yielding.begin()
            except BlockingIOError:
                if not self._waits(sends, 0 if yielding.give_way() else _WAIT_MS):
                    break
            except OSError:
                self.ended = True
        return self.number, self.done, self.asked, self.agreed, self.filled, self.ended

    def _waits(self, sends: bool, wait_ms: int) -> bool:
        """Wait for the next event; return whether to go on."""
        writes = sends and self.agreed
        other = select.POLLIN if writes else select.POLLOUT if self.writes else 0
        poll = select.poll()
        poll.register(
            self.back if sends and not writes else self.fd,
            (select.POLLOUT if writes else select.POLLIN) | other,
        )
        events = poll.poll(wait_ms)
        return bool(events or not wait_ms) and not any(event & other for _, event in events)


def move_message(
    sends: bool,
    fd: int,
    back: int,
    announcement: bytes,
    consent: bytes,
    header: bytes,
    address: int,
    nbytes: int,
    longest: int,
    number: int,
    done: int,
    asked: int,
    agreed: bool,
    staged: int,
    filled: int,
    writes: bool,
    /,
) -> tuple[int, int, int, bool, int, bool]:
    """Announce a message, await its acceptance and write it; or await its announcement, accept and read it.

    Until nothing has moved for about two milliseconds, as many have passed, or something else can be done.

    Args:
        sends: Write it; else read it.
        fd: A non-blocking stream socket that carries it.
        back: Carries the receiver's answer.
        announcement: The frame that announces it, without its number.
        consent: The frame that accepts it, without its number.
        header: A segment's header, without its number, its beginning and its length.
        address: Where the payload lies.
        nbytes: Its length.
        longest: How long segments are.
        number: The message's number; its receiver knows it once it is announced.
        done: Moved bytes of its segments, headers included.
        asked: Sent bytes of the announcement, or of the acceptance.
        agreed: Whether it was accepted; on the receiver, whether it was announced.
        staged: Address of a place for headers that come.
        filled: How much of one is there.
        writes: Return as soon as there is room to write, while there is nothing to be written.

    Returns:
        Number, ``done``, ``asked``, ``agreed`` and ``filled``, as they are now (all of a header is there only
        if it is not the one that was expected); and whether a stream has ended or failed.
    """
    return _Move(
        fd, back, announcement, consent, header, address, nbytes, longest,
        number, done, asked, agreed, staged, filled, writes,
    ).run(sends)  # fmt: skip


Move = Callable[..., tuple[int, int, int, bool, int, bool]]
"""`move_message`."""

move: Move = move_message if compiled.steps is None else compiled.steps.move_message
