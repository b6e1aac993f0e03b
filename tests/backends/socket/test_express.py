"""The short path of short messages: which it takes, which it leaves, and that both paths agree."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.crossing_messages import cross
from support.endpoint_pairs import NBYTES, PRINT, Side, soon, text
from support.ranks import Tenant, run_ranks

from dist2 import GroupAbortedError, MismatchError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, REPORTED_BYTES
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE
from dist2.backends.socket.transport.messages.ways import Lot
from dist2.backends.socket.wire import EAGER_BYTES

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

SHM = Tenant("shm", "socket", {"transport": "shm"})


def test_messages_cross_whichever_way_either_side_takes(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    assert two.take() == text(1)
    assert one.send(text(2))
    assert two.take_long_way() == text(2)
    one.send_long_way(text(3))
    assert two.take() == text(3)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("nbytes", [0, 1, 1000, EAGER_BYTES])
def test_every_length_goes_round_the_ring_often(sides: tuple[Side, Side], nbytes: int, ahead: int) -> None:
    one, two = sides  # with nothing ahead each begins at the ring's beginning
    rounds = 40 if nbytes else 20_000 // 56
    for number in range(rounds + ahead):
        sent = text(number)[:1] * nbytes
        if not one.send(sent):  # credit comes back by a frame, which the long path reads
            one.send_long_way(sent)
        if number >= ahead:
            got = two.take(nbytes)
            expected = text(number - ahead)[:1] * nbytes
            assert (two.take_long_way(nbytes) if got is None else got) == expected


@pytest.mark.parametrize("nbytes", [0, 8, 9, 1000])
def test_a_frame_that_nothing_is_before_begins_at_the_beginning(
    sides: tuple[Side, Side], nbytes: int
) -> None:
    one, two = sides
    link = two.endpoint._fabric.linkage.rings.links_from.get(one.node.card.card.fabric_id)
    assert link is not None
    assert link.rx is not None
    begins = 8 if nbytes > 8 else 0  # then the payload has lines of its own
    for number in range(3):
        sent = text(number)[:1] * nbytes
        assert one.send(sent)
        header = Lot(1, 0, PRINT, nbytes).header(two.endpoint._mailbox.context)
        head, base = link.rx.words[:2]
        assert head - base == begins + len(header + sent)
        assert one.send(text(number))
        assert two.take(nbytes) == sent
        assert two.take() == text(number)


def test_messages_to_oneself_have_no_short_way(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    assert one.endpoint.ways.has_express(Lot(1, 0, PRINT, 8))
    assert not one.endpoint.ways.has_express(Lot(0, 0, PRINT, 8))


def test_nothing_is_taken_before_it_is_here(sides: tuple[Side, Side]) -> None:
    _, two = sides
    assert two.take() is None


def test_an_older_message_of_the_tag_is_taken_first(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    assert one.send(text(8), tag=8)
    assert two.take_long_way(tag=8) == text(8)  # also delivers the message before it to the mailbox
    assert one.send(text(2))
    assert two.take() is None
    assert two.take_long_way() == text(1)
    got = two.take()  # unless the mailbox has it as well: receiving looks into the ring now and then
    assert (two.take_long_way() if got is None else got) == text(2)


@pytest.mark.parametrize("source", [0, ANY_SOURCE])
def test_a_receive_posted_before_is_served_first(sides: tuple[Side, Side], source: int) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.endpoint.recv_tagged(source, 0, PRINT, memoryview(buffer))
    assert one.send(text(1))
    assert one.send(text(2))
    assert two.take() is None, "the first message is the other one's"
    two.endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)
    assert two.take_long_way() == text(2)


def test_another_tag_is_not_taken_for_this_one(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1), tag=1)
    assert two.take(tag=2) is None
    assert two.take(tag=1) == text(1)


def test_a_message_that_differs_is_left_to_who_can_say_so(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    assert two.take(fingerprint=PRINT + 1) is None
    assert two.take(nbytes=NBYTES - 1) is None
    buffer = bytearray(NBYTES - 1)
    transfer = two.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    with pytest.raises(MismatchError):
        two.endpoint.wait([transfer], soon())
    assert not two.send(text(2)), "the group has failed"


def test_what_nobody_receives_is_bounded_by_the_credit(sides: tuple[Side, Side]) -> None:
    one, two = sides
    sent = 0
    while one.send(text(sent) * 1000):
        sent += 1
        two.endpoint.attend()  # as any call does now and then
        assert sent * NBYTES * 1000 <= CREDIT_BYTES
    assert sent > CREDIT_BYTES // (NBYTES * 1000) // 2
    for number in range(sent):
        got = two.take(NBYTES * 1000)
        assert (got or two.take_long_way(NBYTES * 1000)) == text(number) * 1000


def crossed(sides: tuple[Side, Side], nbytes: int) -> int:
    """Exchange messages of a length until the receiver reports received bytes; return their number."""
    one, two = sides
    for number in range(REPORTED_BYTES // (FRAME_COST + nbytes) + 1):
        assert one.send(text(number)[:1] * nbytes)
        assert two.take(nbytes) == text(number)[:1] * nbytes
    assert two.account.owed < FRAME_COST + nbytes
    return number + 1


def test_what_was_received_is_taken_in_before_the_message_behind_it(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for number in range(3):
        used = one.account.used
        count = crossed(sides, EAGER_BYTES)
        assert one.account.used == used + count * (FRAME_COST + EAGER_BYTES)
        assert two.send(text(number))
        got = one.take()
        assert got == text(number)
        assert one.account.used == 0
    crossed(sides, EAGER_BYTES)
    assert one.take() is None, "there is nothing but that"
    one.endpoint.attend()
    assert one.account.used == 0


def test_nobody_has_more_credit_for_a_report_of_more_than_was_sent(sides: tuple[Side, Side]) -> None:
    one, two = sides
    two.account.owed = 2**40
    assert one.send(text(1))
    assert two.take() == text(1)
    assert two.account.owed == 0
    assert two.send(text(2))
    assert (one.take() or one.take_long_way()) == text(2)
    assert one.account.used == 0


def test_who_waits_for_credit_sends_when_it_is_back(sides: tuple[Side, Side]) -> None:
    one, two = sides
    sent = 0
    while one.send(text(sent) * 1000):
        sent += 1
        two.endpoint.attend()
    waiting = one.endpoint.send_tagged(1, 0, PRINT, memoryview(text(sent) * 1000))
    assert not waiting.done
    for number in range(sent):
        got = two.take(NBYTES * 1000)
        assert (got or two.take_long_way(NBYTES * 1000)) == text(number) * 1000
    assert two.send(text(1))
    assert one.take() is None, "it is left to who can send what waits"
    assert one.take_long_way() == text(1)
    one.endpoint.wait([waiting], soon())
    got = two.take(NBYTES * 1000)
    assert (got or two.take_long_way(NBYTES * 1000)) == text(sent) * 1000


def test_a_closed_group_takes_no_short_way(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    two.endpoint.close()
    assert two.take() is None
    assert not two.send(text(2))


def test_a_ring_with_a_counter_out_of_bounds_ends_the_peer_and_nothing_else(sides: tuple[Side, Side]) -> None:
    one, two = sides
    link = two.endpoint._fabric.linkage.rings.links_from.get(one.node.card.card.fabric_id)
    assert link is not None
    assert link.rx is not None
    link.rx.words[0] = 1 << 50
    assert two.take() is None
    with pytest.raises(PeerLostError):
        two.take_long_way()


def in_a_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Begin a call in a thread; return the thread, and a list that gets its result."""
    returned: list[object] = []
    thread = threading.Thread(target=lambda: returned.append(call()))
    thread.start()
    return thread, returned


