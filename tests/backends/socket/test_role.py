"""The role of the poller: it is free after any exception of a signal handler in a turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from support.endpoint_pairs import Side, text, two_sides
from support.raising_handlers import interrupted

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.poller import Poller
from dist2.runtime.deadline import deadline_in


def is_free(poller: Poller) -> bool:
    if not poller.role.acquire(blocking=False):
        return False
    poller.role.release()
    return True


# Any poller


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric(job_id="test")
    yield made
    made.close()


def _attend(poller: Poller) -> None:
    poller.attend()


def _wait(poller: Poller) -> None:
    looks = itertools.count()
    poller.run_until(lambda: next(looks) == 1, deadline_in(10.0), lambda: False)


def _in_the_background(poller: Poller) -> None:
    poller._called_ns = 0
    poller.wake()
    poller.make_progress()


@pytest.mark.parametrize("turn", [_attend, _wait, _in_the_background])
def test_who_polls_leaves_the_role_to_others(fabric: Fabric, turn: Callable[[Poller], None]) -> None:
    for where in itertools.count():
        raised = interrupted(where, lambda: turn(fabric.poller))
        assert is_free(fabric.poller), raised
        if not raised:
            break
    assert where > 2


def test_who_comes_second_to_the_role_does_not_wait_for_the_first_ones_turn(fabric: Fabric) -> None:
    poller = fabric.poller
    with poller.role:
        assert poller.play(lambda: "polled", "did not") == "did not"
    assert poller.play(lambda: "polled", "did not") == "polled"


# Short ways


def _take(side: Side) -> None:
    side.take()


def _read(side: Side) -> None:
    posted = side.post(bytearray(24))
    try:
        side.endpoint.help(posted, deadline_in(0.0))
    finally:
        side.endpoint.cancel([posted])


@pytest.mark.parametrize(("share", "turn"), [(True, _take), (False, _read)])
def test_who_looks_for_a_message_leaves_the_role_to_others(share: bool, turn: Callable[[Side], None]) -> None:
    with two_sides(share) as (one, two):
        for where in itertools.count():
            one.send(text(1))
            raised = interrupted(where, lambda: turn(two))
            assert is_free(two.endpoint._fabric.poller), raised
            if not raised:
                break
        assert where > 2


def test_in_c_who_is_interrupted_as_it_wakes_waiters_raises_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_sides() as (one, two):
        poller = two.endpoint._fabric.poller
        assert one.send(text(1))
        poller._waiters += 1
        try:
            for where in itertools.count():
                raised = interrupted(where, lambda: two.take())
                assert is_free(poller), raised
                if not raised:
                    break
        finally:
            poller._waiters -= 1
