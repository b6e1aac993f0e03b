"""Messages between fabrics of this process, over TCP and inside: order, bounds, ends, strangers."""

from __future__ import annotations

import errno
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.captured_logs import logged, refusals_in
from support.fabrics import CONTEXT, World, describe
from support.scarcity import no_descriptors
from support.threads import together
from support.time_limits import in_time

from dist2 import (
    Dist2Error,
    GroupAbortedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    WireError,
)
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links import linkage
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.rings import Rings
from dist2.backends.socket.transport.messages.absent_groups import HELD_BYTES
from dist2.backends.socket.transport.messages.calls import Called
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, PROMPT_CREDIT_BYTES
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Sending, Transfer
from dist2.backends.socket.transport.node import Node
from dist2.backends.socket.wire import EAGER_BYTES, HELLO_BYTES, PROMPT_BYTES, TAGGED, Header, Hello, Kind
from dist2.runtime.deadline import deadline_in

WAYS = ("tcp", "inproc")
LONG = 3 << 20


def fabrics(count: int) -> list[Fabric]:
    return [Fabric(job_id="test") for _ in range(count)]


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make(size: int) -> World:
        worlds.append(World(fabrics(size), request.param == "inproc"))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def tcp() -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def make(size: int) -> World:
        worlds.append(World(fabrics(size)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def soon(timeout_s: float = 10.0) -> int:
    return deadline_in(timeout_s)


def text_of(nbytes: int, salt: int = 0) -> bytes:
    return bytes((salt + each) % 251 for each in range(251)) * (nbytes // 251) + bytes(nbytes % 251)


def send(endpoint: FabricEndpoint, peer: int, text: bytes, tag: int = 0) -> Transfer:
    return endpoint.send_tagged(peer, tag, 11, memoryview(text))


def take(endpoint: FabricEndpoint, peer: int, nbytes: int, tag: int = 0) -> bytes:
    """Receive one message and return it."""
    buffer = bytearray(nbytes)
    transfer = endpoint.recv_tagged(peer, tag, 11, memoryview(buffer))
    endpoint.wait([transfer], soon())
    return bytes(buffer[: transfer.nbytes])


def give(endpoint: FabricEndpoint, peer: int, text: bytes, tag: int = 0) -> None:
    endpoint.wait([send(endpoint, peer, text, tag)], soon())


def pump(*fabrics: Fabric, until: Callable[[], bool]) -> None:
    """Make progress on several fabrics from one thread until something is so."""
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline, "it never came"
        for fabric in fabrics:
            fabric.poller.run_until(until, deadline_in(0.002), lambda: False)


# Messages


@pytest.mark.parametrize("nbytes", [0, 1, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, LONG])
def test_messages_of_all_sizes_cross(make: Callable[[int], World], nbytes: int) -> None:
    first, second = make(2).group()
    there, back = text_of(nbytes), text_of(nbytes, 7)

    def ping() -> bytes:
        give(first, 1, there)
        return take(first, 1, nbytes)

    def pong() -> bytes:
        got = take(second, 0, nbytes)
        give(second, 0, back)
        return got

    assert together(ping, pong) == [back, there]


@pytest.mark.parametrize("nbytes", [10, LONG])
def test_sends_that_cross_both_arrive(make: Callable[[int], World], nbytes: int) -> None:
    endpoints = make(2).group()

    def exchange(mine: int) -> bytes:
        endpoint, other = endpoints[mine], 1 - mine
        buffer = bytearray(nbytes)
        sending = send(endpoint, other, text_of(nbytes, mine))
        receiving = endpoint.recv_tagged(other, 0, 11, memoryview(buffer))
        endpoint.wait([sending, receiving], soon())
        return bytes(buffer)

    assert together(lambda: exchange(0), lambda: exchange(1)) == [text_of(nbytes, 1), text_of(nbytes, 0)]


def test_both_connect_at_once_again_and_again(make: Callable[[int], World]) -> None:
    for _ in range(5):
        endpoints = make(2).group()
        barrier = threading.Barrier(2)

        def exchange(mine: int, endpoints: Any = endpoints, barrier: Any = barrier) -> list[bytes]:
            barrier.wait()
            for nth in range(5):
                send(endpoints[mine], 1 - mine, bytes([mine, nth]))
            return [take(endpoints[mine], 1 - mine, 2) for _ in range(5)]

        got = together(lambda: exchange(0), lambda: exchange(1))
        assert got == [[bytes([1 - mine, nth]) for nth in range(5)] for mine in range(2)]


def test_receives_posted_in_any_order_get_their_own(make: Callable[[int], World]) -> None:
    first, second = make(2).group()
    sizes = [5, EAGER_BYTES + 1, 0, LONG, 17]
    buffers = [bytearray(size) for size in sizes]

    def sender() -> None:
        first.wait([send(first, 1, text_of(size, tag), tag) for tag, size in enumerate(sizes)], soon())

    def receiver() -> None:
        order = [3, 0, 4, 2, 1]
        posted = [second.recv_tagged(0, tag, 11, memoryview(buffers[tag])) for tag in order]
        second.wait(posted, soon())

    together(sender, receiver)
    assert buffers == [text_of(size, tag) for tag, size in enumerate(sizes)]


def test_steps_of_collectives_are_matched_by_seq_and_step(make: Callable[[int], World]) -> None:
    first, second = make(2).group()
    for seq in (1, 2):
        first.begin(seq, seq)
        second.begin(seq, seq)
    sends = [
        first.send(1, seq, step, seq, memoryview(bytes([seq, step]))) for seq in (1, 2) for step in (0, 1)
    ]
    buffers = {(seq, step): bytearray(2) for seq in (2, 1) for step in (1, 0)}
    posted = [second.recv(0, seq, step, seq, memoryview(each)) for (seq, step), each in buffers.items()]
    together(lambda: first.wait(sends, soon()), lambda: second.wait(posted, soon()))
    assert all(bytes(buffer) == bytes(key) for key, buffer in buffers.items())


def test_a_receive_from_any_says_who_sent(make: Callable[[int], World]) -> None:
    first, second, third = make(3).group()
    send(second, 0, b"two")
    send(third, 0, text_of(LONG))

    def collect() -> dict[int, int]:
        sizes = {}
        for _ in range(2):
            transfer = first.recv_tagged(ANY_SOURCE, 0, 11, memoryview(bytearray(LONG)))
            first.wait([transfer], soon())
            sizes[transfer.source] = transfer.nbytes
        return sizes

    def push() -> None:  # long messages need their sender to make progress
        pump(world_fabric, until=lambda: third_done.done)

    world_fabric = third._fabric
    third_done = send(third, 0, b"", 99)
    third_done = third_done if not third_done.done else _last_pending(third)
    assert together(collect, push)[0] == {1: 3, 2: LONG}


def _last_pending(endpoint: FabricEndpoint) -> Transfer:
    return endpoint._mailbox.pending()[-1]


@pytest.mark.parametrize("nbytes", [0, 9, EAGER_BYTES + 1])
def test_messages_to_oneself(make: Callable[[int], World], nbytes: int) -> None:
    first, _ = make(2).group()
    sending = send(first, 0, text_of(nbytes))
    assert take(first, 0, nbytes) == text_of(nbytes)
    first.wait([sending], soon())
    # The receive comes first, in another thread, and gets the error at once.
    started = time.monotonic()
    waiting = threading.Event()

    def receive() -> bytes:
        buffer = bytearray(nbytes)
        transfer = first.recv_tagged(0, 1, 11, memoryview(buffer))
        waiting.set()
        first.wait([transfer], soon())
        return bytes(buffer)

    def post() -> None:
        assert waiting.wait(10)
        give(first, 0, text_of(nbytes), 1)

    assert together(receive, post)[0] == text_of(nbytes)
    assert time.monotonic() - started < 5


def test_a_send_to_oneself_that_was_cancelled_leaves_nothing(make: Callable[[int], World]) -> None:
    first, _ = make(2).group()
    first.cancel([send(first, 0, text_of(LONG))])
    give_after = send(first, 0, b"after")
    assert take(first, 0, LONG) == b"after"
    assert give_after.done


def test_sends_to_oneself_are_bounded(make: Callable[[int], World]) -> None:
    first, _ = make(2).group()
    count = 3 * CREDIT_BYTES // EAGER_BYTES
    sends = [send(first, 0, text_of(EAGER_BYTES, nth)) for nth in range(count)]
    assert sum(each.done for each in sends) <= CREDIT_BYTES // EAGER_BYTES
    assert [take(first, 0, EAGER_BYTES) for _ in range(count)] == [
        text_of(EAGER_BYTES, nth) for nth in range(count)
    ]
    assert all(each.done for each in sends)


# Credit


@pytest.mark.parametrize("nbytes", [0, 1000, EAGER_BYTES])
def test_a_flood_that_nobody_receives_is_bounded_and_arrives_in_order(
    make: Callable[[int], World], nbytes: int
) -> None:
    world = make(2)
    first, second = world.group()
    count = 2 * CREDIT_BYTES // (nbytes + FRAME_COST)
    sends = [
        send(first, 1, nth.to_bytes(4, "little")[:nbytes] + bytes(max(0, nbytes - 4))) for nth in range(count)
    ]
    account = first._mailbox.accounts[True][1]
    assert len(account.waiting) >= count // 2 - 1
    held = second._mailbox.accounts[True][0]
    sent = count - len(account.waiting)
    pump(*world.fabrics, until=lambda: held.held == sent * (nbytes + FRAME_COST))
    assert held.held <= CREDIT_BYTES
    got: list[bytes] = []

    def drain() -> None:
        got.extend(take(second, 0, nbytes) for _ in range(count))

    together(lambda: first.wait(sends, soon()), drain)
    expected = [nth.to_bytes(4, "little")[:nbytes] for nth in range(count)]
    assert [each[:4] for each in got] == expected
    assert not account.waiting


def test_messages_nobody_receives_do_not_hold_up_collectives(make: Callable[[int], World]) -> None:
    first, second = make(2).group()
    flood = [send(first, 1, text_of(EAGER_BYTES)) for _ in range(CREDIT_BYTES // EAGER_BYTES + 24)]
    assert not flood[-1].done
    sending = first.send(1, 1, 0, 11, memoryview(b"step"))
    buffer = bytearray(4)
    receiving = second.recv(0, 1, 0, 11, memoryview(buffer))
    together(lambda: first.wait([sending], soon()), lambda: second.wait([receiving], soon()))
    assert buffer == b"step"


def test_cancelled_messages_give_their_credit_back(make: Callable[[int], World]) -> None:
    first, second = make(2).group()
    announced = text_of(EAGER_BYTES + 1)
    for _ in range(CREDIT_BYTES // FRAME_COST // 1000):
        first.cancel([send(first, 1, announced, 9) for _ in range(1000)])
    # The following sends need credit, and the receiver must have reported some.
    sends = [send(first, 1, text_of(EAGER_BYTES, nth)) for nth in range(16)]
    got: list[bytes] = []
    together(
        lambda: first.wait(sends, soon()),
        lambda: got.extend(take(second, 0, EAGER_BYTES) for _ in range(16)),
    )
    assert got == [text_of(EAGER_BYTES, nth) for nth in range(16)]


def test_a_message_behind_one_that_is_taken_back_goes(make: Callable[[int], World]) -> None:
    first, second = make(2).group()
    flood = [send(first, 1, text_of(EAGER_BYTES)) for _ in range(CREDIT_BYTES // EAGER_BYTES)]
    short = send(first, 1, b"short", 5)
    assert list(first._mailbox.accounts[True][1].waiting) == [flood[-1], short]
    first.cancel(flood[-1:])
    together(lambda: first.wait([short], soon()), lambda: _expect_tagged(second, b"short", 5))


def test_long_messages_go_unasked_while_their_part_of_the_credit_lasts(tcp: Callable[[int], World]) -> None:
    world = tcp(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))  # there is a link, and it is idle
    count = PROMPT_CREDIT_BYTES // PROMPT_BYTES + 1
    sends: list[Sending] = []
    for nth in range(count):
        sending = send(first, 1, text_of(PROMPT_BYTES, nth))
        assert isinstance(sending, Sending)
        sends.append(sending)
        while sending.unasked and not sending.done:  # it has arrived, and no receive is posted yet
            first.attend()
            second.attend()
    assert [each.unasked for each in sends] == [True, True, True, False]
    got: list[bytes] = []
    together(
        lambda: first.wait(sends, soon()),
        lambda: got.extend(take(second, 0, PROMPT_BYTES) for _ in range(count)),
    )
    assert got == [text_of(PROMPT_BYTES, nth) for nth in range(count)]


@pytest.mark.parametrize("make", ["inproc"], indirect=True)  # whose sockets take less than a message
def test_one_that_is_given_up_midway_arrives_as_it_was(make: Callable[[int], World]) -> None:
    world = make(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    data = bytearray(text_of(PROMPT_BYTES))
    sending = first.send_tagged(1, 0, 11, memoryview(data))
    assert isinstance(sending, Sending)
    assert sending.unasked
    assert not sending.done
    first.cancel([sending])
    data[:] = bytes(PROMPT_BYTES)
    after = send(first, 1, b"after")
    got: list[bytes] = []
    together(
        lambda: first.wait([after], soon()),
        lambda: got.extend(take(second, 0, nbytes) for nbytes in (PROMPT_BYTES, 5)),
    )
    assert got == [text_of(PROMPT_BYTES), b"after"]


# Lack of memory


class _Refused:
    """A socket of which the kernel refuses some writes and reads for lack of memory."""

    def __init__(self, sock: object, times: int) -> None:
        self._sock = sock
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: object) -> object:
        return self._tried("sendmsg")(buffers)

    def recv_into(self, buffer: object) -> object:
        return self._tried("recv_into")(buffer)

    def _tried(self, name: str) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return getattr(self._sock, name)


@pytest.mark.parametrize("who", [0, 1], ids=["sender", "receiver"])
def test_a_refused_write_or_read_is_tried_again_and_logged_once(
    tcp: Callable[[int], World], who: int
) -> None:
    world = tcp(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    linkage = world.fabrics[who].linkage
    link = next(iter(linkage.links.values() if who else linkage.outgoing.values()))
    refused = _Refused(link.sock, 3)
    link.sock = refused  # type: ignore[assignment]
    with logged() as records:
        together(lambda: give(first, 1, text_of(LONG)), lambda: _expect(second, text_of(LONG)))
    assert refused.left == 0
    (told,) = [record["event"] for record in records if "tried again" in record["event"]]
    assert "No buffer space available (ENOBUFS): raise the limits of memory" in told


@pytest.mark.parametrize("who", [0, 1], ids=["sender", "receiver"])
def test_a_wait_that_ends_while_the_system_refuses_a_connection_says_so(
    tcp: Callable[[int], World], who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tcp(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    links = world.fabrics[who].linkage
    refusing = []
    for link in links.links.values():  # two, if both sides have connected
        refusing.append(_Refused(link.sock, 1_000_000_000))
        link.sock = refusing[-1]  # type: ignore[assignment]
    buffer = memoryview(bytearray(LONG))
    waits = (
        lambda: first.wait([send(first, 1, text_of(LONG))], soon(0.5)),
        lambda: second.wait([second.recv_tagged(0, 0, 11, buffer)], soon(0.5)),
    )
    with pytest.raises(OperationTimeoutError, match=r"waits: (send|recv) failed: .*\(ENOBUFS\): raise"):
        waits[who]()
    for each in refusing:
        each.left = 0
    monkeypatch.setattr(linkage, "_LATELY_NS", 0)
    with pytest.raises(OperationTimeoutError) as ordinary:
        waits[who]()
    assert "ENOBUFS" not in str(ordinary.value)


# Cancelling


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_long_message_given_up_midway_leaves_the_link_usable(
    make: Callable[[int], World], who: str
) -> None:
    world = make(2)
    first, second = world.group()
    other_first, other_second = world.group(2)
    buffer = bytearray(8 * LONG)
    sending = send(first, 1, text_of(8 * LONG))
    receiving = second.recv_tagged(0, 0, 11, memoryview(buffer))
    link = next(iter(world.fabrics[0].linkage.outgoing.values()), None)
    assert link is not None
    # Until the socket is full, inside a segment.
    pump(*world.fabrics, until=lambda: sending.offset > 0)  # type: ignore[attr-defined]  # its own, as a Receiving or Sending
    if who == "sender":
        first.cancel([sending])
    else:
        second.cancel([receiving])
        seen = bytes(buffer)
    together(lambda: give(other_first, 1, text_of(LONG, 5)), lambda: _expect(other_second, text_of(LONG, 5)))
    pump(*world.fabrics, until=lambda: sending.done and receiving.done)
    together(lambda: give(first, 1, text_of(LONG, 9)), lambda: _expect(second, text_of(LONG, 9)))
    if who == "sender":
        assert isinstance(receiving.error, PeerLostError)
    else:
        assert bytes(buffer) == seen  # nothing touches it any more


def _expect_tagged(endpoint: FabricEndpoint, text: bytes, tag: int) -> None:
    assert take(endpoint, 0, len(text), tag) == text


def _expect(endpoint: FabricEndpoint, text: bytes, peer: int = 0) -> None:
    assert take(endpoint, peer, len(text)) == text


def test_a_message_cancelled_in_its_last_segment_is_whole_or_failed(make: Callable[[int], World]) -> None:
    world = make(2)
    first, second = world.group()
    whole = failed = 0
    for nth in range(30):
        text = text_of(EAGER_BYTES + 900_000, nth)
        buffer = bytearray(len(text))
        sending = send(first, 1, text)
        receiving = second.recv_tagged(0, 0, 11, memoryview(buffer))
        pump(*world.fabrics, until=lambda sending=sending: sending.done or sending.offset > 0)
        first.cancel([sending])
        pump(*world.fabrics, until=lambda receiving=receiving: receiving.done)
        if receiving.error is None:
            assert bytes(buffer) == text
            whole += 1
        else:
            failed += 1
    assert whole + failed == 30


def test_a_timeout_names_who_is_missing_and_the_next_message_arrives(make: Callable[[int], World]) -> None:
    first, second, _ = make(3).group()
    receives = [first.recv_tagged(peer, 0, 11, memoryview(bytearray(4))) for peer in (1, 2)]
    with pytest.raises(OperationTimeoutError, match=r"ranks 1, 2") as caught:
        first.wait(receives, soon(0.05))
    assert caught.value.missing == (1, 2)
    assert all(each.done for each in receives)
    together(lambda: give(second, 0, b"late"), lambda: _expect(first, b"late", 1))


def test_abort_frees_a_waiter_at_once(make: Callable[[int], World]) -> None:
    first, _ = make(2).group()
    waiting = threading.Event()

    def wait() -> float:
        receiving = first.recv_tagged(1, 0, 11, memoryview(bytearray(4)))
        waiting.set()
        with pytest.raises(GroupAbortedError, match="stop"):
            first.wait([receiving], soon())
        return time.monotonic()

    def abort() -> float:
        assert waiting.wait(10)
        first.abort(GroupAbortedError("stop"))
        return time.monotonic()

    ended, aborted = together(wait, abort)
    assert ended - aborted < 1


# Threads and groups


def test_groups_used_by_many_threads_do_not_mix(make: Callable[[int], World]) -> None:
    world = make(2)
    groups = [world.group(context) for context in (10, 11)]
    rounds, sizes = 6, (3, EAGER_BYTES + 5)

    def chat(context: int, mine: int, tag: int) -> None:
        endpoint = groups[context][mine]
        for nth in range(rounds):
            for size in sizes:
                buffer = bytearray(size)
                sending = send(endpoint, 1 - mine, text_of(size, 100 * context + 10 * tag + nth), tag)
                receiving = endpoint.recv_tagged(1 - mine, tag, 11, memoryview(buffer))
                endpoint.wait([sending, receiving], soon())
                assert buffer == text_of(size, 100 * context + 10 * tag + nth)

    together(
        *(
            lambda context=context, mine=mine, tag=tag: chat(context, mine, tag)
            for context in (0, 1)
            for mine in (0, 1)
            for tag in (1, 2, 3)
        )
    )


def test_messages_for_a_group_not_open_yet_wait_for_it(make: Callable[[int], World]) -> None:
    world = make(2)
    first, second = world.group()
    early = world.open(0, 50)
    texts = [b"first", text_of(EAGER_BYTES + 1), b"third"]
    sends = [send(early, 1, text) for text in texts]
    give(first, 1, b"behind")
    assert take(second, 0, 6) == b"behind"  # the early ones are here as well
    late = world.open(1, 50)
    got: list[bytes] = []
    together(lambda: early.wait(sends, soon()), lambda: got.extend(take(late, 0, LONG) for _ in texts))
    assert got == texts


def test_what_is_held_for_groups_that_never_open_is_bounded_and_not_in_silence(
    tcp: Callable[[int], World],
) -> None:
    world = tcp(2)
    first, second = world.group()
    flooded = [world.open(0, 100 + nth) for nth in range(2 * HELD_BYTES // CREDIT_BYTES)]
    with logged() as logs:
        for endpoint in flooded:
            for _ in range(CREDIT_BYTES // EAGER_BYTES - 1):
                send(endpoint, 1, bytes(EAGER_BYTES))
        pump(*world.fabrics, until=lambda: first._mailbox.fault is not None)
    assert any("not open" in line["event"] for line in logs)
    with pytest.raises(PeerLostError):
        take(second, 0, 1)


def test_a_member_that_left_is_told_from_one_that_died(make: Callable[[int], World]) -> None:
    world = make(3)
    first, second, third = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    first.close()
    with pytest.raises(PeerLostError, match="rank 0 left the group"):
        take(second, 0, 1)
    # This one had no link when the group was closed, and the process of rank 0 is at work elsewhere.
    elsewhere = world.open(0, 9).recv_tagged(1, 0, 11, memoryview(bytearray(1)))
    error: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(PeerLostError, match="rank 0 left the group") as caught:
            take(third, 0, 1)
        error.append(caught.value)

    together(ask, lambda: pump(world.fabrics[0], until=lambda: bool(error)))
    assert not elsewhere.done
    # The others go on.
    together(lambda: give(second, 2, b"on"), lambda: _expect(third, b"on", 1))


def test_a_process_that_closes_in_good_order_has_left_though_others_write_to_it(
    make: Callable[[int], World],
) -> None:
    world = make(2)
    first, second = world.group()
    give(first, 1, b"x")
    pump(
        world.fabrics[1], until=lambda: bool(world.fabrics[1].linkage.outgoing)
    )  # one link, not two that cross
    _expect(second, b"x")
    send(first, 1, b"unread")
    world.fabrics[1].close()
    # Written before the last frame of the other side is read: the first write resets the connection, the
    # second fails.
    send(first, 1, b"nobody reads this")
    refused = send(first, 1, text_of(EAGER_BYTES + 1))
    receiving = first.recv_tagged(1, 0, 11, memoryview(bytearray(1)))
    with pytest.raises(PeerLostError, match="left the group"):
        first.wait([receiving], soon())
    assert refused.done
    assert world.fabrics[1].card.fabric_id not in world.fabrics[0]._presence.dead


def test_a_process_that_is_gone_without_a_word_is_dead_to_all(make: Callable[[int], World]) -> None:
    world = make(3)
    endpoints = world.group()
    together(
        lambda: [give(endpoints[0], 1, b"x"), give(endpoints[0], 2, b"x")],
        lambda: _expect(endpoints[1], b"x"),
        lambda: _expect(endpoints[2], b"x"),
    )
    gone = world.fabrics[0]
    for link in gone.linkage.links.values():
        link.close()

    def survive(mine: int) -> tuple[int, ...]:
        with pytest.raises(PeerLostError, match="lost the connection to it") as caught:
            take(endpoints[mine], 3 - mine, 1)
        return caught.value.ranks

    assert together(lambda: survive(1), lambda: survive(2)) == [(0,), (0,)]
    gone.linkage.links.clear()


def test_one_of_two_links_that_breaks_is_the_loss_of_the_peer(tcp: Callable[[int], World]) -> None:
    world = tcp(2)
    first, second = world.group()
    with world.fabrics[0].lock, world.fabrics[1].lock:
        ours = world.fabrics[0].courier.reach(first._mailbox, 1)
        theirs = world.fabrics[1].courier.reach(second._mailbox, 0)
    pump(*world.fabrics, until=lambda: all(len(each.linkage.links) == 2 for each in world.fabrics))
    assert ours.fileno() != theirs.fileno()
    ours.reject()
    with pytest.raises(PeerLostError, match="lost the connection to it"):
        take(first, 1, 1)


def test_a_connection_that_is_refused_is_a_loss_in_a_moment(tcp: Callable[[int], World]) -> None:
    world = tcp(2)
    first = world.open(0)
    world.fabrics[1].close()
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        take(first, 1, 1)
    assert time.monotonic() - started < 2
    with pytest.raises(PeerLostError):
        give(first, 1, b"x")


def test_a_host_that_does_not_answer_holds_up_nobody_else(
    tcp: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist2.backends.socket.transport.fabric._FLUSH_S", 0.1)
    # A listener with a full queue drops packets, as a host that is gone does.
    world = tcp(2)
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = []
    try:
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        cards = [world.cards[0], Card("nobody", *full.getsockname())]
        mute = FabricEndpoint(world.fabrics[0], 7, 0, cards, False, describe)
        world.endpoints.append(mute)
        first, second = world.group()
        started = time.monotonic()
        send(mute, 1, b"hello?")
        together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
        in_time(time.monotonic() - started, 1)
        world.close()
    finally:
        for each in (full, *fillers):
            each.close()


def test_a_mismatch_is_told_to_both_with_both_texts(make: Callable[[int], World]) -> None:
    first, second = make(2).group()
    second._mailbox.calls.describe = lambda seq, number: Called(1, 12, "the other operation")
    first.begin(1, 11)
    second.begin(1, 12)
    buffers = [bytearray(4), bytearray(4)]

    def call(mine: int, fingerprint: int) -> MismatchError:
        endpoint = (first, second)[mine]
        transfers = [
            endpoint.send(1 - mine, 1, 0, fingerprint, memoryview(b"abcd")),
            endpoint.recv(1 - mine, 1, 0, fingerprint, memoryview(buffers[mine])),
        ]
        with pytest.raises(MismatchError) as caught:
            endpoint.wait(transfers, soon())
        return caught.value

    errors = together(lambda: call(0, 11), lambda: call(1, 12))
    assert errors[0].actual == {1: "the other operation"}
    assert errors[1].actual == {0: "the test's operation"}
    assert buffers == [bytes(4), bytes(4)]


# Strangers

HELLO = Hello("test", "stranger", "")


def _hello(**changes: Any) -> Callable[[Card], bytes]:
    def frame(card: Card) -> bytes:
        fields = {"job_id": "test", "fabric_id": "stranger", "target": card.fabric_id, **changes}
        return Hello(**fields).encode()

    return frame


STRANGERS: dict[str, Callable[[Card], bytes]] = {
    "http": lambda card: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
    "zeros": lambda card: bytes(200),
    "another job": _hello(job_id="other"),
    "another version": _hello(version=99),
    "another target": _hello(target="somebody else"),
    "an oversized hello": lambda card: struct.pack("<BBHI", 0xD2, 1, 0, HELLO_BYTES + 1) + bytes(48),
    "deep brackets": lambda card: Header(Kind.HELLO, nbytes=HELLO_BYTES).encode() + b"[" * HELLO_BYTES,
    "no hello first": lambda card: Header(Kind.EAGER, TAGGED, CONTEXT, nbytes=1, total=1).encode() + b"x",
    "a group it is not in": lambda card: (
        _hello()(card)
        + Header(Kind.EAGER, TAGGED, CONTEXT, fingerprint=11, nbytes=1, total=1).encode()
        + b"x"
    ),
    "a second hello": lambda card: _hello()(card) * 2,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_dropped_and_logged_and_the_group_goes_on(
    tcp: Callable[[int], World], name: str
) -> None:
    world = tcp(2)
    first, second = world.group()
    card = world.cards[1]
    stranger = socket.create_connection((card.host, card.port))
    try:
        with logged() as logs:
            stranger.sendall(STRANGERS[name](card))
            ended = ("closed the connection", "refused a data connection")
            pump(world.fabrics[1], until=lambda: any(each["event"].startswith(ended) for each in logs))
            together(lambda: give(first, 1, text_of(LONG)), lambda: _expect(second, text_of(LONG)))
        stranger.settimeout(5)
        assert _ended(stranger)
    finally:
        stranger.close()
    assert first._mailbox.fault is None
    assert second._mailbox.fault is None


def _ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_strangers_who_say_nothing_are_dropped_in_time(
    tcp: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tcp(2)
    fabric = world.fabrics[1]
    silent = socket.create_connection((world.cards[1].host, world.cards[1].port))
    try:
        pump(fabric, until=lambda: len(fabric._reception.acceptor) == 1)
        monkeypatch.setattr("dist2.backends.socket.transport.links.acceptor.HANDSHAKE_S", 0.0)
        first, second = world.group()
        together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
        pump(fabric, until=lambda: not len(fabric._reception.acceptor))
        silent.settimeout(5)
        assert _ended(silent)
    finally:
        silent.close()


def test_more_strangers_than_may_be_are_refused(
    tcp: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = tcp(1).fabrics[0]
    monkeypatch.setattr("dist2.backends.socket.transport.links.acceptor.MAX_STRANGERS", 3)
    address = (fabric.card.host, fabric.card.port)
    strangers = [socket.create_connection(address) for _ in range(5)]
    try:
        with logged() as logs:
            pump(
                fabric,
                until=lambda: len(refusals_in(logs)) == 2,
            )
        assert len(fabric._reception.acceptor) == 3
    finally:
        for each in strangers:
            each.close()


def test_accepting_pauses_without_descriptors_and_says_so_once(tcp: Callable[[int], World]) -> None:
    fabric = tcp(1).fabrics[0]
    acceptor = fabric._reception.acceptor
    address = (fabric.card.host, fabric.card.port)
    with socket.create_connection(address):
        with logged() as logs, no_descriptors():
            for _ in range(3):
                pump(fabric, until=lambda: acceptor.paused)
                assert not fabric._epoll.poll(0)  # else waiting threads would not sleep
                acceptor._next_sweep = 0.0
                fabric._reception.sweep()  # tries once more
        pump(fabric, until=lambda: len(acceptor) == 1)
        with socket.create_connection(address):
            pump(fabric, until=lambda: len(acceptor) == 2)  # the next ones find the listener open again
    told = [entry["event"] for entry in logs if "cannot accept" in entry["event"]]
    assert len(told) == 1
    assert "accept failed: Too many open files (EMFILE): close files, or raise" in told[0]


@pytest.mark.parametrize(
    "frame",
    [
        Header(Kind.DATA, 0, CONTEXT, nbytes=10, transfer=77, total=10).encode() + bytes(10),
        Header(Kind.ACCEPT, 0, CONTEXT, transfer=77).encode(),
        Header(Kind.CANCEL, 0, CONTEXT, transfer=77).encode(),
        Header(Kind.CREDIT, 0, CONTEXT, total=2**64 - 1).encode(),
        Header(Kind.LEAVE, 0, 12345).encode(),
        Header(Kind.DEATH, nbytes=4).encode() + b"\xff\xfe\xfd\xfc",
    ],
    ids=lambda frame: Header.decode(frame[:56]).kind.name,
)
def test_frames_about_what_is_unknown_change_nothing(tcp: Callable[[int], World], frame: bytes) -> None:
    world = tcp(2)
    first, second = world.group()
    give(first, 1, b"x")
    with world.fabrics[0].lock:
        world.fabrics[0].linkage.outgoing[world.cards[1].fabric_id].put(frame)
    together(
        lambda: give(first, 1, text_of(LONG)), lambda: [_expect(second, b"x"), _expect(second, text_of(LONG))]
    )
    together(lambda: _expect(first, b"back", 1), lambda: give(second, 0, b"back"))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Header(Kind.DATA, 0, CONTEXT, tag=2**63 - 1, nbytes=10, transfer=9, total=LONG), "segment outside"),
        (Header(Kind.DATA, 0, CONTEXT, tag=LONG - 9, nbytes=10, transfer=9, total=LONG), "segment outside"),
        (Header(Kind.DATA, 0, CONTEXT, tag=-1, nbytes=10, transfer=9, total=LONG), "segment outside"),
        (Header(Kind.REVOKE, 0, CONTEXT, tag=-1), "revocation by rank -1"),
        (Header(Kind.REVOKE, 0, CONTEXT, tag=2), "revocation by rank 2"),
        (Header(Kind.REVOKE, 0, CONTEXT, tag=2**60), f"revocation by rank {2**60}"),
    ],
    ids=lambda value: f"{value.kind.name} {value.tag}" if isinstance(value, Header) else None,
)
def test_a_frame_that_breaks_the_protocol_ends_its_link(
    make: Callable[[int], World], frame: Header, words: str
) -> None:
    world = make(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    posted = second.recv_tagged(0, 0, 11, memoryview(bytearray(LONG)))
    announced = Header(Kind.ANNOUNCE, TAGGED, CONTEXT, fingerprint=11, transfer=9, total=LONG)
    with logged() as logs, world.fabrics[0].lock:
        link = world.fabrics[0].linkage.outgoing[world.cards[1].fabric_id]
        link.put(announced.encode() + frame.encode() + bytes(frame.nbytes))
        world.fabrics[0].linkage.flush(link)
        pump(world.fabrics[1], until=lambda: any(words in each["event"] for each in logs))
    with pytest.raises(PeerLostError):
        second.wait([posted], soon())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"pid": 1e999}',
        '{"pid": 0, "offset": 1e999, "arena": "999999999:2:3:a:4", "doorbell": "999999999:2"}',
        '{"pid": 0, "offset": 0, "arena": 5, "doorbell": 6}',
        f'{{"pid": {2**70}, "offset": 0, "arena": "999999999:2:3:a:4", "doorbell": "999999999:2"}}',
        "[" * 4000,
    ],
)
def test_a_ring_that_is_offered_in_strange_words_ends_its_link(text: str) -> None:
    node, rings = Node(), Rings()
    rings.maker = node
    one, other = socket.socketpair()
    with one, other, closing(node), pytest.raises(WireError, match="a ring that cannot be opened"):
        rings.read(Link(node._fabric, one, "f" * 32), text)


def test_the_listener_is_bound_to_the_address_given_alone() -> None:
    fabric = Fabric("127.0.0.2")
    try:
        assert fabric._reception.acceptor._listener.getsockname()[0] == "127.0.0.2"
        socket.create_connection(("127.0.0.2", fabric.card.port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", fabric.card.port), timeout=5)
    finally:
        fabric.close()


# Life


def test_five_hundred_groups_leave_no_descriptor_and_no_thread(make: Callable[[int], World]) -> None:
    world = make(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    together(lambda: give(second, 0, b"x"), lambda: take(first, 1, 1))  # both have accepted all connections
    gc.collect()  # garbage of earlier tests must not be collected meanwhile
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for context in range(1000, 1500):
        mine, other = world.open(0, context), world.open(1, context)
        sending = send(mine, 1, b"hello")
        assert take(other, 0, 5) == b"hello"
        assert sending.done
        mine.close()
        other.close()
    world.endpoints = world.endpoints[:2]
    pump(*world.fabrics, until=lambda: True)
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert [len(fabric._mailboxes) for fabric in world.fabrics] == [1, 1]


def test_a_closed_fabric_frees_its_waiters_and_refuses_new_groups(make: Callable[[int], World]) -> None:
    world = make(2)
    first, _ = world.group()
    waiting = threading.Event()

    def wait() -> None:
        receiving = first.recv_tagged(1, 0, 11, memoryview(bytearray(4)))
        waiting.set()
        with pytest.raises(GroupAbortedError, match="links"):
            first.wait([receiving], soon())

    def close() -> None:
        assert waiting.wait(10)
        world.fabrics[0].close()

    together(wait, close)
    world.fabrics[0].close()  # again: nothing
    late = world.open(0, 2)
    with pytest.raises(GroupAbortedError, match="links"):
        give(late, 1, b"x")


def test_a_closed_group_refuses(make: Callable[[int], World]) -> None:
    first, _ = make(2).group()
    pending = first.recv_tagged(1, 0, 11, memoryview(bytearray(4)))
    first.close()
    first.close()  # again: nothing
    assert isinstance(pending.error, GroupAbortedError)
    for attempt in (lambda: give(first, 1, b"x"), lambda: take(first, 1, 1)):
        with pytest.raises(Dist2Error):
            attempt()


# Without waiters


class Bell:
    """Signals the end of a transfer."""

    def __init__(self, endpoint: FabricEndpoint, transfer: Transfer, timeout_s: float) -> None:
        self._rung = threading.Event()
        transfer.add_done_callback(self._ring)
        endpoint.background(transfer, deadline_in(timeout_s))

    def _ring(self, transfer: Transfer) -> None:
        assert transfer.done
        self._rung.set()

    def wait(self) -> None:
        assert self._rung.wait(10), "nobody called"


@pytest.mark.parametrize("nbytes", [5, LONG])
def test_messages_are_done_though_nobody_waits(make: Callable[[int], World], nbytes: int) -> None:
    first, second = make(2).group()
    buffer = bytearray(nbytes)
    receiving = second.recv_tagged(0, 0, 11, memoryview(buffer))
    sending = send(first, 1, text_of(nbytes))
    bells = [Bell(second, receiving, 10), Bell(first, sending, 10)]
    for bell in bells:
        bell.wait()
    assert (receiving.error, sending.error) == (None, None)
    assert buffer == text_of(nbytes)


def test_a_message_nobody_waits_for_times_out_at_its_deadline(make: Callable[[int], World]) -> None:
    world = make(2)
    first, second = world.group()
    started = time.monotonic()
    receiving = second.recv_tagged(0, 0, 11, memoryview(bytearray(4)))
    Bell(second, receiving, 0.2).wait()
    assert 0.2 <= time.monotonic() - started < 2
    assert isinstance(receiving.error, OperationTimeoutError)
    assert receiving.error.missing == (0,)
    together(lambda: give(first, 1, b"on"), lambda: _expect(second, b"on"))


def test_a_message_nobody_waits_for_hears_of_a_death(make: Callable[[int], World]) -> None:
    world = make(2)
    first, second = world.group()
    together(lambda: give(first, 1, b"x"), lambda: _expect(second, b"x"))
    receiving = second.recv_tagged(0, 0, 11, memoryview(bytearray(4)))
    bell = Bell(second, receiving, 10)
    for link in list(world.fabrics[0].linkage.links.values()):
        link.reject()
    bell.wait()
    assert isinstance(receiving.error, PeerLostError)


def test_callbacks_are_called_once_though_two_threads_tell() -> None:
    called: list[int] = []
    fabric = Fabric()
    try:
        endpoint = FabricEndpoint(fabric, 1, 0, [fabric.card], False, describe)
        for nth in range(50):
            transfer = endpoint.recv_tagged(0, nth, 11, memoryview(bytearray(1)))
            together(
                lambda transfer=transfer, nth=nth: transfer.add_done_callback(lambda _: called.append(nth)),
                lambda nth=nth: give(endpoint, 0, b"x", nth),
            )
        assert called == list(range(50))
        endpoint.close()
    finally:
        fabric.close()
