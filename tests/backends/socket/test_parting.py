"""Two that wait for each other's messages on one core: one of them sleeps, so that it wakes up on another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns

import pytest
from support.endpoint_pairs import NBYTES, PRINT, Side, address_of, soon, text, two_sides

from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.messages.express import Express
from dist2.backends.socket.transport.messages.ways import Lot

ROUNDS = 120
UNUSED = 8
"""Consecutive unused yields after which a waiter polls first."""

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")


@contextmanager
def on_one_core() -> Iterator[None]:
    """Run the calling thread, and the threads that it starts, on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def express_of(side: Side) -> Express:
    return side.endpoint.ways.express(Lot(side.peer, 0, PRINT, NBYTES))


def take_turns(side: Side, way: Express, begins: bool, got: list[bytes]) -> None:
    """Send a message and wait for the answer, or the other way round, until there was a parting."""
    buffer = bytearray(NBYTES)
    address, end = address_of(memoryview(buffer)), soon()
    for number in range(ROUNDS):
        if begins:
            assert side.send(text(number))
        while not way.wait(address, end):
            assert monotonic_ns() < end
        got.append(bytes(buffer))
        if not begins:
            assert side.send(text(number))


def test_who_shares_a_core_with_whom_it_waits_for_sleeps_for_a_moment() -> None:
    with two_sides() as (one, two), on_one_core():
        ways, got, answered = (express_of(one), express_of(two)), list[bytes](), list[bytes]()
        other = threading.Thread(target=take_turns, args=(two, ways[1], False, answered))
        other.start()
        take_turns(one, ways[0], True, got)
        other.join()
    assert got == answered == [text(number) for number in range(ROUNDS)]
    partings = sum(way.partings for way in ways)
    assert 0 < partings <= 2 * (ROUNDS // 32), "each after 32 waits, at most"


def test_who_finds_that_nobody_wants_its_core_looks_before_it_yields() -> None:
    with two_sides() as (one, two):
        lot, endpoint, end = Lot(two.peer, 0, PRINT, NBYTES), two.endpoint, soon()
        way = Express(endpoint._fabric, endpoint._mailbox, lot, spins=0, lone_spins=1000)
        buffer = bytearray(NBYTES)
        address = address_of(memoryview(buffer))
        while way.unused_yields < UNUSED:
            assert monotonic_ns() < end, "with other work beside there are moments without, too"
            assert not way.wait(address, monotonic_ns() + 2_000_000)
        for number in range(ROUNDS):
            thread = threading.Thread(target=one.send, args=(text(number),))
            thread.start()
            while not way.wait(address, end):
                assert monotonic_ns() < end
            thread.join()
            assert bytes(buffer) == text(number)


def test_who_need_not_wait_does_not_sleep() -> None:
    with two_sides() as (one, two):
        way, buffer = express_of(two), bytearray(NBYTES)
        for number in range(ROUNDS):
            assert one.send(text(number))
            assert way.wait(address_of(memoryview(buffer)), soon())
        assert way.partings == 0
