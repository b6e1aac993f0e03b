"""Threads that wait for the turn to poll."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from dist2.backends.socket.transport.fabric import Fabric
from dist2.runtime.deadline import deadline_in

LIMIT_S = 10.0


def test_a_waiter_asks_whether_it_is_done_without_the_lock_of_the_links() -> None:
    with closing(Fabric()) as fabric:
        poller, other, asked = fabric.poller, threading.Lock(), threading.Event()
        answers = iter([False])

        def done() -> bool:
            if not next(answers, True):  # before the wait for the turn
                return False
            asked.set()
            with other:  # held below, where the lock of the links is taken next
                return True

        assert poller.role.acquire(False)  # another thread polls
        waiting = threading.Thread(
            target=poller.run_until, args=(done, deadline_in(LIMIT_S), lambda: False, False), daemon=True
        )
        with other:
            waiting.start()
            assert asked.wait(LIMIT_S)
            taken = threading.Event()
            threading.Thread(target=lambda: [fabric.lock.acquire(), taken.set()], daemon=True).start()
            assert taken.wait(LIMIT_S / 2)
            fabric.lock.release()
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()
        poller.role.release()


def test_a_waiter_that_an_exception_ends_is_counted_out_without_the_lock() -> None:
    """A signal handler that raises there would leave it counted for good."""
    with closing(Fabric()) as fabric:
        poller, ended = fabric.poller, threading.Event()
        answers = iter([False])

        def done() -> bool:
            if next(answers, True):
                assert fabric.lock.acquire()  # as another thread has it
                raise KeyError
            return False

        def wait() -> None:
            with pytest.raises(KeyError):
                poller.run_until(done, deadline_in(LIMIT_S), lambda: False, False)
            ended.set()

        assert poller.role.acquire(False)  # another thread polls
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert ended.wait(LIMIT_S)
        assert not poller.is_wanted()
        fabric.lock.release()
        waiting.join(LIMIT_S)
        poller.role.release()
