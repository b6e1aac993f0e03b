"""Messages over sockets: of every length, in pieces, behind others, within the credit, up to a link's end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.crossing_messages import cross
from support.endpoint_pairs import NBYTES, PRINT, Side, pattern, soon, text, two_sides
from support.ranks import Tenant, run_ranks
from support.threads import together

from dist2 import MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, REPORTED_BYTES
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE
from dist2.backends.socket.wire import (
    EAGER_BYTES,
    HEADER_BYTES,
    PROMPT_BYTES,
    SEGMENT_BYTES,
    TAGGED,
    Header,
    Kind,
)
from dist2.errors import GroupAbortedError
from dist2.operation.kinds import OpKind
from dist2.operation.signature import Signature, TensorMeta

TCP = Tenant("tcp", "socket", {"transport": "tcp"})
LONG = 2 * SEGMENT_BYTES + 1000
"""A message of three segments."""
HUGE = [limit + beside for limit in (2**31, 2**32) for beside in (-1, 0, 1)]
LENGTHS = [0, 1, 1000, EAGER_BYTES, EAGER_BYTES + 1, PROMPT_BYTES, PROMPT_BYTES + 1, LONG, 9 * SEGMENT_BYTES]


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with two_sides(share=False) as both:
        yield both


def link_out(side: Side) -> Link:
    """Return the link of the messages that a side sends."""
    return side.endpoint._fabric.linkage.outgoing[side.endpoint._mailbox.fabric_ids[side.peer]]


def link_in(side: Side) -> Link:
    """Return the link of the messages that it receives: another one, if both have connected at once."""
    linkage, peer = side.endpoint._fabric.linkage, side.endpoint._mailbox.fabric_ids[side.peer]
    links = linkage.to(peer)
    return next((link for link in links if link is not linkage.outgoing.get(peer)), links[0])


def eager(data: bytes, tag: int = 0) -> bytes:
    """Return the frame of a short message."""
    header = Header(Kind.EAGER, TAGGED, 5, tag=tag, fingerprint=PRINT, nbytes=len(data), total=len(data))
    return header.encode() + data


def announcement(nbytes: int, number: int) -> bytes:
    return Header(Kind.ANNOUNCE, TAGGED, 5, fingerprint=PRINT, transfer=number, total=nbytes).encode()


def segments(data: bytes, number: int) -> bytes:
    """Return the frames of an announced message."""
    made = b""
    for start in range(0, len(data), SEGMENT_BYTES):
        part = data[start : start + SEGMENT_BYTES]
        header = Header(Kind.DATA, 0, 5, tag=start, nbytes=len(part), transfer=number, total=len(data))
        made += header.encode() + part
    return made


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


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_every_length_crosses_often(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    sent = [bytes(pattern(nbytes, number)) for number in range(8 if nbytes > 1000 else 60)]
    _, got = together(
        lambda: [one.send_long_way(each) for each in sent],
        lambda: [two.take_long_way(nbytes) for _ in sent],
    )
    assert got == sent


def test_a_collective_is_told_from_another_by_its_number(sides: tuple[Side, Side]) -> None:
    buffers = {seq: bytearray(NBYTES) for seq in (8, 7)}
    for seq in (7, 8):
        for side in sides:
            side.endpoint.begin(seq, PRINT)
    one, two = (side.endpoint for side in sides)
    posted = [two.recv(0, seq, 3, PRINT, memoryview(buffer)) for seq, buffer in buffers.items()]
    one.wait([one.send(1, seq, 3, PRINT, memoryview(text(seq))) for seq in (7, 8)], soon())
    two.wait(posted, soon())
    assert {seq: bytes(buffer) for seq, buffer in buffers.items()} == {7: text(7), 8: text(8)}
    assert two._mailbox.calls.seen[0] == 8


def test_an_older_message_of_the_tag_is_taken_first(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for number, tag in ((1, 0), (8, 8), (2, 0)):
        one.send_long_way(text(number), tag)
    assert two.take_long_way(tag=8) == text(8)  # also delivers the message before it to the mailbox
    assert two.take_long_way() == text(1)
    assert two.take_long_way() == text(2)


@pytest.mark.parametrize("source", [0, ANY_SOURCE])
def test_a_receive_posted_before_is_served_first(sides: tuple[Side, Side], source: int) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.endpoint.recv_tagged(source, 0, PRINT, memoryview(buffer))
    one.send_long_way(text(1))
    one.send_long_way(text(2))
    assert two.take_long_way() == text(2)
    two.endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)


@pytest.mark.parametrize("cut", [1, 55, 56, 57, 60])
def test_a_short_message_that_comes_in_pieces_arrives_whole(sides: tuple[Side, Side], cut: int) -> None:
    one, two = sides
    write(link_out(one), eager(text(4))[:cut])
    rest = threading.Timer(0.02, write, [link_out(one), eager(text(4))[cut:]])
    rest.start()
    assert two.take_long_way() == text(4)
    rest.join(10)


CUTS = [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + SEGMENT_BYTES]
CUTS += [HEADER_BYTES + SEGMENT_BYTES + 7, 2 * HEADER_BYTES + SEGMENT_BYTES, LONG + 3 * HEADER_BYTES - 1]


@pytest.mark.parametrize("cut", CUTS)
def test_a_long_message_that_comes_in_pieces_arrives_whole(sides: tuple[Side, Side], cut: int) -> None:
    one, two = sides
    data = bytes(pattern(LONG))
    made = segments(data, 77)

    def send() -> None:
        write(link_out(one), announcement(LONG, 77))
        hear_consent(link_in(one), 77)
        write(link_out(one), made[:cut])
        time.sleep(0.02)
        write(link_out(one), made[cut:])

    with one.endpoint._fabric.poller.role:  # no other thread reads
        _, got = together(send, lambda: two.take_long_way(LONG))
    assert got == data


def test_other_frames_may_come_before_and_between(sides: tuple[Side, Side]) -> None:
    one, two = sides
    data, first = bytes(pattern(LONG)), HEADER_BYTES + SEGMENT_BYTES
    made, other = segments(data, 78), eager(text(1), tag=3)

    def send() -> None:
        write(link_out(one), other + announcement(LONG, 78))
        hear_consent(link_in(one), 78)
        write(link_out(one), made[:first] + other + made[first:])

    with one.endpoint._fabric.poller.role:
        _, got = together(send, lambda: two.take_long_way(LONG))
    assert got == data
    assert [two.take_long_way(tag=3) for _ in range(2)] == [text(1)] * 2


def test_a_send_that_nobody_wants_can_be_given_up(sides: tuple[Side, Side]) -> None:
    one, two = sides
    data = bytes(pattern(LONG, 1))
    unwanted = one.endpoint.send_tagged(1, 0, PRINT, memoryview(pattern(LONG)))
    with pytest.raises(OperationTimeoutError):
        one.endpoint.wait([unwanted], soon(0.05))
    _, got = together(lambda: one.send_long_way(data), lambda: two.take_long_way(LONG))
    assert got == data, "the first was taken back"


def test_what_was_received_is_reported(sides: tuple[Side, Side]) -> None:
    one, two = sides
    nbytes, account = 30_000, one.account
    for number in range(2 * REPORTED_BYTES // nbytes):
        before = account.used
        sending = one.endpoint.send_tagged(1, 0, PRINT, memoryview(pattern(nbytes, number)))
        assert account.used == before + nbytes + FRAME_COST
        assert two.take_long_way(nbytes) == pattern(nbytes, number)
        one.endpoint.wait([sending], soon())
        one.endpoint.attend()
    assert account.used < 2 * REPORTED_BYTES


@pytest.mark.parametrize("nbytes", [30_000, 3 * EAGER_BYTES])
def test_what_nobody_receives_is_bounded_by_the_credit(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    sent = [one.endpoint.send_tagged(1, 0, PRINT, memoryview(pattern(nbytes, each))) for each in range(300)]
    for _ in range(100):
        one.endpoint.attend()
        two.endpoint.attend()
    here = sum(each.done for each in sent)
    assert CREDIT_BYTES // nbytes // 2 - 1 <= here <= CREDIT_BYTES // nbytes
    _, got = together(
        lambda: one.endpoint.wait(sent, soon()), lambda: [two.take_long_way(nbytes) for _ in sent]
    )
    assert got == [bytes(pattern(nbytes, number)) for number in range(len(sent))]


@pytest.mark.parametrize("nbytes", [NBYTES, LONG])
def test_a_message_that_differs_fails_the_group(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    one.endpoint.send_tagged(1, 0, PRINT + 1, memoryview(bytearray(nbytes)))
    with pytest.raises(MismatchError):
        two.take_long_way(nbytes)
    with pytest.raises(MismatchError):
        two.send_long_way(text(1))


def test_who_leaves_is_noticed_and_what_was_sent_before_arrives(sides: tuple[Side, Side]) -> None:
    one, two = sides
    one.send_long_way(text(1))
    one.endpoint.close()
    assert two.take_long_way() == text(1)
    with pytest.raises(PeerLostError):
        two.take_long_way()


def test_who_goes_in_the_midst_is_lost(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(link_out(one), announcement(LONG, 79) + segments(pattern(LONG), 79)[:5000])
    link_out(one).reject()
    with pytest.raises(PeerLostError):
        two.take_long_way(LONG)


@pytest.mark.parametrize("sends", [True, False])
def test_an_abort_ends_who_waits(sides: tuple[Side, Side], sends: bool) -> None:
    one, _ = sides
    threading.Timer(0.02, one.endpoint.abort, [GroupAbortedError("a test")]).start()
    with pytest.raises(GroupAbortedError):
        one.send_long_way(pattern(LONG)) if sends else one.take_long_way(LONG)


@pytest.mark.parametrize("nbytes", HUGE)
def test_lengths_beyond_32_bits_have_their_headers(nbytes: int) -> None:
    announced = Header.decode(Header(Kind.ANNOUNCE, TAGGED, 5, total=nbytes).encode())
    assert (announced.kind, announced.nbytes, announced.total) == (Kind.ANNOUNCE, 0, nbytes)


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


@pytest.mark.parametrize("seed", range(2))
def test_messages_that_cross_keep_their_order(seed: int) -> None:
    def body(pg: ProcessGroup) -> None:
        plan = random.Random(seed)
        for _ in range(3):
            cross(pg, plan.randrange(1000), 40, (1, 5, 900, 20_000, 100_000), (0.5, 0.7))
            pg.barrier()

    run_ranks(2, body, TCP)


def _round(pg: ProcessGroup, numel: int) -> None:
    rank, size = pg.rank(), pg.size()
    summed = torch.full((numel,), rank + 1.0)
    pg.all_reduce(summed)
    assert torch.equal(summed, torch.full_like(summed, size * (size + 1) // 2))
    parts = [torch.empty(numel) for _ in range(size)]
    pg.all_gather(parts, torch.full((numel,), float(rank)))
    assert [int(part[-1]) for part in parts] == list(range(size))
    sent = torch.arange(float(size * numel)).view(size, numel) % 100 + rank
    got = torch.empty_like(sent)
    pg.all_to_all_single(got, sent)
    expected = [torch.arange(float(rank * numel), (rank + 1) * numel) % 100 + src for src in range(size)]
    assert torch.equal(got, torch.stack(expected))
    pg.barrier()


@pytest.mark.parametrize("numel", [7, EAGER_BYTES, PROMPT_BYTES])
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_cross_again_and_again(world_size: int, numel: int) -> None:
    run_ranks(world_size, lambda pg: [_round(pg, numel) for _ in range(3)], TCP)


def test_parts_of_a_coalesced_call_are_of_one_operation() -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(3):
            tensors = [torch.ones(3), torch.ones(2, dtype=torch.int32), torch.ones(4)]
            pg.all_reduce_coalesced(tensors)
            assert all(bool((tensor == 2).all()) for tensor in tensors)

    run_ranks(2, body, TCP)
