"""When waiters look, and when they had better sleep, by a clock of the test's own."""

from __future__ import annotations

import pytest

from dist2.backends.socket.transport import spinning
from dist2.backends.socket.transport.spinning import AWAKE_NS, SLOW_NS, Crowd, Spinning

FAST, SLOW = SLOW_NS // 100, 2 * SLOW_NS


class Clock:
    """A simulated time, and the duration of a yield."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.takes = FAST

    def yield_core(self) -> None:
        self.now += self.takes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(spinning, "monotonic_ns", lambda: made.now)
    monkeypatch.setattr(spinning, "yield_core", made.yield_core)
    return made


def slow_spell(clock: Clock, crowd: Crowd) -> int:
    """Have yields be slow until there is a crowd; return how long it is held to last."""
    clock.takes = SLOW
    while not crowd.is_here(clock.now):
        assert crowd.give_way() == clock.now
    since = clock.now
    while crowd.is_here(clock.now):
        clock.now += 100_000
    return clock.now - since


def test_one_slow_yield_is_no_crowd(clock: Clock) -> None:
    crowd = Crowd()
    for takes in (SLOW, FAST, SLOW, FAST, FAST, SLOW):
        clock.takes = takes
        crowd.give_way()
        assert not crowd.is_here(clock.now)


def test_a_crowd_that_stays_is_asked_after_less_and_less_often(clock: Clock) -> None:
    crowd = Crowd()
    spells = [slow_spell(clock, crowd) for _ in range(8)]
    assert spells == sorted(spells)
    assert 1_000_000 < spells[0] < spells[1] < 20_000_000
    assert spells[-1] == spells[-2] <= 100_000_000


def test_a_crowd_that_was_gone_counts_anew(clock: Clock) -> None:
    crowd = Crowd()
    spells = [slow_spell(clock, crowd) for _ in range(5)]
    clock.takes = FAST
    for _ in range(1000):
        crowd.give_way()
    clock.now += 1_000_000_000
    assert slow_spell(clock, crowd) == spells[0]


def test_a_waiter_looks_for_a_while(clock: Clock) -> None:
    waiter = Spinning(1, Crowd())
    assert waiter.at(clock.now)
    assert waiter.at(clock.now + AWAKE_NS)
    assert not waiter.at(clock.now + AWAKE_NS + 1)
    assert not waiter.at(clock.now), "it does not begin anew"


def test_a_waiter_that_does_not_spin_or_is_in_a_crowd_sleeps_at_once(clock: Clock) -> None:
    assert not Spinning(0, Crowd()).at(clock.now)
    crowd = Crowd()
    clock.takes = SLOW
    crowd.give_way()
    crowd.give_way()
    assert not Spinning(1, crowd).at(clock.now)
