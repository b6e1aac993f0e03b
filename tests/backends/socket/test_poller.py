"""Threads that wait for the turn to poll."""

from __future__ import annotations

import threading
from contextlib import closing

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
