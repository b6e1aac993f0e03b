"""The short path of a wait for a posted receive: which messages it takes, and which it leaves."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from support.endpoint_pairs import NBYTES, PRINT, Side, each_in_turn, soon, text
from support.ranks import Tenant, run_ranks

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, ProcessGroup
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.messages.credit import FRAME_COST, REPORTED_BYTES
from dist2.backends.socket.wire import EAGER_BYTES

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

SHM = Tenant("shm", "socket", {"transport": "shm"})


@pytest.mark.parametrize("nbytes", [0, 1, NBYTES, 20_000])
def test_a_message_ends_the_receive_that_is_posted(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    for number in range(3):
        buffer = bytearray(nbytes)
        told: list[Any] = []
        posted = two.post(buffer)
        posted.add_done_callback(told.append)
        sent = text(number)[:1] * nbytes
        assert one.send(sent)
        owed = two.account.owed
        assert two.wait_posted(posted, buffer or bytearray(1)) == bool(nbytes)
        if nbytes:
            assert posted.done
            assert posted.data is None
            assert two.account.owed == owed + FRAME_COST + nbytes
        two.endpoint.wait([posted], soon())
        two.endpoint._fabric.poller.tell_finished()
        assert told == [posted]
        assert (posted.error, posted.source, posted.nbytes) == (None, 0, nbytes)
        assert bytes(buffer) == sent
    assert not two.endpoint._mailbox.pending()


def test_it_waits_for_a_message_that_is_to_come(sides: tuple[Side, Side]) -> None:
    one, two = sides

    def receive() -> bytes:
        buffer = bytearray(NBYTES)
        posted = two.post(buffer)
        while not posted.done and not two.wait_posted(posted, buffer, timeout_s=5):
            pass  # it did not come in a moment
        return bytes(buffer)

    each_in_turn(one, two, receive)


def test_nothing_comes_before_the_deadline(sides: tuple[Side, Side]) -> None:
    _, two = sides
    buffer = bytearray(NBYTES)
    posted = two.post(buffer)
    assert not two.wait_posted(posted, buffer, timeout_s=0.001)
    assert not posted.done
    assert two.endpoint._mailbox.pending() == [posted]


def test_the_receive_that_was_posted_first_is_served_first(sides: tuple[Side, Side]) -> None:
    one, two = sides
    first, second = bytearray(NBYTES), bytearray(NBYTES)
    posted = [two.post(first), two.post(second)]
    assert one.send(text(1))
    assert one.send(text(2))
    assert not two.wait_posted(posted[1], second)
    assert bytes(second) == bytes(NBYTES)
    assert two.wait_posted(posted[0], first)
    assert two.wait_posted(posted[1], second)
    assert (bytes(first), bytes(second)) == (text(1), text(2))


@pytest.mark.parametrize("from_any_first", [True, False])
def test_one_from_any_of_the_tag_has_both_go_the_long_way(
    sides: tuple[Side, Side], from_any_first: bool
) -> None:
    one, two = sides
    peers = [ANY_SOURCE, 0] if from_any_first else [0, ANY_SOURCE]
    buffers = [bytearray(NBYTES), bytearray(NBYTES)]
    posted = [two.post(buffer, peer=peer) for buffer, peer in zip(buffers, peers, strict=True)]
    assert one.send(text(1))
    assert one.send(text(2))
    for each, buffer in zip(posted, buffers, strict=True):
        assert not two.wait_posted(each, buffer)
    two.endpoint.wait(posted, soon())
    assert [bytes(buffer) for buffer in buffers] == [text(1), text(2)]


def test_another_message_that_is_next_is_left_to_the_long_way(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.post(buffer)
    assert one.send(text(8), tag=8)
    assert one.send(text(1))
    assert not two.wait_posted(posted, buffer)
    two.endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)
    assert two.take_long_way(tag=8) == text(8)


def test_nothing_is_written_where_a_receive_was_given_up(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer, other = bytearray(NBYTES), bytearray(NBYTES)
    posted, later = two.post(buffer), two.post(other)
    two.endpoint.cancel([posted])
    assert one.send(text(1))
    assert not two.wait_posted(posted, buffer)
    assert bytes(buffer) == bytes(NBYTES)
    assert isinstance(posted.error, GroupAbortedError)
    assert two.wait_posted(later, other)
    assert bytes(other) == text(1)
    assert not two.wait_posted(later, other), "it is done"


def test_a_receive_that_is_given_up_meanwhile_is_left_alone(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for number in range(20):
        buffer = bytearray(NBYTES)
        posted = two.post(buffer)
        sender = threading.Thread(target=partial(one.send, text(number)))
        cancels = threading.Thread(target=partial(two.endpoint.cancel, [posted]))
        cancels.start()
        sender.start()
        taken = two.wait_posted(posted, buffer, timeout_s=0.002)
        sender.join()
        cancels.join()
        assert posted.done
        assert (posted.error is None) == (bytes(buffer) == text(number))
        if posted.error is not None:
            assert not taken
            assert two.take_long_way() == text(number)


def test_a_group_that_has_failed_takes_nothing(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.post(buffer)
    assert one.send(text(1))
    two.endpoint.close()
    assert not two.wait_posted(posted, buffer)
    assert isinstance(posted.error, GroupAbortedError)


def test_nothing_is_taken_while_another_thread_polls(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffer = bytearray(NBYTES)
    posted = two.post(buffer)
    assert one.send(text(1))
    with two.endpoint._fabric.poller.role:
        assert not two.wait_posted(posted, buffer)
    with two.endpoint._fabric.lock:
        thread = threading.Thread(target=partial(two.wait_posted, posted, buffer))
        thread.start()
        thread.join(0.05)
        assert not posted.done
    thread.join(10)
    two.endpoint.wait([posted], soon())
    assert bytes(buffer) == text(1)


def test_who_posts_where_its_message_is_here_serves_those_posted_before(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffers = [bytearray(NBYTES) for _ in range(3)]
    told: list[Any] = []
    posted = [two.post(buffer) for buffer in buffers]
    for each in posted:
        each.add_done_callback(told.append)
    assert two.take() is None
    owed = two.account.owed
    for number in range(5):
        assert one.send(text(number))
    assert two.take() == text(3)
    assert told == posted, "nobody else may come to tell of them"
    assert [bytes(buffer) for buffer in buffers] == [text(0), text(1), text(2)]
    assert two.account.owed == owed + 4 * (FRAME_COST + NBYTES)
    assert two.take() == text(4)
    assert not two.endpoint._mailbox.pending()


@pytest.mark.parametrize("nbytes", [NBYTES - 1, NBYTES + 1])
def test_one_posted_before_that_is_of_another_length_is_left_to_the_long_way(
    sides: tuple[Side, Side], nbytes: int
) -> None:
    one, two = sides
    posted = two.post(bytearray(nbytes))
    assert one.send(text(1))
    assert two.take() is None
    assert not posted.done
    two.endpoint.cancel([posted])
    assert two.take() == text(1)


def test_one_posted_before_from_any_has_both_go_the_long_way(sides: tuple[Side, Side]) -> None:
    one, two = sides
    buffers = bytearray(NBYTES), bytearray(NBYTES)
    posted = [two.post(buffers[0]), two.post(buffers[1], peer=ANY_SOURCE)]
    assert one.send(text(1))
    assert one.send(text(2))
    assert two.take() is None
    two.endpoint.wait(posted, soon())
    assert [bytes(buffer) for buffer in buffers] == [text(1), text(2)]


def test_a_message_that_differs_fails_the_long_way(sides: tuple[Side, Side]) -> None:
    one, two = sides
    assert one.send(text(1))
    buffer = bytearray(NBYTES - 1)
    posted = two.endpoint.recv_tagged(0, 0, PRINT, memoryview(buffer))
    with pytest.raises(MismatchError):
        two.endpoint.wait([posted], soon())


def test_the_sender_is_told_what_was_received(sides: tuple[Side, Side]) -> None:
    one, two = sides
    for number in range(REPORTED_BYTES // (FRAME_COST + EAGER_BYTES) + 1):
        buffer = bytearray(EAGER_BYTES)
        posted = two.post(buffer)
        assert one.send(text(number)[:1] * EAGER_BYTES)
        if not two.wait_posted(posted, buffer):  # as long a one may take the long path
            two.endpoint.wait([posted], soon())
        assert bytes(buffer) == text(number)[:1] * EAGER_BYTES
    assert two.account.owed < FRAME_COST + EAGER_BYTES
    one.endpoint.attend()
    assert one.account.used < FRAME_COST + EAGER_BYTES


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
