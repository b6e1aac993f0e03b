"""The short path over sockets: which messages it takes, which it leaves to the long path, and that both
agree."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import attrs
import pytest
from support.crossing_messages import cross
from support.endpoint_pairs import NBYTES, PRINT, Side, pattern, soon, text, two_sides
from support.ranks import Tenant, run_ranks

from dist2 import MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, REPORTED_BYTES
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.wire import EAGER_BYTES, PROMPT_BYTES, Header, Kind
from dist2.runtime.deadline import deadline_in

TCP = Tenant("tcp", "socket", {"transport": "tcp"})
LENGTHS = [0, 1, 1000, EAGER_BYTES, EAGER_BYTES + 1, PROMPT_BYTES]


@attrs.frozen
class Short:
    """One of two ranks, on the short path."""

    side: Side
    tagged: bool = True

    def lot(self, nbytes: int, tag: int, fingerprint: int = PRINT) -> Lot:
        return Lot(self.side.peer, tag, fingerprint, nbytes, self.tagged)

    def send(self, data: bytes, tag: int = 0, seq: int = 0) -> bool:
        """Send; False if nothing was done."""
        held = bytearray(data) or bytearray(1)
        sent = self.side.endpoint.ways.socket_send(self.lot(len(data), tag)).send(
            address_of(memoryview(held)), seq
        )
        if isinstance(sent, bool):
            return sent
        self.side.endpoint.wait([sent], soon())
        return True

    def take(
        self,
        nbytes: int = NBYTES,
        tag: int = 0,
        fingerprint: int = PRINT,
        seq: int = 0,
    ) -> bytes | None:
        """Receive; None if nothing was done."""
        way = self.side.endpoint.ways.socket_receive(self.lot(nbytes, tag, fingerprint))
        buffer = bytearray(nbytes or 1)
        got = way.wait(address_of(memoryview(buffer)), deadline_in(0.5), seq)
        if got is False:
            return None
        if not isinstance(got, bool):
            try:
                self.side.endpoint.wait([got], deadline_in(0.3))
            except OperationTimeoutError:
                return None
        return bytes(buffer[:nbytes])

    def link(self) -> Link:
        """Return the link of the other side's messages."""
        endpoint = self.side.endpoint
        link = endpoint._fabric.heard_from(endpoint._mailbox.fabric_ids[self.side.peer])
        assert link is not None
        return link


