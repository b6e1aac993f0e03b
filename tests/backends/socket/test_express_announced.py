"""The short path of announced messages: which calls use it, and at which point the long path takes over."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from support.endpoint_pairs import PRINT, Side, pattern, soon, text, two_sides
from support.ranks import Tenant, run_ranks
from support.threads import together

from dist2 import MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport.base import Transfer
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.express_announced import AnnouncedSend, AnnouncedTake
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.segments import segment_at, whole_of
from dist2.backends.socket.transport.messages.streams import move_message
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.wire import (
    HEADER_BYTES,
    LOAN_BYTES,
    PROMPT_BYTES,
    SEGMENT_BYTES,
    TAGGED,
    Header,
    Kind,
)
from dist2.errors import GroupAbortedError
from dist2.operation.kinds import OpKind
from dist2.operation.signature import Signature, TensorMeta
from dist2.runtime.deadline import deadline_in

TCP = Tenant("tcp", "socket", {"transport": "tcp"})
NBYTES = 2 * SEGMENT_BYTES + 1000
HUGE = [limit + beside for limit in (2**31, 2**32) for beside in (-1, 0, 1)]
LENGTHS = [PROMPT_BYTES + 1, 2 * SEGMENT_BYTES, NBYTES, 9 * SEGMENT_BYTES]


@attrs.frozen
class End:
    """One of two ranks, on the short path."""

    side: Side

    def lot(self, nbytes: int, tag: int = 0, fingerprint: int = PRINT) -> Lot:
        return Lot(self.side.peer, tag, fingerprint, nbytes)

    def way_out(self, nbytes: int = NBYTES, fingerprint: int = PRINT) -> AnnouncedSend:
        return self.side.endpoint.ways.announced_send(self.lot(nbytes, 0, fingerprint))

    def way_in(self, nbytes: int = NBYTES) -> AnnouncedTake:
        return self.side.endpoint.ways.announced_take(self.lot(nbytes))

    def send(self, data: bytes, timeout_s: float = 10.0) -> bool:
        """Send a message; return whether it used the short path."""
        held = bytearray(data)
        sent = self.way_out(len(data)).hand_over(address_of(memoryview(held)), soon(timeout_s))
        if sent is True:
            return True
        self._wait(
            sent or self.side.endpoint.send_tagged(self.side.peer, 0, PRINT, memoryview(held)), timeout_s
        )
        return False

    def take(self, nbytes: int = NBYTES, timeout_s: float = 10.0) -> tuple[bytes, bool]:
        """Receive a message; return it, and whether it came by the short path."""
        buffer = bytearray(nbytes)
        got = self.way_in(nbytes).wait(address_of(memoryview(buffer)), soon(timeout_s))
        if got is not True:
            posted = got or self.side.endpoint.recv_tagged(self.side.peer, 0, PRINT, memoryview(buffer))
            self._wait(posted, timeout_s)
        return bytes(buffer), got is True

    def _wait(self, transfer: Transfer, timeout_s: float) -> None:
        self.side.endpoint.wait([transfer], soon(timeout_s))

    def link(self) -> Link:
        """Return the link of its outgoing messages."""
        out = self.side.endpoint._fabric.outgoing(self.side.endpoint._mailbox.fabric_ids[self.side.peer])
        assert out is not None
        return out

    def way_back(self) -> Link:
        """Return the link of the other side's messages: another link, if both have connected at once."""
        back = self.side.endpoint._fabric.heard_from(self.side.endpoint._mailbox.fabric_ids[self.side.peer])
        assert back is not None
        return back


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with two_sides(share=False) as (one, two):
        yield End(one), End(two)


def frames(data: bytes, number: int) -> bytes:
    """Return the segments of a message."""
    made = b""
    while len(made) < whole_of(len(data)):
        segment = segment_at(len(made), 5, number, len(data))
        made += segment.header.encode() + data[segment.rest.start : segment.rest.stop]
    return made


def announcement(nbytes: int, number: int, fingerprint: int = PRINT) -> bytes:
    return Header(Kind.ANNOUNCE, TAGGED, 5, fingerprint=fingerprint, transfer=number, total=nbytes).encode()


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_messages_of_every_length_go_short(ends: tuple[End, End], nbytes: int) -> None:
    one, two = ends
    went, came, end = 0, 0, time.monotonic() + 20
    while not (went and came):
        assert time.monotonic() < end, "none has gone the short way"
        data = pattern(nbytes, went)
        short, (got, taken) = together(lambda data=data: one.send(data), lambda: two.take(nbytes))
        assert got == data
        went, came = went + short, came + taken


