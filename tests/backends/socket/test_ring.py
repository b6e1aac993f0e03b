"""Rings: a byte pipe in shared memory, whole under any cut and any wrap, and distrustful of the other end."""

from __future__ import annotations

import mmap
import multiprocessing
import random
from collections.abc import Callable

import pytest

from dist2.backends.socket.transport.links.ring import HEADER_BYTES, RingReader, RingWriter

CAPACITY = 256
_TAIL_WORD = 8
_BASE_WORD = 1
_PROBE_WORD = 32


def ends(capacity: int = CAPACITY) -> tuple[RingWriter, RingReader, memoryview]:
    memory = memoryview(bytearray(HEADER_BYTES + capacity))
    return RingWriter(memory), RingReader(memory), memory[:HEADER_BYTES].cast("Q")


def read(reader: RingReader, most: int = CAPACITY) -> bytes:
    buffer = memoryview(bytearray(most))
    return bytes(buffer[: reader.recv_into(buffer)])


def test_bytes_come_out_as_they_went_in_over_every_wrap() -> None:
    writer, reader, _ = ends()
    sent, got = bytearray(), bytearray()
    choose = random.Random(5)
    for _ in range(3000):
        text = choose.randbytes(choose.randrange(1, CAPACITY + 9))
        try:
            count = writer.sendmsg([text[:3], text[3:]])
        except BlockingIOError:
            count = 0
        sent += text[:count]
        buffer = memoryview(bytearray(choose.randrange(1, CAPACITY + 9)))
        try:
            got += buffer[: reader.recv_into(buffer)]
        except BlockingIOError:
            continue
    assert got == sent[: len(got)]
    assert len(sent) - len(got) <= CAPACITY


def test_a_reader_of_many_bytes_shows_the_distance_of_its_caches() -> None:
    writer, reader, words = ends(1 << 15)
    for count, is_shown in ((1000, False), (1 << 14, True), (1000, False), (1 << 14, True)):
        before = words[_PROBE_WORD]
        writer.sendmsg([b"x" * count])
        assert read(reader, 1 << 15) == b"x" * count
        assert (words[_PROBE_WORD] != before) == is_shown


def test_a_ring_that_nothing_is_in_begins_at_its_beginning() -> None:
    writer, reader, words = ends()
    for _ in range(3):
        writer.sendmsg([b"headerXY", b"0123"])
        assert words[_BASE_WORD] == words[0] - 12
        writer.sendmsg([b"behind"])
        assert words[_BASE_WORD] == words[0] - 18, "something is unread"
        assert read(reader, 12) == b"headerXY0123"
        assert read(reader) == b"behind"


@pytest.mark.parametrize("nonsense", [1, 1 << 40, (1 << 64) - 1])
def test_wherever_a_writer_says_that_bytes_lie_is_inside_the_ring(nonsense: int) -> None:
    writer, reader, words = ends()
    writer.sendmsg([b"x" * CAPACITY])
    words[_BASE_WORD] = nonsense
    assert read(reader) == b"x" * CAPACITY


@pytest.mark.parametrize("nonsense", [CAPACITY + 1, 1 << 40, (1 << 64) - 1])
def test_a_reader_refuses_a_counter_that_no_writer_can_have(nonsense: int) -> None:
    _, reader, words = ends()
    words[0] = nonsense
    assert reader.has_bytes
    with pytest.raises(ConnectionError, match="unread"):
        reader.recv_into(memoryview(bytearray(8)))


def test_a_counter_that_runs_backwards_is_refused() -> None:
    writer, reader, words = ends()
    writer.sendmsg([b"x" * 100])
    reader.recv_into(memoryview(bytearray(100)))
    words[0] = 50
    with pytest.raises(ConnectionError, match="unread"):
        reader.recv_into(memoryview(bytearray(8)))


@pytest.mark.parametrize("nonsense", [101, 1 << 40])
def test_a_writer_refuses_a_counter_that_no_reader_can_have(nonsense: int) -> None:
    writer, _, words = ends()
    writer.sendmsg([b"x" * 100])
    words[_TAIL_WORD] = nonsense
    with pytest.raises(ConnectionError, match="unread"):
        writer.sendmsg([b"y"])


def test_the_other_ends_word_cannot_move_this_ends_counter() -> None:
    """Each end keeps its own counter: a change of the shared copy does not affect it."""
    writer, reader, words = ends()
    writer.sendmsg([b"one"])
    buffer = memoryview(bytearray(3))
    reader.recv_into(buffer)
    words[_TAIL_WORD] = 0
    writer.sendmsg([b"two"])
    reader.recv_into(buffer)
    assert bytes(buffer) == b"two"


FRAMES = 5_000
HEAD = b"header-of-sixteen"[:16]


def _payload(number: int) -> bytes:
    return bytes((number + each) % 256 for each in range(4)) * (number % 23)


def _write(memory: mmap.mmap) -> None:
    writer = RingWriter(memoryview(memory))
    for number in range(FRAMES):
        rest = memoryview(HEAD + _payload(number))
        while rest:
            try:
                rest = rest[writer.sendmsg([rest]) :]
            except BlockingIOError:
                continue


def test_a_writer_and_a_reader_in_two_processes_agree_over_many_wraps() -> None:
    memory = mmap.mmap(-1, HEADER_BYTES + 4096)
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(memory,), daemon=True)
    writer.start()
    try:
        reader = RingReader(memoryview(memory))
        take: Callable[[int], bytes] = _taker(reader, writer)
        for number in range(FRAMES):
            payload = _payload(number)
            assert take(16) == HEAD
            assert take(len(payload)) == payload
        writer.join(10)
        assert writer.exitcode == 0
        assert not reader.has_bytes
    finally:
        writer.kill()
        writer.join()
        writer.close()


def _taker(reader: RingReader, writer: multiprocessing.process.BaseProcess) -> Callable[[int], bytes]:
    def take(nbytes: int) -> bytes:
        held = bytearray(nbytes)
        rest = memoryview(held)
        while rest:
            try:
                rest = rest[reader.recv_into(rest) :]
            except BlockingIOError:
                assert writer.is_alive() or reader.has_bytes, "the writer is gone"
        return bytes(held)

    return take