@pytest.fixture
def shorts() -> Iterator[tuple[Short, Short]]:
    with two_sides(share=False) as (one, two):
        yield Short(one), Short(two)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_messages_cross_whichever_way_either_side_takes(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    assert one.send(text(1))
    assert two.take() == text(1)
    assert one.send(text(2))
    assert two.side.take_long_way() == text(2)
    one.side.send_long_way(text(3))
    assert two.take() == text(3)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_every_length_crosses_often(shorts: tuple[Short, Short], nbytes: int) -> None:
    one, two = shorts
    got: list[bytes] = []
    rounds = 8 if nbytes > 1000 else 60

    def receive() -> None:
        for _ in range(rounds):
            taken = two.take(nbytes)
            got.append(two.side.take_long_way(nbytes) if taken is None else taken)

    receiver = threading.Thread(target=receive)
    receiver.start()
    sent = [pattern(nbytes, number) for number in range(rounds)]
    for each in sent:
        if not one.send(each):  # credit comes back by a frame, which the long path reads
            one.side.send_long_way(each)
    receiver.join(30)
    assert got == sent


def test_which_messages_may_go_short(shorts: tuple[Short, Short]) -> None:
    endpoint = shorts[0].side.endpoint
    assert endpoint.ways.has_socket_way(Lot(1, 0, PRINT, PROMPT_BYTES))
    assert not endpoint.ways.has_socket_way(Lot(1, 0, PRINT, PROMPT_BYTES + 1))
    assert not endpoint.ways.has_socket_way(Lot(0, 0, PRINT, 8)), "to oneself"


def test_nothing_is_taken_before_it_is_here(shorts: tuple[Short, Short]) -> None:
    assert shorts[1].take() is None


def test_a_collective_is_told_from_another_by_its_number(shorts: tuple[Short, Short]) -> None:
    one, two = (Short(each.side, tagged=False) for each in shorts)
    for seq in (7, 8):
        for each in (one, two):
            each.side.endpoint.begin(seq, PRINT)
        assert one.send(text(seq), tag=3, seq=seq)
        if seq == 8:
            assert two.take(tag=3, seq=7) is None
        got = two.take(tag=3, seq=seq)
        if got is None:  # the call before has taken it in, on the way to one that never came
            buffer = bytearray(NBYTES)
            transfer = two.side.endpoint.recv(0, seq, 3, PRINT, memoryview(buffer))
            two.side.endpoint.wait([transfer], soon())
            got = bytes(buffer)
        assert got == text(seq)
        assert two.side.endpoint._mailbox.calls.seen[0] == seq


def test_an_older_message_of_the_tag_is_taken_first(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    assert one.send(text(1))
    assert one.send(text(8), tag=8)
    assert two.side.take_long_way(tag=8) == text(8)  # also delivers the message before it to the mailbox
    assert one.send(text(2))
    assert two.take() is None
    assert two.side.take_long_way() == text(1)
    got = two.take()  # unless the mailbox has it as well: receiving looks into the socket now and then
    assert (two.side.take_long_way() if got is None else got) == text(2)


@pytest.mark.parametrize("source", [0, ANY_SOURCE])
def test_a_receive_posted_before_is_served_first(shorts: tuple[Short, Short], source: int) -> None:
    one, two = shorts
    buffer = bytearray(NBYTES)
    endpoint = two.side.endpoint
    posted = endpoint.recv_tagged(source, 0, PRINT, memoryview(buffer))
    assert one.send(text(1))
    assert one.send(text(2))
    assert two.take() is None
    endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)
    assert two.side.take_long_way() == text(2)


def test_what_comes_before_the_message_is_taken_in(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    for tag in (1, 2, 3):
        assert one.send(text(tag), tag=tag)
    got = two.take(tag=3)
    assert (two.side.take_long_way(tag=3) if got is None else got) == text(3)
    assert two.side.take_long_way(tag=2) == text(2)
    assert two.side.take_long_way(tag=1) == text(1)


@pytest.mark.parametrize("cut", [1, 55, 56, 57, 60])
def test_a_message_that_comes_in_pieces_arrives_whole(shorts: tuple[Short, Short], cut: int) -> None:
    one, two = shorts
    header = Header(Kind.EAGER, 1, 5, 0, 0, PRINT, NBYTES, total=NBYTES).encode()
    frame = header + text(4)
    out = one.side.endpoint._fabric.outgoing(two.side.node.card.card.fabric_id)
    assert out is not None
    out.sock.send(frame[:cut])
    rest = threading.Timer(0.02, out.sock.send, [frame[cut:]])
    rest.start()
    got = two.take()
    assert (two.side.take_long_way() if got is None else got) == text(4)
    rest.join(10)


def test_what_was_received_is_reported(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    nbytes = 30_000
    account = one.side.endpoint._mailbox.accounts[True][1]
    for number in range(2 * REPORTED_BYTES // nbytes):
        before = account.used
        assert one.send(pattern(nbytes, number))
        assert account.used == before + nbytes + FRAME_COST
        got = two.take(nbytes)
        assert (got or two.side.take_long_way(nbytes)) == pattern(nbytes, number)
        one.side.endpoint.attend()
    assert account.used < 2 * REPORTED_BYTES


def test_a_message_that_differs_fails_the_group(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    assert one.send(text(1))
    with pytest.raises(MismatchError):
        two.take(fingerprint=PRINT + 1)
    assert not two.send(text(2)), "the group has failed"
    assert two.take() is None


@pytest.mark.parametrize("nbytes", [30_000, 3 * EAGER_BYTES])
def test_what_nobody_receives_is_bounded_by_the_credit(shorts: tuple[Short, Short], nbytes: int) -> None:
    one, two = shorts
    sent = 0
    while one.send(pattern(nbytes, sent)):
        sent += 1
        assert two.side.take_long_way(0, tag=3) == b"" if one.send(b"", tag=3) else True
        assert sent * nbytes <= CREDIT_BYTES
    assert sent >= CREDIT_BYTES // nbytes // 2 - 1
    for number in range(sent):
        got = two.take(nbytes)
        assert (got or two.side.take_long_way(nbytes)) == pattern(nbytes, number)


def test_a_closed_group_takes_no_short_way(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    assert one.send(text(1))
    two.side.endpoint.close()
    assert two.take() is None
    assert not two.send(text(2))


def test_who_leaves_is_noticed_and_what_was_sent_before_arrives(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    assert one.send(text(1))
    one.side.endpoint.close()
    got = two.take()
    assert (two.side.take_long_way() if got is None else got) == text(1)
    with pytest.raises(PeerLostError):
        two.take() or two.side.take_long_way()


def test_a_connection_that_ends_is_left_to_the_long_way(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    two.link().reject()
    assert two.take() is None
    with pytest.raises(PeerLostError):
        two.side.take_long_way()
    assert one.link() is not None


def test_what_a_raising_handler_loses_ends_the_link(shorts: tuple[Short, Short]) -> None:
    one, two = shorts

    way = two.side.endpoint.ways.socket_receive(Lot(0, 0, PRINT, NBYTES))
    way._take = _interrupted  # type: ignore[method-assign, assignment]  # it raises
    assert one.send(text(1))
    buffer = bytearray(NBYTES)
    with pytest.raises(KeyboardInterrupt):
        way.wait(address_of(memoryview(buffer)), soon())
    with pytest.raises(PeerLostError):
        two.side.take_long_way()


def test_nothing_writes_to_the_memory_of_a_receive_that_was_interrupted(shorts: tuple[Short, Short]) -> None:
    one, two = shorts
    way = two.side.endpoint.ways.socket_receive(Lot(0, 0, PRINT, NBYTES))
    way._go_on = _interrupted  # type: ignore[method-assign, assignment]  # it raises
    assert one.send(text(1), tag=1)
    buffer = bytearray(NBYTES)
    with pytest.raises(KeyboardInterrupt):
        way.wait(address_of(memoryview(buffer)), soon())
    assert one.send(text(2))
    assert two.side.take_long_way(tag=1) == text(1)
    assert two.side.take_long_way() == text(2)
    assert bytes(buffer) != text(2)


@pytest.mark.parametrize("seed", range(2))
def test_order_holds_between_messages_of_either_way(seed: int) -> None:
    def body(pg: ProcessGroup) -> None:
        plan = random.Random(seed)
        for _ in range(3):
            cross(pg, plan.randrange(1000), 40, (1, 5, 900, 20_000, 100_000), (0.5, 0.7))
            pg.barrier()

    run_ranks(2, body, TCP)
