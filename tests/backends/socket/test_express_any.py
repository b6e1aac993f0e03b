"""The short path of receives from any member: which messages it takes, from which ranks, and which it leaves
to the long path."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch
from support.endpoint_pairs import NBYTES, PRINT, Side, address_of, each_in_turn, soon, text, two_sides
from support.ranks import Tenant, run_ranks

from dist2 import OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.messages.express_any import ExpressAny
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE
from dist2.backends.socket.transport.messages.ways import Lot
from dist2.runtime.deadline import deadline_in

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

SHM = Tenant("shm", "socket", {"transport": "shm"})


@attrs.frozen
class Taker:
    """Takes messages from any."""

    side: Side
    way: ExpressAny

    def take(self) -> bytes | None:
        return self._by(self.way.take)

    def wait(self, timeout_s: float = 0.1) -> bytes | None:
        return self._by(lambda address: self.way.wait(address, deadline_in(timeout_s)))

    def _by(self, way: Callable[[int], int | None]) -> bytes | None:
        buffer = bytearray(NBYTES)
        source = way(address_of(memoryview(buffer)))
        if source is None:
            assert buffer == bytes(NBYTES)
            return None
        assert source == self.side.peer
        return bytes(buffer)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Taker]]:
    with two_sides() as (one, two):
        yield one, Taker(two, two.endpoint.ways.express_any(Lot(ANY_SOURCE, 0, PRINT, NBYTES)))


def test_it_takes_what_is_here(sides: tuple[Side, Taker]) -> None:
    one, two = sides
    assert two.take() is None
    for number in range(5):
        assert one.send(text(number))
    assert [two.take() for _ in range(4)] == [text(number) for number in range(4)]
    assert two.wait() == text(4)
    assert two.take() is None


def test_it_waits_for_a_message_that_is_to_come(sides: tuple[Side, Taker]) -> None:
    one, two = sides
    each_in_turn(one, two.side, lambda: two.wait(5) or two.side.take_long_way(peer=ANY_SOURCE))


def test_what_came_before_is_left_to_the_long_way(sides: tuple[Side, Taker]) -> None:
    one, two = sides
    assert one.send(text(1))
    two.side.endpoint.attend()
    assert two.take() is None
    assert two.wait() is None
    assert two.side.take_long_way(peer=ANY_SOURCE) == text(1)
    assert one.send(text(2))
    assert two.take() == text(2)


def test_messages_of_other_tags_that_came_before_are_in_nobodys_way(sides: tuple[Side, Taker]) -> None:
    one, two = sides
    assert one.send(text(8), tag=8)
    two.side.endpoint.attend()
    assert one.send(text(1))
    assert two.take() == text(1)
    assert two.side.take_long_way(tag=8) == text(8)


@pytest.mark.parametrize("other", [{"tag": 8}, {"text": bytes(NBYTES + 1)}])
def test_another_message_that_is_next_is_left_to_the_long_way(
    sides: tuple[Side, Taker], other: dict[str, object]
) -> None:
    one, two = sides
    assert one.send(**{"text": text(8), **other})
    assert one.send(text(1))
    assert two.take() is None
    assert two.wait() is None


@pytest.mark.parametrize("peer", [ANY_SOURCE, 0])
def test_a_receive_that_was_posted_before_is_served_first(sides: tuple[Side, Taker], peer: int) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.side.post(buffer, peer=peer)
    assert one.send(text(1))
    assert one.send(text(2))
    taken = two.take()
    two.side.endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)
    assert (taken or two.take() or two.side.take_long_way(peer=ANY_SOURCE)) == text(2)


def test_nothing_is_taken_while_another_thread_polls_or_after_the_end(sides: tuple[Side, Taker]) -> None:
    one, two = sides
    assert one.send(text(1))
    with two.side.endpoint._fabric.poller.role:
        assert two.take() is None
    assert two.take() == text(1)
    assert one.send(text(2))
    two.side.endpoint.close()
    assert two.take() is None
    assert two.wait() is None


def test_messages_of_all_members_come_in_their_order_and_none_is_left_behind() -> None:
    count = 200

    def body(pg: ProcessGroup) -> None:
        if pg.rank():
            for number in range(count):
                pg.send(torch.tensor([pg.rank(), number]), 0, tag=3)
            return
        got = torch.zeros(2, dtype=torch.int64)
        counted: Counter[int] = Counter()
        for turn in range(2 * count):
            work = pg.irecv(got, tag=3) if turn % 3 == 0 else pg.recv(got, tag=3)
            work.wait()
            rank, number = got.tolist()
            assert work.source_rank() == rank
            assert number == counted[rank]
            counted[rank] += 1
        assert counted == {1: count, 2: count}

    run_ranks(3, body, SHM)


def test_members_have_their_turns(sides: tuple[Side, Taker]) -> None:
    endpoint = sides[1].side.endpoint
    full = [(peer, lambda address: True) for peer in range(3)]
    way = ExpressAny(endpoint._fabric, endpoint._mailbox, 0, full, 100)
    assert [way.take(0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_who_waits_for_nobody_is_told_in_time_and_of_who_left() -> None:
    waited = threading.Event()

    def body(pg: ProcessGroup) -> None:
        got = torch.zeros(1)
        if pg.rank() == 0:
            pg.recv(got)
            assert got.item() == 7
            with pytest.raises(OperationTimeoutError):
                pg.recv(got, timeout=0.1)
            waited.set()
        else:
            pg.send(torch.full((1,), 7.0), 0)
            assert waited.wait(10)

    run_ranks(2, body, SHM)

    def leaves(pg: ProcessGroup) -> None:
        got = torch.zeros(1)
        if pg.rank() == 0:
            pg.recv(got)
            with pytest.raises(PeerLostError):
                pg.recv(got)
        else:
            pg.send(got, 0)

    run_ranks(2, leaves, SHM)
