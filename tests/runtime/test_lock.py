"""`Lock`: one thread at a time has it, each waiter gets it in the end, whatever signal handlers raise."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator

import pytest

from dist2.runtime.lock import Lock

ROUNDS = 2000


@pytest.fixture
def often() -> Iterator[None]:
    """Have the interpreter change threads much more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_it_is_taken_once_and_given_back_once() -> None:
    lock = Lock()
    assert not lock.locked()
    assert lock.acquire()
    assert lock.locked()
    assert not lock.acquire(False)
    lock.release()
    assert lock.acquire(False)
    lock.release()
    with pytest.raises(RuntimeError, match="nobody has"):
        lock.release()
    with pytest.raises(ZeroDivisionError), lock:
        assert lock.locked()
        _ = 1 / 0
    assert not lock.locked()


def test_a_block_that_has_lost_it_leaves_it_to_its_owner() -> None:
    """As where a signal handler raises while a condition takes it again."""
    lock, taken, done = Lock(), threading.Event(), threading.Event()

    def own() -> None:
        with lock:
            taken.set()
            assert done.wait(30)

    owner = threading.Thread(target=own)
    with pytest.raises(KeyError, match="raised"), lock:
        lock.release()
        owner.start()
        assert taken.wait(30)
        raise KeyError("raised")
    assert lock.locked()
    done.set()
    owner.join(30)
    assert not lock.locked()


@pytest.mark.usefixtures("often")
def test_threads_exclude_each_other_and_all_get_it() -> None:
    lock, inside, most = Lock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(ROUNDS):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert (most, inside, lock.locked()) == (1, 0, False)


@pytest.mark.usefixtures("often")
def test_a_condition_works_on_it() -> None:
    items: list[int] = []
    taken: list[int] = []
    changed = threading.Condition(Lock())

    def take() -> None:
        for _ in range(ROUNDS // 2):
            with changed:
                while not items:
                    changed.wait()
                taken.append(items.pop())

    takers = [threading.Thread(target=take) for _ in range(2)]
    for taker in takers:
        taker.start()
    for item in range(2 * (ROUNDS // 2)):
        with changed:
            items.append(item)
            changed.notify()
    for taker in takers:
        taker.join(60)
    assert sorted(taken) == list(range(2 * (ROUNDS // 2)))


class Interrupted(Exception):  # noqa: N818 - it is no error
    """As a signal handler raises it."""


class Gate:
    """A gate at which a handler interrupts the first of two waiters, right after it was let through."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self.waiting, self.interrupted = threading.Semaphore(0), threading.Event()
        self.locked, self.release = self._lock.locked, self._lock.release
        self._waiters = 0

    def acquire(self) -> None:
        if not self._lock.locked():  # as it is made
            self._lock.acquire()
            return
        self._waiters += 1
        is_first = self._waiters == 1
        self.waiting.release()
        if not is_first:
            self.interrupted.wait()
        self._lock.acquire()
        if is_first:
            self.interrupted.set()
            raise Interrupted


def test_a_waiter_that_a_handler_interrupts_lets_the_next_one_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    ends: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Lock", lambda: gate)
        lock = Lock()

    def wait() -> None:
        try:
            with lock:
                ends.append("got it")
        except Interrupted:
            ends.append("interrupted")

    lock.acquire()
    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
        gate.waiting.acquire()
    lock.release()
    for waiter in waiters:
        waiter.join(10)
    assert ends == ["interrupted", "got it"]
    assert not lock.locked()
