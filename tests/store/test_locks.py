"""`held`: a lock with a limit, free again whatever signal handlers raise."""

from __future__ import annotations

import itertools
import sys
import threading
from threading import RLock
from types import FrameType

from support.raising_handlers import Interrupted, interrupted

from dist2.store.locks import lock_with_timeout


def is_free(lock: RLock) -> bool:
    """Whether another thread can have it."""
    found: list[bool] = []

    def look() -> None:
        with lock_with_timeout(lock, 0) as mine:
            found.append(mine)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_it_is_held_within_the_block_and_free_after_it() -> None:
    lock = threading.RLock()
    with lock_with_timeout(lock, None) as mine:
        assert mine
        assert not is_free(lock)
        with lock_with_timeout(lock, 0) as again:
            assert again
        assert not is_free(lock)
    assert is_free(lock)


def test_who_does_not_get_it_in_time_leaves_it_to_its_owner() -> None:
    lock = threading.RLock()
    with lock_with_timeout(lock, None):
        assert not is_free(lock)
        assert not is_free(lock)
    assert is_free(lock)


def test_it_is_free_again_whatever_a_handler_raises() -> None:
    lock = threading.RLock()

    def hold() -> None:
        with lock_with_timeout(lock, 1.0) as mine:
            assert mine

    for where in itertools.count():
        raised = interrupted(where, hold)
        assert is_free(lock), raised
        if not raised:
            break
    assert where > 2


def test_it_is_free_once_nobody_keeps_what_was_raised_as_the_block_was_left() -> None:
    lock = threading.RLock()

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "__exit__":
            raise Interrupted

    def hold() -> Interrupted:
        sys.setprofile(interrupt)
        try:
            with lock_with_timeout(lock, 1.0):
                pass
        except Interrupted as error:
            return error
        finally:
            sys.setprofile(None)
        raise AssertionError("the block was left without a function in Python")

    kept = hold()
    assert not is_free(lock)
    del kept
    assert is_free(lock)
