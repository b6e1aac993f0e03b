"""Receives inside a host that are posted before their message comes: which gets it, and what ends them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from support.endpoint_pairs import NBYTES, PRINT, Side, pattern, soon, text
from support.ranks import Tenant, run_ranks
from support.threads import together

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import FRAME_COST, REPORTED_BYTES
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Sending
from dist2.backends.socket.wire import EAGER_BYTES, PROMPT_BYTES

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

SHM = Tenant("shm", "socket", {"transport": "shm"})
LONG = PROMPT_BYTES + 1
"""Announced, not sent at once."""


def start(side: Side, data: bytes, tag: int = 0) -> Sending:
    """Send by the queue, and wait for nothing."""
    sending = side.endpoint.send_tagged(side.peer, tag, PRINT, memoryview(data))
    assert isinstance(sending, Sending)
    return sending


def link_in(side: Side) -> Link:
    """Return the link with the ring of the messages to a side."""
    return side.endpoint._fabric.linkage.rings.links_from[side.endpoint._mailbox.fabric_ids[side.peer]]


@pytest.mark.parametrize("nbytes", [0, 1, NBYTES, 20_000, LONG])
def test_a_message_ends_the_receive_that_is_posted(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    for number in range(3):
        buffer, data = bytearray(nbytes), pattern(nbytes, number)
        told: list[Any] = []
        posted = two.post(buffer)
        posted.add_done_callback(told.append)
        together(
            lambda data=data: one.endpoint.wait([start(one, data)], soon()),
            lambda posted=posted: two.endpoint.wait([posted], soon()),
        )
        assert told == [posted]
        assert (posted.error, posted.source, posted.nbytes, posted.data) == (None, 0, nbytes, None)
        assert buffer == data
    assert not two.endpoint._mailbox.pending()
    assert not one.endpoint._mailbox.pending()


@pytest.mark.parametrize("direct", [True, False])
def test_receives_are_served_in_the_order_in_which_they_were_posted(
    sides: tuple[Side, Side], direct: bool
) -> None:
    one, two = sides
    buffers = [bytearray(NBYTES) for _ in range(3)]
    posted = [two.post(buffer) for buffer in buffers]
    for number in range(4):
        assert one.send(text(number)) if direct else start(one, text(number)).done
    assert two.take() is None, "receives before it wait for the same"
    two.endpoint.wait(posted[2:], soon())
    assert [bytes(buffer) for buffer in buffers] == [text(0), text(1), text(2)]
    assert (two.take() or two.take_long_way()) == text(3)


@pytest.mark.parametrize("nbytes", [NBYTES, LONG])
@pytest.mark.parametrize("peers", [(ANY_SOURCE, 0), (0, ANY_SOURCE)])
def test_a_receive_from_any_has_its_turn(
    sides: tuple[Side, Side], peers: tuple[int, int], nbytes: int
) -> None:
    one, two = sides
    buffers = [bytearray(nbytes) for _ in peers]
    posted = [two.post(buffer, peer=peer) for buffer, peer in zip(buffers, peers, strict=True)]
    sent = [start(one, pattern(nbytes, number)) for number in range(2)]
    together(partial(two.endpoint.wait, posted, soon()), partial(one.endpoint.wait, sent, soon()))
    assert buffers == [pattern(nbytes, number) for number in range(2)]


def test_another_message_that_is_next_is_kept(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.post(buffer)
    assert one.send(text(8), tag=8)
    assert one.send(text(1))
    two.endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)
    assert two.take_long_way(tag=8) == text(8)


def test_nothing_is_written_where_a_receive_was_given_up(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer, other = bytearray(NBYTES), bytearray(NBYTES)
    posted, later = two.post(buffer), two.post(other)
    two.endpoint.cancel([posted])
    assert one.send(text(1))
    two.endpoint.wait([later], soon())
    assert isinstance(posted.error, GroupAbortedError)
    assert (bytes(buffer), bytes(other)) == (bytes(NBYTES), text(1))


def test_a_receive_that_is_given_up_meanwhile_is_left_alone(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for number in range(20):
        buffer = bytearray(NBYTES)
        posted = two.post(buffer)
        together(
            lambda number=number: one.send(text(number)),
            lambda posted=posted: two.endpoint.cancel([posted]),
            two.endpoint.attend,
        )
        assert posted.done
        assert (posted.error is None) == (bytes(buffer) == text(number))
        if posted.error is not None:
            assert two.take_long_way() == text(number)


@pytest.mark.parametrize("nbytes", [NBYTES, LONG])
def test_a_group_that_has_failed_takes_nothing(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    buffer = bytearray(nbytes)
    posted, sending = two.post(buffer), start(one, pattern(nbytes))
    two.endpoint.close()
    assert isinstance(posted.error, GroupAbortedError)
    assert buffer == bytes(nbytes)
    one.endpoint.cancel([sending])


def test_a_group_that_is_aborted_while_the_offer_comes_fails_the_receive(sides: tuple[Side, Side]) -> None:
    one, two = sides
    posted, sending = two.post(bytearray(LONG)), start(one, pattern(LONG, 1))
    two.endpoint._mailbox.aborted = GroupAbortedError("a test")
    with pytest.raises(GroupAbortedError):
        two.endpoint.wait([posted], soon())
    one.endpoint.cancel([sending])


def test_a_message_that_differs_fails_the_group(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    posted = two.post(bytearray(NBYTES - 1))
    with pytest.raises(MismatchError):
        two.endpoint.wait([posted], soon())


def test_the_sender_is_told_what_was_received(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for number in range(REPORTED_BYTES // (FRAME_COST + EAGER_BYTES) + 1):
        buffer = bytearray(EAGER_BYTES)
        posted = two.post(buffer)
        assert one.send(text(number)[:1] * EAGER_BYTES)
        two.endpoint.wait([posted], soon())
        assert bytes(buffer) == text(number)[:1] * EAGER_BYTES
    assert two.account.owed < FRAME_COST + EAGER_BYTES
    one.endpoint.attend()
    assert one.account.used < FRAME_COST + EAGER_BYTES


def test_a_long_message_that_is_taken_back_fails_its_receive(sides: tuple[Side, Side]) -> None:
    one, two = sides
    posted = two.post(bytearray(LONG))
    one.endpoint.cancel([start(one, pattern(LONG, 1))])
    with pytest.raises(PeerLostError, match="gave up sending"):
        two.endpoint.wait([posted], soon())
    assert not two.endpoint._mailbox.pending()


def test_works_of_receives_complete_with_all_that_goes_with_it() -> None:
    def body(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()
        got = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
        for number in range(100):
            works = [pg.irecv(each, peer, tag=tag) for tag, each in enumerate(got)]
            for tag in range(4):
                pg.isend(torch.tensor([tag, number]), peer, tag=tag).wait()
            for tag in (0, 2, 1, 3):
                works[tag].wait()
                assert works[tag].is_success()
                assert works[tag].source_rank() == peer
                assert works[tag].operation.finished_ns
                assert got[tag].tolist() == [tag, number]
            assert not pg._runner._in_flight

    run_ranks(2, body, SHM)


def test_a_wait_that_is_given_up_leaves_the_receive() -> None:
    def body(pg: ProcessGroup) -> None:
        got = torch.zeros(2)
        for _ in range(2):  # the second has a plan and a link
            if pg.rank() == 0:
                work = pg.irecv(got.zero_(), 1)
                with pytest.raises(OperationTimeoutError):
                    work.wait(timeout=0.05)
                pg.send(got, 1)
                work.wait()
                assert got.tolist() == [1, 1]
            else:
                pg.recv(got, 0)
                pg.send(torch.ones(2), 0)

    run_ranks(2, body, SHM)


def test_windows_both_ways_complete_with_all_that_goes_with_it() -> None:
    done = threading.Barrier(2)

    def body(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()
        for number in range(10):
            sent = [torch.full((20_000 * (each + 1),), float(number + each)) for each in range(6)]
            got = [torch.zeros_like(each) for each in sent]
            works = [pg.irecv(each, peer, tag=tag % 2) for tag, each in enumerate(got)]
            works += [pg.isend(each, peer, tag=tag % 2) for tag, each in enumerate(sent)]
            for work in works if number % 2 else reversed(works):
                work.wait()
            for mine, theirs in zip(sent, got, strict=True):
                assert torch.equal(mine, theirs)
            assert not pg._runner._in_flight
            done.wait(10)

    run_ranks(2, body, SHM)
