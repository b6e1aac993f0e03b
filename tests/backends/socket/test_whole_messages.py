"""Messages of up to 448 KiB inside a host: in the ring at once, if there is room."""

from __future__ import annotations

import pytest
import torch
from support.endpoint_pairs import PRINT, Side, address_of, pattern, soon
from support.ranks import Tenant, run_ranks
from support.threads import together

from dist2 import MismatchError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.messages.credit import FRAME_COST, PROMPT_CREDIT_BYTES
from dist2.backends.socket.transport.messages.ways import Lot
from dist2.backends.socket.wire import EAGER_BYTES, RING_MESSAGE_BYTES

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

SHM = Tenant("shm", "socket", {"transport": "shm"})
LENGTHS = [EAGER_BYTES + 1, 100_000, RING_MESSAGE_BYTES]


def send_whole(side: Side, text: bytearray) -> bool:
    """Send as `isend` does; whether it is in the ring."""
    express = side.endpoint.ways.express(Lot(side.peer, 0, PRINT, len(text)))
    return express.send(address_of(memoryview(text)))


def test_which_messages_are_sent_whole(sides: tuple[Side, Side]) -> None:
    whole, longer = (Lot(1, 0, PRINT, RING_MESSAGE_BYTES + more) for more in (0, 1))
    assert sides[0].endpoint.ways.has_express(whole)
    assert not sides[0].endpoint.ways.has_express(longer)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_ends_the_receive_that_is_posted(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    for salt in range(5):
        buffer = bytearray(nbytes)
        posted = two.post(buffer)
        owed = two.account.owed
        assert send_whole(one, pattern(nbytes, salt))
        two.endpoint.wait([posted], soon())
        assert buffer == pattern(nbytes, salt)
        assert two.account.owed in (owed + FRAME_COST + nbytes, 0)
    assert not two.endpoint._mailbox.pending()
    one.endpoint.attend()
    assert one.account.used == two.account.owed


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_is_kept_for_a_receive_that_comes_later(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    assert send_whole(one, pattern(nbytes))
    assert one.send(b"behind it", tag=2)
    assert two.take_long_way(9, tag=2) == b"behind it"
    assert two.take_long_way(nbytes) == pattern(nbytes)


def test_it_comes_after_those_that_were_queued_before(sides: tuple[Side, Side]) -> None:
    one, two = sides
    sending = one.endpoint.send_tagged(1, 0, PRINT, memoryview(pattern(LENGTHS[1], 1)))
    assert send_whole(one, pattern(LENGTHS[1], 2))
    assert [two.take_long_way(LENGTHS[1]) for _ in range(2)] == [pattern(LENGTHS[1], salt) for salt in (1, 2)]
    one.endpoint.wait([sending], soon())


def test_what_has_no_room_is_not_sent_so(sides: tuple[Side, Side]) -> None:
    one, two = sides
    count = 0
    while send_whole(one, pattern(RING_MESSAGE_BYTES, count)):
        count += 1
    assert 0 < count < 5, "the ring holds a MiB"
    for salt in range(count):
        assert two.take_long_way(RING_MESSAGE_BYTES) == pattern(RING_MESSAGE_BYTES, salt)
    assert send_whole(one, pattern(RING_MESSAGE_BYTES))


def test_the_last_of_the_credit_is_for_short_ones(sides: tuple[Side, Side]) -> None:
    one, two = sides
    sent = 0
    while send_whole(one, pattern(RING_MESSAGE_BYTES)):
        two.endpoint.attend()  # which makes room in the ring, and holds the message
        sent += 1
    assert sent == PROMPT_CREDIT_BYTES // (FRAME_COST + RING_MESSAGE_BYTES)
    assert one.send(b"short", tag=1)
    assert two.take_long_way(5, tag=1) == b"short"


def test_one_of_another_length_fails_its_receive(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer = bytearray(LENGTHS[0])
    posted = two.post(buffer)
    assert send_whole(one, pattern(LENGTHS[1]))
    with pytest.raises(MismatchError):
        two.endpoint.wait([posted], soon())
    assert buffer == bytearray(LENGTHS[0])


@pytest.mark.parametrize("nbytes", [*LENGTHS, RING_MESSAGE_BYTES + 4])
def test_all_ways_out_meet_all_ways_in(nbytes: int) -> None:
    """By `send` and `isend`, `recv` and `irecv`, in every order and more than there is room for."""
    length, rounds = nbytes // 4, 24

    def body(pg: ProcessGroup) -> None:
        peer = 1 - pg.rank()

        def out() -> None:
            works = []
            for number in range(rounds):
                tensor = torch.full((length,), float(number))
                if number % 3:
                    works.append(pg.isend(tensor, peer))
                else:
                    pg.send(tensor, peer)
            for work in works:
                work.wait()

        def into() -> None:
            got, works = [torch.zeros(length) for _ in range(rounds)], []
            for number, each in enumerate(got):
                if number % 4 < 3:
                    works.append(pg.irecv(each, peer))
                else:
                    pg.recv(each, peer)
            for work in works:
                work.wait()
            assert [int(each[0]) for each in got] == list(range(rounds))
            assert all(bool((each == each[0]).all()) for each in got)

        for _ in range(3):
            together(out, into) if pg.rank() else together(into, out)

    run_ranks(2, body, SHM)


def test_a_ring_of_them_in_which_all_send_first() -> None:
    def body(pg: ProcessGroup) -> None:
        out, into = torch.full((20_000,), float(pg.rank())), torch.zeros(20_000)
        for _ in range(50):
            sending = pg.isend(out, (pg.rank() + 1) % 3)
            receiving = pg.irecv(into, (pg.rank() + 2) % 3)
            sending.wait()
            receiving.wait()
            assert bool((into == (pg.rank() + 2) % 3).all())
            into.zero_()
            with pg.coalescing() as batch:
                pg.isend(out, (pg.rank() + 1) % 3)
                pg.irecv(into, (pg.rank() + 2) % 3)
            batch.wait()
            assert bool((into == (pg.rank() + 2) % 3).all())
            into.zero_()

    run_ranks(3, body, SHM)