def test_either_side_may_take_the_long_way(ends: tuple[End, End]) -> None:
    one, two = ends
    data = pattern(NBYTES)
    _, got = together(lambda: one.send(data), lambda: two.side.take_long_way(NBYTES))
    assert got == data
    _, (got, _) = together(lambda: one.side.send_long_way(data), two.take)
    assert got == data


def test_who_is_not_awaited_waits_the_long_way(ends: tuple[End, End]) -> None:
    one, two = ends
    data = bytearray(pattern(NBYTES))
    sending = one.way_out().hand_over(address_of(memoryview(data)), soon())
    assert not isinstance(sending, bool), "it was announced, and nobody wants it yet"
    assert not sending.done
    _, got = together(
        lambda: one.side.endpoint.wait([sending], soon()), lambda: two.side.take_long_way(NBYTES)
    )
    assert got == bytes(data)


def test_a_send_that_nobody_wants_can_be_given_up(ends: tuple[End, End]) -> None:
    one, two = ends
    with pytest.raises(OperationTimeoutError):
        one.send(pattern(NBYTES), timeout_s=0.05)
    two.side.endpoint.attend()
    data = pattern(NBYTES, 1)
    _, (got, _) = together(lambda: one.send(data), two.take)
    assert got == data, "the first was taken back"


def test_who_stops_reading_is_waited_for_the_long_way(ends: tuple[End, End]) -> None:
    one, two = ends
    data, buffer = pattern(40 << 20), bytearray(40 << 20)
    posted = two.side.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    gone = threading.Event()

    def send() -> bool:
        held = bytearray(data)
        sent = one.way_out(len(data)).hand_over(address_of(memoryview(held)), soon())
        gone.set()
        if not isinstance(sent, bool):
            one.side.endpoint.wait([sent], soon())
        return sent is True

    def receive() -> None:
        while not two.way_back().incoming and not gone.is_set():
            two.side.endpoint.attend()  # answers, and reads no more until the other side has lost patience
        assert gone.wait(20)
        two.side.endpoint.wait([posted], soon())

    short, _ = together(send, receive)
    assert not short
    assert bytes(buffer) == data
    assert one.link().is_clear()


CUTS = [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + SEGMENT_BYTES]
CUTS += [HEADER_BYTES + SEGMENT_BYTES + 7, 2 * HEADER_BYTES + SEGMENT_BYTES, whole_of(NBYTES) - 1]


def write(link: Link, part: bytes) -> None:
    """Write bytes to a link that no other thread writes."""
    rest = memoryview(part)
    while rest:
        try:
            rest = rest[link.sock.sendmsg([rest]) :]
        except BlockingIOError:
            time.sleep(0.001)


def hear_consent(link: Link, number: int) -> None:
    """Wait until the other side wants a message."""
    heard = b""
    while len(heard) < HEADER_BYTES:
        try:
            heard += link.sock.recv(HEADER_BYTES - len(heard))
        except BlockingIOError:
            time.sleep(0.001)
    assert heard == Header(Kind.ACCEPT, context=5, transfer=number).encode()


@pytest.mark.parametrize("cut", CUTS)
def test_what_comes_in_pieces_arrives_whole(ends: tuple[End, End], cut: int) -> None:
    one, two = ends
    data = pattern(NBYTES)
    made = frames(data, 77)

    def send() -> None:
        write(one.link(), announcement(NBYTES, 77))
        hear_consent(one.way_back(), 77)
        write(one.link(), made[:cut])
        time.sleep(0.02)  # longer than the other side is patient
        write(one.link(), made[cut:])

    with one.side.endpoint._fabric.poller.role:  # no other thread reads
        _, (got, _) = together(send, two.take)
    assert got == data


def test_other_frames_may_come_before_and_between(ends: tuple[End, End]) -> None:
    one, two = ends
    data = pattern(NBYTES)
    made, first = frames(data, 78), HEADER_BYTES + SEGMENT_BYTES
    other = Header(Kind.EAGER, TAGGED, 5, tag=3, fingerprint=PRINT, nbytes=24, total=24).encode() + text(1)

    def send() -> None:
        write(one.link(), other + announcement(NBYTES, 78))
        hear_consent(one.way_back(), 78)
        write(one.link(), made[:first] + other + made[first:])

    with one.side.endpoint._fabric.poller.role:
        _, (got, _) = together(send, two.take)
    assert got == data
    assert [two.side.take_long_way(tag=3) for _ in range(2)] == [text(1)] * 2


