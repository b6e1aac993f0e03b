"""The role of the one who polls: free again, whatever raises in the midst of a turn."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from dist2.backends.socket.transport.fabric import Fabric
from dist2.clock import deadline_in


class Interrupted(Exception):  # noqa: N818 - by a signal handler of the program
    """What is raised."""


def interrupted_at(call: int) -> Callable[[FrameType, str, object], None]:
    """Return a profiler that raises where a function begins, which is where Python runs signal handlers."""
    calls = itertools.count()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and next(calls) == call:
            raise Interrupted

    return look


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric(job_id="test")
    yield made
    made.close()


def _attend(fabric: Fabric) -> None:
    fabric.poller.attend()


def _wait(fabric: Fabric) -> None:
    looks = itertools.count()
    fabric.poller.run_until(lambda: next(looks) == 1, deadline_in(10.0), lambda: False)


@pytest.mark.parametrize("turn", [_attend, _wait])
def test_who_is_interrupted_leaves_the_role_to_others(fabric: Fabric, turn: Callable[[Fabric], None]) -> None:
    for call in itertools.count():
        sys.setprofile(interrupted_at(call))
        try:
            turn(fabric)
        except Interrupted:
            continue
        finally:
            sys.setprofile(None)
            assert fabric.poller.take_role(), f"at call {call}"
            fabric.poller.give_role()
        break
    assert call > 5
