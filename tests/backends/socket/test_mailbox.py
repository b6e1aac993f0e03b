"""Matching: which receive gets which message, in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist2 import WireError
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.messages.calls import REMEMBERED, Called
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST
from dist2.backends.socket.transport.messages.mailbox import Arrived, Mailbox
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Receiving, Sending
from dist2.backends.socket.wire import EAGER_BYTES, TAGGED, Header, Kind

CONTEXT = 5


def mailbox(world_size: int = 4) -> Mailbox:
    cards = [Card(f"fabric{rank}", "127.0.0.1", 1 + rank) for rank in range(world_size)]
    return Mailbox(CONTEXT, 0, cards, False, lambda seq, number: Called(0, 0, "nothing"))


def tagged(peer: int, tag: int = 0, text: bytes = b"") -> Arrived:
    header = Header(Kind.EAGER, TAGGED, CONTEXT, tag=tag, nbytes=len(text), total=len(text))
    return Arrived(header, peer, bytearray(text))


def announced(peer: int, transfer: int, tag: int = 0) -> Arrived:
    header = Header(Kind.ANNOUNCE, TAGGED, CONTEXT, tag=tag, transfer=transfer, total=EAGER_BYTES + 1)
    return Arrived(header, peer)


def collective(peer: int, seq: int, step: int, fingerprint: int = 0) -> Arrived:
    return Arrived(Header(Kind.EAGER, 0, CONTEXT, seq, step, fingerprint), peer, bytearray())


def receive(peer: int, tag: int = 0) -> Receiving:
    return Receiving(CONTEXT, peer, True, 0, tag, 0, memoryview(bytearray(8)))


def receive_step(peer: int, seq: int, step: int) -> Receiving:
    return Receiving(CONTEXT, peer, False, seq, step, 0, memoryview(bytearray(8)))


def test_messages_of_one_sender_and_tag_are_taken_in_the_order_sent() -> None:
    box = mailbox()
    arrived = [tagged(1, 7) for _ in range(3)]
    for each in arrived:
        box.keep(each)
    assert [box.post(receive(1, 7)) for _ in range(4)] == [*arrived, None]


def test_receives_are_served_in_the_order_posted() -> None:
    box = mailbox()
    posted = [receive(1, 7) for _ in range(3)]
    assert [box.post(each) for each in posted] == [None] * 3
    assert [box.match(tagged(1, 7).key) for _ in range(4)] == [*posted, None]


def test_tags_and_senders_are_kept_apart() -> None:
    box = mailbox()
    first, second, other = tagged(1, 1), tagged(1, 2), tagged(2, 1)
    for each in (first, second, other):
        box.keep(each)
    assert box.post(receive(3, 1)) is None
    assert box.post(receive(2, 2)) is None
    assert box.post(receive(1, 2)) is second
    assert box.post(receive(2, 1)) is other
    assert box.post(receive(1, 1)) is first


def test_a_collective_is_not_taken_for_a_tagged_message() -> None:
    box = mailbox()
    box.keep(collective(1, 0, 7))
    assert box.post(receive(1, 7)) is None
    assert box.post(receive(ANY_SOURCE, 7)) is None
    assert box.match(collective(1, 0, 7).key) is None


def test_steps_of_operations_are_matched_whatever_their_order() -> None:
    box = mailbox()
    late, early = collective(1, 9, 0), collective(1, 8, 3)
    box.keep(late)
    box.keep(early)
    assert box.post(receive_step(1, 8, 0)) is None
    assert box.post(receive_step(1, 8, 3)) is early
    assert box.post(receive_step(1, 9, 0)) is late


def test_a_receive_from_any_takes_what_arrived_first() -> None:
    box = mailbox()
    first, second, third = tagged(2, 7), tagged(1, 7), tagged(2, 7)
    box.keep(tagged(3, 8))
    for each in (first, second, third):
        box.keep(each)
    assert [box.post(receive(ANY_SOURCE, 7)) for _ in range(4)] == [first, second, third, None]


def test_a_message_goes_to_the_receive_posted_first_from_any_or_not() -> None:
    box = mailbox()
    posted = [receive(1, 7), receive(ANY_SOURCE, 7), receive(1, 7), receive(ANY_SOURCE, 7)]
    for each in posted:
        box.post(each)
    assert box.match(tagged(2, 7).key) is posted[1]
    assert [box.match(tagged(1, 7).key) for _ in range(4)] == [posted[0], posted[2], posted[3], None]


def test_a_forgotten_receive_gets_nothing_and_the_next_does() -> None:
    box = mailbox()
    posted = [receive(1), receive(1), receive(ANY_SOURCE)]
    for each in posted:
        box.post(each)
    box.forget(posted[0])
    box.forget(posted[0])  # again: nothing
    box.forget(receive(2))  # never posted
    assert box.match(tagged(1).key) is posted[1]
    box.forget(posted[2])
    assert box.match(tagged(1).key) is None
    assert box.pending() == []


def test_an_announcement_that_is_taken_back_is_dropped_alone() -> None:
    box = mailbox()
    kept = [announced(1, 10), announced(1, 11), announced(2, 11), tagged(1)]
    for each in kept:
        box.keep(each)
    assert box.drop_announced(1, 99) is None
    assert box.drop_announced(1, 11) is kept[1]
    assert box.drop_announced(1, 11) is None
    assert [box.post(receive(1)) for _ in range(3)] == [kept[0], kept[3], None]
    assert box.post(receive(2)) is kept[2]


def test_what_a_peer_may_send_unreceived_is_bounded_for_each_sort_alone() -> None:
    box = mailbox()
    size = EAGER_BYTES
    count = CREDIT_BYTES // (size + FRAME_COST)
    for _ in range(count):
        box.keep(tagged(1, 0, bytes(size)))
    with pytest.raises(WireError, match="unreceived"):
        box.keep(tagged(1, 0, bytes(size)))
    box.keep(tagged(2, 0, bytes(size)))
    box.keep(collective(1, 0, 0))


def test_what_was_received_is_held_no_more() -> None:
    box = mailbox()
    for _ in range(3 * CREDIT_BYTES // EAGER_BYTES):
        box.keep(tagged(1, 0, bytes(EAGER_BYTES)))
        assert box.post(receive(1)) is not None
    box.keep(announced(1, 1))
    box.drop_announced(1, 1)
    assert box.accounts[True][1].held == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from(["arrive", "post", "any"]))))
def test_matching_agrees_with_two_lists(events: list[tuple[int, int, str]]) -> None:
    box = mailbox()
    arrivals: list[Arrived] = []
    posts: list[Receiving] = []
    for peer, tag, event in events:
        if event == "arrive":
            message = tagged(peer, tag)
            expected = next((p for p in posts if p.tag == tag and p.peer in (peer, ANY_SOURCE)), None)
            assert box.match(message.key) is expected
            if expected is None:
                box.keep(message)
                arrivals.append(message)
            else:
                posts.remove(expected)
            continue
        receiving = receive(ANY_SOURCE if event == "any" else peer, tag)
        fits = [a for a in arrivals if a.header.tag == tag and receiving.peer in (a.peer, ANY_SOURCE)]
        assert box.post(receiving) is (fits[0] if fits else None)
        if fits:
            arrivals.remove(fits[0])
        else:
            posts.append(receiving)


def test_messages_that_contradict_what_was_called_are_told() -> None:
    box = mailbox()
    assert not box.calls.has_begun(3)
    box.begin(3, 33)
    assert box.calls.has_begun(3)
    assert not box.calls.has_begun(4)
    assert box.calls.contradicts(collective(1, 3, 0, 34).header)
    assert not box.calls.contradicts(collective(1, 3, 0, 33).header)
    assert not box.calls.contradicts(collective(1, 4, 0, 34).header)  # not called yet
    assert not box.calls.contradicts(tagged(1, 3).header)
    for seq in range(4, 4 + 3 * REMEMBERED):
        box.begin(seq, seq)
        assert len(box.calls.begun) <= 2 * REMEMBERED
    assert {*range(4 + 2 * REMEMBERED, 4 + 3 * REMEMBERED)} <= box.calls.begun.keys()
    assert not box.calls.contradicts(collective(1, 3, 0, 34).header)  # too long ago


def test_strays_are_those_of_one_operation() -> None:
    box = mailbox()
    wanted = [collective(1, 3, 0), collective(1, 3, 1), collective(2, 3, 0)]
    for each in (*wanted, collective(1, 4, 0), tagged(1, 3)):
        box.keep(each)
    assert set(box.strays(3)) == set(wanted)


def test_everything_that_is_not_done_is_pending_until_it_is_cleared() -> None:
    box = mailbox()
    posted, coming = receive(1), receive(2)
    sending = Sending(CONTEXT, 1, True, 0, 0, 0, memoryview(b""))
    waiting = Sending(CONTEXT, 1, False, 0, 0, 0, memoryview(b""))
    box.post(posted)
    box.accepted.add(coming)
    box.sending[sending.number] = sending
    box.accounts[False][1].waiting.append(waiting)
    assert set(box.pending()) == {posted, coming, sending, waiting}
    assert not box.watched()
    coming.add_done_callback(lambda _: None)
    assert box.watched()
    box.clear()
    assert box.pending() == []
