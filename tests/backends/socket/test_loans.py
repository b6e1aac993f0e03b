"""Long messages in a host: read where they lie, taken back at any time, sent where reading is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from support.endpoint_pairs import PRINT, Side, pattern, soon, two_sides
from support.ranks import Tenant, run_ranks

from dist2 import PeerLostError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.links.ring import HEADER_BYTES, SLOTS, RingReader, RingWriter
from dist2.backends.socket.transport.messages import loans
from dist2.backends.socket.transport.messages.loans import Borrowed, Lent
from dist2.backends.socket.transport.messages.transfer import Sending
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.wire import EAGER_BYTES, LOAN_BYTES, Header, Kind, Loan
from dist2.errors import WireError

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

LONG = 1 << 20
SHM = Tenant("shm", "socket", {"transport": "shm"})


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with two_sides() as both:
        yield both


def post(side: Side, text: bytearray) -> Sending:
    sending = side.endpoint.send_tagged(side.peer, 0, PRINT, memoryview(text))
    assert isinstance(sending, Sending)
    return sending


def exchange(one: Side, two: Side, text: bytearray) -> bytes:
    """Send by one side and receive by the other, each waiting on a thread of its own."""
    sending = post(one, text)
    waiter = threading.Thread(target=one.endpoint.wait, args=([sending], soon()))
    waiter.start()
    got = two.take_long_way(len(text))
    waiter.join(10)
    assert not waiter.is_alive()
    assert sending.error is None
    return got


@pytest.mark.parametrize("nbytes", [EAGER_BYTES + 1, LONG, 9_000_001])
def test_a_long_message_is_read_where_it_lies(
    sides: tuple[Side, Side], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    really = loans.read

    def count(pid: int, dst: int, src: int, nbytes: int) -> None:
        read.append(nbytes)
        really(pid, dst, src, nbytes)

    monkeypatch.setattr(loans, "read", count)
    text = pattern(nbytes)
    assert exchange(*sides, text) == text
    assert sum(read) == nbytes


def test_where_reading_is_refused_the_message_comes_through_the_ring(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, dst: int, src: int, nbytes: int) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(loans, "read", refuse)
    for salt in range(3):
        text = pattern(LONG, salt)
        assert exchange(*sides, text) == text


def test_without_permission_nothing_is_tried(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sides
    link = two.endpoint._fabric.linkage.rings.links_from.get(one.node.card.card.fabric_id)
    assert link is not None
    assert link.rx is not None
    link.rx.pid = 0
    monkeypatch.setattr(loans, "read", None)
    text = pattern(LONG)
    assert exchange(one, two, text) == text


def test_more_long_messages_than_there_are_slots_all_arrive(sides: tuple[Side, Side]) -> None:
    one, two = sides
    texts = [pattern(EAGER_BYTES + 1 + each, each) for each in range(SLOTS + 5)]
    sendings = [post(one, text) for text in texts]
    assert sum(sending.loan is None for sending in sendings) == 5
    waiter = threading.Thread(target=one.endpoint.wait, args=(sendings, soon(20)))
    waiter.start()
    for text in texts:
        assert two.take_long_way(len(text)) == text
    waiter.join(20)
    assert not waiter.is_alive()
    again = post(one, texts[0])
    assert again.loan is not None, "slots come back"
    one.endpoint.cancel([again])


def test_a_message_taken_back_before_it_is_read_fails_its_receive(sides: tuple[Side, Side]) -> None:
    one, two = sides
    sending = post(one, pattern(LONG))
    buffer = bytearray(LONG)
    receiving = two.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    waiter = threading.Thread(target=one.endpoint.cancel, args=([sending],))
    waiter.start()
    waiter.join(10)
    with pytest.raises(PeerLostError, match="gave up"):
        two.endpoint.wait([receiving], soon())
    assert exchange(one, two, pattern(LONG, 3)) == pattern(LONG, 3)


def test_a_message_taken_back_while_it_is_read_is_never_taken_for_whole(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sides
    monkeypatch.setattr(loans, "PIECE_BYTES", LONG // 4)
    really = loans.read
    text = pattern(LONG)
    sending = post(one, text)

    def read_and_lose(pid: int, dst: int, src: int, nbytes: int) -> None:
        if not sending.done:
            one.endpoint.cancel([sending])
            text[:] = bytes(LONG)  # the sender's caller uses its memory again, at once
        really(pid, dst, src, nbytes)

    monkeypatch.setattr(loans, "read", read_and_lose)
    buffer = bytearray(LONG)
    receiving = two.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    with pytest.raises(PeerLostError, match="gave up"):
        two.endpoint.wait([receiving], soon())


def test_a_receive_given_up_is_touched_no_more(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sides
    monkeypatch.setattr(loans, "PIECE_BYTES", LONG // 4)
    sending = post(one, pattern(LONG, 1))
    buffer = bytearray(LONG)
    receiving = two.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    while receiving.loan is None:  # type: ignore[attr-defined]  # its own, as a Receiving or Sending
        two.endpoint._fabric.poller.progress(0, 0)
    two.endpoint._fabric.poller.progress(0, 0)
    assert not receiving.done, "there is a piece left to read"
    two.endpoint.cancel([receiving])
    before = bytes(buffer)
    for _ in range(5):
        two.endpoint._fabric.poller.progress(0, 0)
    assert bytes(buffer) == before
    one.endpoint.cancel([sending])


def test_who_gives_up_waits_for_the_piece_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(pid: int, dst: int, src: int, nbytes: int) -> None:
        reading.set()
        assert go_on.wait(10)

    monkeypatch.setattr(loans, "read", slow)
    memory = memoryview(bytearray(HEADER_BYTES + 4096))
    borrowed = Borrowed(RingReader(memory, 1), Loan(1, 4096, 0), 4096, 10)
    reader = threading.Thread(target=borrowed.read)
    reader.start()
    assert reading.wait(10)
    ender = threading.Thread(target=borrowed.end)
    ender.start()
    ender.join(0.05)
    assert ender.is_alive()
    go_on.set()
    ender.join(10)
    reader.join(10)
    assert not ender.is_alive()


def test_a_loan_stands_until_it_is_ended_and_its_slot_is_used_again() -> None:
    memory = memoryview(bytearray(HEADER_BYTES + 4096))
    writer, reader = RingWriter(memory), RingReader(memory, 1)
    held = bytearray(10)
    lent = Lent.enter(writer, 7)
    assert lent is not None
    loan = lent.loan(7, memoryview(held))
    assert loan.address == address_of(memoryview(held))
    borrowed = Borrowed(reader, loan, loan.address, 10)
    assert borrowed.stands
    lent.end()
    lent.end()
    assert not borrowed.stands
    other = Lent.enter(writer, 8)
    assert other is not None
    assert other.loan(8, memoryview(held)).slot == loan.slot
    assert not borrowed.stands, "the slot holds another loan now"
    assert len({Lent.enter(writer, 9) is None for _ in range(SLOTS - 1)}) == 1
    assert Lent.enter(writer, 10) is None


@pytest.mark.parametrize("slot", [SLOTS, 1 << 40])
def test_a_slot_that_is_none_holds_nothing(slot: int) -> None:
    reader = RingReader(memoryview(bytearray(HEADER_BYTES + 4096)), 1)
    assert not reader.is_lent(slot, 0)


@pytest.mark.parametrize(("nbytes", "total"), [(LOAN_BYTES - 1, LONG), (0, LONG), (LOAN_BYTES, EAGER_BYTES)])
def test_an_offer_of_wrong_lengths_is_refused(nbytes: int, total: int) -> None:
    with pytest.raises(WireError, match="OFFER"):
        Header.decode(Header(Kind.OFFER, nbytes=nbytes, total=total).encode())
    whole = Header(Kind.OFFER, nbytes=LOAN_BYTES, total=LONG)
    assert Header.decode(whole.encode()) == whole
    loan = Loan(1, 1 << 63, 3)
    assert Loan.decode(loan.encode()) == loan


def test_an_address_that_is_nowhere_ends_in_the_long_way_not_in_a_crash(sides: tuple[Side, Side]) -> None:
    """An invalid address from a peer at worst makes the receiver ask for the bytes instead."""
    one, two = sides
    text = pattern(LONG, 2)
    buffer = bytearray(LONG)
    receiving = two.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    sending = post(one, text)
    while receiving.loan is None:  # type: ignore[attr-defined]  # its own, as a Receiving or Sending
        two.endpoint._fabric.poller.progress(0, 0)
    loan = receiving.loan.loan  # type: ignore[attr-defined]  # its own, as a Receiving or Sending
    receiving.loan.loan = loan._replace(address=8)  # type: ignore[attr-defined]  # its own, as a Receiving or Sending
    waiter = threading.Thread(target=one.endpoint.wait, args=([sending], soon()))
    waiter.start()
    two.endpoint.wait([receiving], soon())
    waiter.join(10)
    assert buffer == text


@pytest.mark.parametrize("permitted", [True, False])
def test_groups_exchange_long_tensors_synchronously(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:

        def refuse(pid: int, dst: int, src: int, nbytes: int) -> None:
            raise PermissionError(1, "not permitted")

        monkeypatch.setattr(loans, "read", refuse)

    def body(pg: ProcessGroup) -> None:
        tensor = torch.zeros(300_000)
        for number in range(6):
            if pg.rank() == 0:
                pg.send(tensor.fill_(number), 1)
                pg.recv(tensor, 1)
                assert torch.equal(tensor, torch.full_like(tensor, number + 0.5))
            else:
                pg.recv(tensor, 0)
                assert torch.equal(tensor, torch.full_like(tensor, number))
                pg.send(tensor + 0.5, 0)

    run_ranks(2, body, SHM)
