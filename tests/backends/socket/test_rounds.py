"""Rounds: a thread that sleeps while rings may fill is woken, and none sleeps right after a message."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest
from support.endpoint_pairs import PRINT, Side, text, two_sides
from support.time_limits import in_time

from dist2.backends.socket.transport import poller, shared_memory
from dist2.backends.socket.transport.rounds import BUSY_ROUNDS

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

FAR_S = 8.0


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with two_sides() as both:
        yield both


def is_rung(side: Side, timeout_s: float) -> bool:
    """Whether a rank that sleeps in the kernel is woken."""
    return bool(select.select([side.endpoint], [], [], timeout_s)[0])


@pytest.mark.parametrize("nbytes", [0, 24, 20_000])
def test_a_short_message_wakes_who_sleeps(sides: tuple[Side, Side], nbytes: int) -> None:
    one, two = sides
    two.node._fabric.linkage.rings.doze(True)
    sending = one.endpoint.send(one.peer, 1, 0, PRINT, memoryview(bytes(nbytes)))
    assert sending.done, "it fits the ring"
    assert is_rung(two, FAR_S)


def test_who_is_awake_is_not_rung(sides: tuple[Side, Side]) -> None:
    one, two = sides
    two.node._fabric.linkage.rings.doze(False)
    one.endpoint.send(one.peer, 1, 0, PRINT, memoryview(bytes(24)))
    assert not is_rung(two, 0)


def test_nobody_sleeps_after_a_round_that_moved_something(sides: tuple[Side, Side]) -> None:
    """Not in the round that serves descriptors, either: no peer knows that it has to wake this thread."""
    one, two = sides
    polling = two.node._fabric.poller
    start = time.monotonic()
    for number in range(2 * BUSY_ROUNDS):
        one.send_long_way(text(number))
        with polling.role:
            polling.progress(FAR_S)
    in_time(time.monotonic() - start, FAR_S)
    for number in range(2 * BUSY_ROUNDS):
        assert two.take_long_way() == text(number)


def test_a_collective_looks_around_less_often_than_a_message(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message for it may stay in the socket until its receive is posted."""
    _, two = sides
    looking, now = two.node._fabric.poller, time.monotonic_ns()
    monkeypatch.setattr(poller, "monotonic_ns", lambda: now)
    found = []
    for seq, ms in enumerate((10_000, 50, 60), start=1):
        now += ms * 1_000_000
        two.endpoint.begin(seq, PRINT)
        found.append(looking._glanced_ns == now)
    now += 50 * 1_000_000
    receiving = two.endpoint.recv_tagged(two.peer, 1, PRINT, memoryview(bytearray(1)))
    two.endpoint.cancel([receiving])
    assert [*found, looking._glanced_ns == now] == [True, False, True, True]