def test_a_message_behind_others_is_found(ends: tuple[End, End]) -> None:
    one, two = ends
    data = pattern(NBYTES)

    def send() -> None:
        one.side.send_long_way(text(1), tag=3)
        one.send(data)

    _, (got, _) = together(send, two.take)
    assert got == data
    assert two.side.take_long_way(tag=3) == text(1)


def test_it_is_not_for_who_has_something_else_under_way(ends: tuple[End, End]) -> None:
    one, _ = ends
    buffer = bytearray(NBYTES)
    posted = one.side.endpoint.recv_tagged(1, 4, PRINT, memoryview(bytearray(8)))
    at = address_of(memoryview(buffer))
    assert one.way_out().hand_over(at, soon()) is False
    assert one.way_in().wait(at, soon()) is False
    one.side.endpoint.cancel([posted])


def test_which_messages_are_announced(ends: tuple[End, End]) -> None:
    ways = ends[0].side.endpoint.ways
    assert ways.has_announced_way(Lot(1, 0, PRINT, PROMPT_BYTES + 1))
    assert not ways.has_announced_way(Lot(1, 0, PRINT, PROMPT_BYTES))
    assert not ways.has_announced_way(Lot(0, 0, PRINT, NBYTES)), "to oneself"


@pytest.mark.parametrize("nbytes", HUGE)
def test_lengths_beyond_32_bits_have_their_headers(ends: tuple[End, End], nbytes: int) -> None:
    one = ends[0]
    for way in (one.way_out(nbytes), one.way_in(nbytes)):
        announced = Header.decode(way._passage.announcement)
        assert (announced.kind, announced.nbytes, announced.total) == (Kind.ANNOUNCE, 0, nbytes)
        assert Header.decode(bytes(way._header)) == announced
    offered = Header.decode(one.lot(nbytes).header(context=5))
    assert (offered.kind, offered.nbytes, offered.total) == (Kind.OFFER, LOAN_BYTES, nbytes)


@pytest.mark.parametrize("kind", [OpKind.SEND, OpKind.RECV])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_messages_beyond_32_bits_are_planned(transport: str, kind: OpKind) -> None:
    """Without their memory: `tests/conformance/test_huge_sizes.py` moves them."""

    def body(pg: ProcessGroup) -> None:
        backend: Any = pg.backend
        for nbytes in HUGE:
            metas = (TensorMeta((nbytes,), torch.int8),)
            inputs, outputs = (metas, ()) if kind is OpKind.SEND else ((), metas)
            for peer in range(2):
                signature = Signature(kind, pg.info, inputs, outputs, peer=peer)
                assert callable(backend.plan(signature))
                assert callable(backend.plan_plain(signature))

    run_ranks(2, body, Tenant(transport, "socket", {"transport": transport}))


def test_a_message_that_differs_fails_the_group(ends: tuple[End, End]) -> None:
    one, two = ends
    held = bytearray(NBYTES)
    one.way_out(NBYTES, PRINT + 1).hand_over(address_of(memoryview(held)), soon())
    with pytest.raises(MismatchError):
        two.take()


def test_who_goes_in_the_midst_is_lost(ends: tuple[End, End]) -> None:
    one, two = ends
    one.link().finish_frame(announcement(NBYTES, 79) + frames(pattern(NBYTES), 79)[:5000])
    one.link().flush()
    one.link().reject()
    with pytest.raises(PeerLostError):
        two.take()


@pytest.mark.parametrize("sends", [True, False])
def test_an_abort_ends_who_waits(ends: tuple[End, End], sends: bool) -> None:
    one, _ = ends
    threading.Timer(0.02, one.side.endpoint.abort, [GroupAbortedError("a test")]).start()
    with pytest.raises(GroupAbortedError):
        one.send(pattern(NBYTES)) if sends else one.take()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_a_raising_handler_loses_of_a_receive_ends_the_link(ends: tuple[End, End]) -> None:
    one, two = ends
    one.link().finish_frame(announcement(NBYTES, 80))
    one.link().flush()
    way = two.way_in()
    way._leave = _interrupted  # type: ignore[method-assign, assignment]  # it raises
    with pytest.raises(KeyboardInterrupt):
        way.wait(address_of(memoryview(bytearray(NBYTES))), deadline_in(1))
    with pytest.raises(PeerLostError):
        two.side.take_long_way()


