"""A member sleeps at its fences instead of yielding if its core is needed and wake-ups are quick."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from time import monotonic_ns

import pytest
from support.boards import operation, words
from support.time_limits import Late

from dist2.backends.socket.transport.boards.control_words import ALL, SLEEPING, entry_at
from dist2.backends.socket.transport.boards.pieces import PIECES
from dist2.backends.socket.transport.boards.waiting import sleep_ms
from dist2.backends.socket.transport.doorbell import Doorbell, PeerDoorbell
from dist2.operation.engine import WORDS_OF_CONTROL, Arrivals
from dist2.operation.record import Operation

pytestmark = pytest.mark.alone  # slow yields are made by this thread, and not by others on its core

RANG = WORDS_OF_CONTROL["RANG"]
SLOW_WAKES = 3
LATE_NS = 400_000
HOLD_NS = 20_000_000
TRIES = 50  # this thread may be kept from the core at any time


class Pair:
    """A member with slow yields only, and the page of another one that arrives on the test's command."""

    def __init__(self, doorbell: Doorbell) -> None:
        self.own, self.peer = words(), words()
        self.arrivals = made(self.own, doorbell)
        self.arrivals.add(1, self.peer, PeerDoorbell(doorbell.locator))
        self._doorbell = doorbell
        self._call = operation(0)

    def come(self, _: Operation | None = None) -> None:
        """Have the other come to the fence."""
        at = entry_at(self.arrivals.phase)
        self.peer[at] = self.own[at]

    wait = come

    def yield_once(self) -> None:
        """Meet at a fence to which the other comes at the first yield."""
        self.arrivals.cross(self._call, self, ALL, self.come)

    def sleep(self, late_ns: int) -> None:
        """Meet at a fence to which the other comes once this one sleeps, which wakes so late; 0: at once.

        Again where the nap was over before the other had seen it: a machine that is busy may keep it waiting.
        """
        while not self._was_seen_asleep(late_ns):
            pass

    def _was_seen_asleep(self, late_ns: int) -> bool:
        crossed, seen = threading.Event(), threading.Event()

        def wake() -> None:
            while not self.own[SLEEPING]:
                if crossed.is_set():
                    return
            seen.set()
            rang = monotonic_ns()
            if late_ns:
                self.peer[RANG] = rang
            while monotonic_ns() < rang + late_ns:
                pass
            self.come()
            self._doorbell.ring()

        other = threading.Thread(target=wake)
        other.start()
        try:
            self.arrivals.cross(self._call, self)
        finally:
            crossed.set()
            other.join()
        return seen.is_set()


def made(own: memoryview, doorbell: Doorbell) -> Arrivals:
    rows = [(row.base, row.stride, row.count) for row in PIECES]
    return Arrivals(0, own, doorbell.bell, 1, 1 << 30, 0, (0, 0), rows)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Doorbell()) as doorbell:
        yield Pair(doorbell)


def test_one_slow_yield_alone_puts_nobody_to_sleep(pair: Pair) -> None:
    pair.yield_once()
    assert pair.arrivals.sleepy == 0


def test_two_slow_yields_do(pair: Pair) -> None:
    for _ in range(20):  # they have to be near each other in time
        pair.yield_once()
        if pair.arrivals.sleepy:
            break
    assert pair.arrivals.sleepy > 0


def test_who_wakes_quickly_goes_on_to_sleep(pair: Pair) -> None:
    for _ in range(SLOW_WAKES + 1):
        pair.sleep(0)
    assert pair.arrivals.naps >= SLOW_WAKES + 1
    assert pair.arrivals.sleepy > 0


def test_who_wakes_slowly_yields_for_a_while_however_slow_that_is() -> None:
    for _ in range(TRIES):
        with closing(Doorbell()) as doorbell:
            pair = Pair(doorbell)
            for _ in range(SLOW_WAKES):
                began = monotonic_ns()
                pair.sleep(LATE_NS)
            if pair.arrivals.sleepy:  # a nap was over before the other had woken this thread
                continue
            for _ in range(4):
                pair.yield_once()
            if monotonic_ns() - began < HOLD_NS:
                assert pair.arrivals.sleepy == 0
                return
    raise Late("who was to be woken was late, or to yield took longer than that while, each time")


def test_sleeps_get_longer_with_the_time_waited_up_to_a_tenth_of_a_second() -> None:
    second_ns = 1_000_000_000
    assert sleep_ms(0, second_ns) == sleep_ms(second_ns // 10, second_ns) == 20
    assert sleep_ms(second_ns // 2, second_ns) == 50
    assert sleep_ms(60 * second_ns, second_ns) == 100
    assert sleep_ms(60 * second_ns, second_ns // 200) == 5
    assert sleep_ms(60 * second_ns, -1) == 0