def test_both_ways_wait_for_whoever_has_the_lock(sides: tuple[Side, Side]) -> None:
    one, two = sides
    with one.endpoint._fabric.lock:
        thread, sent = in_a_thread(lambda: one.send(text(1)))
        thread.join(0.05)
        assert thread.is_alive()
        assert two.take() is None, "nothing was written"
    thread.join(10)
    assert sent == [True]
    with two.endpoint._fabric.lock:
        thread, taken = in_a_thread(two.take)
        thread.join(0.05)
        assert thread.is_alive()
    thread.join(10)
    assert taken == [text(1)]


def test_nothing_is_taken_while_another_thread_polls(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    with two.endpoint._fabric.poller.role:
        assert two.take() is None
    assert two.take() == text(1)


def test_a_failed_group_and_a_broken_link_take_no_message(sides: tuple[Side, Side]) -> None:
    one, two = sides
    mailbox, other = two.endpoint._mailbox, one.node.card.card.fabric_id
    out = two.endpoint._fabric.linkage.outgoing[other]
    mailbox.fault = GroupAbortedError("a test")
    assert not two.send(text(2))
    assert one.send(text(1))
    assert two.take() is None
    mailbox.fault = None
    assert two.take() == text(1)
    out._broken = True
    assert not two.send(text(2))
    out._broken = False
    assert two.send(text(2))
    assert one.take() == text(2)


def test_threads_that_send_and_receive_at_once_lose_and_mix_nothing() -> None:
    def body(pg: ProcessGroup) -> None:
        peer, count = 1 - pg.rank(), 300

        def send(tag: int) -> None:
            for number in range(count):
                pg.send(torch.tensor([tag, number]), peer, tag)

        def receive(tag: int) -> None:
            got = torch.zeros(2, dtype=torch.int64)
            for number in range(count):
                pg.recv(got, peer, tag)
                assert got.tolist() == [tag, number]

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(each, tag) for tag in (0, 1) for each in (send, receive)]
        for each in running:
            each.result()

    run_ranks(2, body, SHM)


@pytest.mark.parametrize("seed", range(3))
def test_order_holds_between_messages_of_either_way(seed: int) -> None:
    def body(pg: ProcessGroup) -> None:
        plan = random.Random(seed)
        for round_ in range(4):
            cross(pg, plan.randrange(1000) + round_, 40, (1, 5, 900, 20_000), (0.4, 0.6))
            pg.barrier()

    run_ranks(2, body, SHM)