def test_what_a_raising_handler_loses_of_a_send_ends_the_link(ends: tuple[End, End]) -> None:
    one, _ = ends
    way = one.way_out()
    way._leave = _interrupted  # type: ignore[method-assign, assignment]  # it raises
    with pytest.raises(KeyboardInterrupt):
        way.hand_over(address_of(memoryview(bytearray(NBYTES))), deadline_in(1))
    with pytest.raises(PeerLostError):
        one.side.take_long_way()


@attrs.define
class Mover:
    """One side of a message over a socket.

    Attributes:
        state: The result of `move_message`.
        start: The place of the memory in the message.
    """

    sends: bool
    sock: socket.socket
    memory: bytearray
    longest: int
    state: tuple[int, int, int, bool, int, bool]
    start: int = 0

    def run(self) -> tuple[int, int, int, bool, int, bool]:
        """Move all of it."""
        nbytes, staged, fd = self.start + len(self.memory), bytearray(HEADER_BYTES), self.sock.fileno()
        templates = (
            announcement(PROMPT_BYTES + nbytes, 0),
            Header(Kind.ACCEPT, context=5).encode(),
            Header(Kind.DATA, context=5, total=nbytes).encode(),
        )
        while self.state[1] < whole_of(nbytes, self.longest) and not self.state[5]:
            number, done, asked, agreed, filled, _ = self.state
            address = address_of(memoryview(self.memory)) - self.start
            at = (address, nbytes, self.longest, number, done, asked, agreed)
            self.state = move_message(
                self.sends, fd, fd, *templates, *at, address_of(memoryview(staged)), filled, False
            )
        return self.state


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_agree_on_every_byte(seed: int) -> None:
    plan = random.Random(seed)
    for _ in range(20):
        nbytes, longest = plan.randrange(1, 5000), plan.choice([7, 64, 1000, 9000])
        data, place = bytearray(plan.randbytes(nbytes)), bytearray(nbytes)
        out, into = socket.socketpair()
        with out, into:
            for each in (out, into):
                each.setblocking(False)
            sends = Mover(True, out, data, longest, (9, 0, 0, False, 0, False))
            takes = Mover(False, into, place, longest, (0, 0, 0, False, 0, False))
            sent, got = together(sends.run, takes.run)
        assert sent == got == (9, whole_of(nbytes, longest), HEADER_BYTES, True, 0, False)
        assert place == data


@pytest.mark.parametrize("nbytes", HUGE)
def test_the_end_of_a_message_beyond_32_bits_arrives(nbytes: int) -> None:
    """Only its last segments have memory; an earlier part would have moved before."""
    begin = (nbytes - 1) // SEGMENT_BYTES - 1
    moved, start = begin * (HEADER_BYTES + SEGMENT_BYTES), begin * SEGMENT_BYTES
    data = bytearray(random.Random(0).randbytes(nbytes - start))
    place = bytearray(len(data))
    out, into = socket.socketpair()
    with out, into:
        for each in (out, into):
            each.setblocking(False)
        state = (9, moved, HEADER_BYTES, True, 0, False)
        sends = Mover(True, out, data, SEGMENT_BYTES, state, start)
        takes = Mover(False, into, place, SEGMENT_BYTES, state, start)
        sent, got = together(sends.run, takes.run)
    assert sent == got == (9, whole_of(nbytes), HEADER_BYTES, True, 0, False)
    assert place == data


def test_tensors_cross_both_ways() -> None:
    def body(pg: ProcessGroup) -> None:
        other = 1 - pg.rank()
        for number in range(12):
            sent = torch.full((PROMPT_BYTES // 4 + number * 100_000,), float(number + pg.rank()))
            got = torch.empty_like(sent)
            if number % 3 == 2:
                work = pg.irecv(got, other)
                pg.send(sent, other)
                work.wait()
            elif number % 2 == pg.rank():
                pg.send(sent, other)
                pg.recv(got, other)
            else:
                pg.recv(got, other)
                pg.send(sent, other)
            assert torch.equal(got, torch.full_like(got, float(number + other)))

    run_ranks(2, body, TCP)
