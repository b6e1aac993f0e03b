"""Long messages with posted receives, and threads that wait for them: which messages they read, and which
they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from support.endpoint_pairs import PRINT, Side, pattern, soon, two_sides
from support.ranks import Tenant, run_ranks
from support.threads import together

from dist2 import GroupAbortedError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.messages.express_long import ExpressTake
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending
from dist2.backends.socket.transport.raw import address_of
from dist2.runtime.deadline import deadline_in

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

SHM = Tenant("shm", "socket", {"transport": "shm"})
LONG = 1 << 20


@attrs.frozen
class Receiver:
    """A side that receives long messages."""

    side: Side
    way: ExpressTake

    def wait(self, posted: Receiving, buffer: bytearray, timeout_s: float = 0.1) -> bool:
        return self.way.wait_posted(posted, address_of(memoryview(buffer)), deadline_in(timeout_s))

    def end(self, posted: Receiving) -> None:
        self.side.endpoint.wait([posted], soon())


@pytest.fixture
def sides() -> Iterator[tuple[Side, Receiver]]:
    with two_sides() as (one, two):
        yield one, Receiver(two, two.endpoint.ways.express_take(Lot(0, 0, PRINT, LONG)))


def send(side: Side, text: bytearray) -> Sending:
    sending = side.endpoint.send_tagged(side.peer, 0, PRINT, memoryview(text))
    assert isinstance(sending, Sending)
    return sending


def test_a_message_that_was_offered_is_read_and_its_sender_told(sides: tuple[Side, Receiver]) -> None:
    one, two = sides
    for salt in range(3):
        buffer = bytearray(LONG)
        told: list[Any] = []
        posted = two.side.post(buffer)
        posted.add_done_callback(told.append)
        sending = send(one, pattern(LONG, salt))
        assert two.wait(posted, buffer)
        two.end(posted)
        assert buffer == pattern(LONG, salt)
        assert (posted.error, posted.source, posted.nbytes, posted.data) == (None, 0, LONG, None)
        two.side.endpoint._fabric.poller.tell_finished()
        assert told == [posted]
        one.endpoint.wait([sending], soon())
    assert not two.side.endpoint._mailbox.pending()
    assert not one.endpoint._mailbox.pending()


def test_it_waits_for_a_message_that_is_to_come(sides: tuple[Side, Receiver]) -> None:
    one, two = sides

    def receive() -> None:
        for salt in range(20):
            buffer = bytearray(LONG)
            posted = two.side.post(buffer)
            if not two.wait(posted, buffer, timeout_s=5):
                two.end(posted)  # it did not come in a moment
            assert buffer == pattern(LONG, salt)

    def sends() -> None:
        for salt in range(20):
            one.endpoint.wait([send(one, pattern(LONG, salt))], soon())

    together(receive, sends)


def test_nothing_comes_before_the_deadline(sides: tuple[Side, Receiver]) -> None:
    _, two = sides
    buffer = bytearray(LONG)
    posted = two.side.post(buffer)
    assert not two.wait(posted, buffer, timeout_s=0.001)
    assert two.side.endpoint._mailbox.pending() == [posted]


class Refusing:
    """A short path in C that is not to be taken."""

    def fetch_posted(self, *_: object) -> bool:
        raise AssertionError("it waits for an offer that was taken in")


def test_who_has_something_to_read_does_not_wait_for_something_else(sides: tuple[Side, Receiver]) -> None:
    one, two = sides
    buffer, poller = bytearray(LONG), two.side.endpoint._fabric.poller
    posted, coming = two.side.post(buffer), send(one, pattern(LONG, 1))
    for _ in range(100):
        if poller.borrows:
            break
        poller.attend()
    assert poller.borrows, "the offer was taken in, and nothing was read"
    refusing: Any = Refusing()
    two.way._express = refusing
    assert not two.wait(posted, buffer, timeout_s=5)
    two.end(posted)
    assert buffer == pattern(LONG, 1)
    one.endpoint.wait([coming], soon())


@pytest.mark.parametrize("before", [0, ANY_SOURCE])
def test_what_another_receive_would_get_is_not_taken_for_this_one(
    sides: tuple[Side, Receiver], before: int
) -> None:
    one, two = sides
    buffers = bytearray(LONG), bytearray(LONG)
    first, second = two.side.post(buffers[0], peer=before), two.side.post(buffers[1])
    sent = [send(one, pattern(LONG, salt)) for salt in range(2)]
    served = before != ANY_SOURCE
    assert two.wait(second, buffers[1]) == served, "after the other"
    assert first.done == served
    assert buffers[1] == (pattern(LONG, 1) if served else bytes(LONG))
    for posted in (first, second):
        two.end(posted)
    assert list(buffers) == [pattern(LONG, 0), pattern(LONG, 1)]
    one.endpoint.wait(sent, soon())


def test_a_message_that_is_taken_back_fails_its_receive(sides: tuple[Side, Receiver]) -> None:
    one, two = sides
    buffer = bytearray(LONG)
    posted = two.side.post(buffer)
    one.endpoint.cancel([send(one, pattern(LONG, 1))])
    assert not two.wait(posted, buffer)
    with pytest.raises(PeerLostError, match="gave up sending"):
        two.end(posted)
    assert not two.side.endpoint._mailbox.pending()


@pytest.mark.parametrize("pid", [0, 1 << 22])
def test_where_reading_is_refused_the_message_comes_through_the_ring(
    sides: tuple[Side, Receiver], pid: int
) -> None:
    one, two = sides
    fabric, mailbox = two.side.endpoint._fabric, two.side.endpoint._mailbox
    link = fabric.linkage.rings.links_from.get(mailbox.fabric_ids[0])
    assert link is not None
    assert link.rx is not None
    link.rx.pid = pid  # of no process
    buffer = bytearray(LONG)
    posted, sending = two.side.post(buffer), send(one, pattern(LONG, 1))
    assert not two.wait(posted, buffer)
    together(partial(two.end, posted), partial(one.endpoint.wait, [sending], soon()))
    assert buffer == pattern(LONG, 1)


def test_what_was_read_of_a_process_that_has_ended_goes_to_nobody(sides: tuple[Side, Receiver]) -> None:
    """A process id may belong to another process by then: in this test to the own one."""
    one, two = sides
    link = two.side.endpoint._fabric.linkage.rings.links_from.get(two.side.endpoint._mailbox.fabric_ids[0])
    assert link is not None
    assert link.rx is not None
    child = subprocess.Popen([sys.executable, "-c", ""])
    pidfd = os.pidfd_open(child.pid)
    child.wait()
    link.rx.pidfd = pidfd
    buffer = bytearray(LONG)
    posted, sending = two.side.post(buffer), send(one, pattern(LONG, 1))
    assert not two.wait(posted, buffer)
    for _ in range(100):
        two.side.endpoint._fabric.poller.attend()
    assert not posted.done
    assert not sending.done
    two.side.endpoint.cancel([posted])
    one.endpoint.cancel([sending])
    os.close(pidfd)


def test_a_group_that_has_failed_reads_nothing(sides: tuple[Side, Receiver]) -> None:
    one, two = sides
    buffer = bytearray(LONG)
    posted = two.side.post(buffer)
    sending = send(one, pattern(LONG, 1))
    two.side.endpoint.close()
    two.wait(posted, buffer)
    assert isinstance(posted.error, GroupAbortedError)
    assert buffer == bytes(LONG)
    one.endpoint.cancel([sending])


def test_a_group_that_is_aborted_while_the_offer_comes_fails_the_receive(
    sides: tuple[Side, Receiver],
) -> None:
    one, two = sides
    buffer = bytearray(LONG)
    posted, sending = two.side.post(buffer), send(one, pattern(LONG, 1))
    two.side.endpoint._mailbox.aborted = GroupAbortedError("a test")
    assert two.wait(posted, buffer)
    with pytest.raises(GroupAbortedError):
        two.end(posted)
    one.endpoint.cancel([sending])


def test_nothing_is_read_while_another_thread_polls(sides: tuple[Side, Receiver]) -> None:
    one, two = sides
    buffer = bytearray(LONG)
    posted, sending = two.side.post(buffer), send(one, pattern(LONG, 1))
    with two.side.endpoint._fabric.poller.role:
        assert not two.wait(posted, buffer)
    two.end(posted)
    assert buffer == pattern(LONG, 1)
    one.endpoint.wait([sending], soon())


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
