# cython: language_level=3
"""`Lock`: a lock that costs a few nanoseconds while no thread waits for it.

Theory of operation. No other thread runs Python code, or takes a `Lock`, while a compiled function that calls
nothing runs: it holds the interpreter lock. So a flag is enough to take a free lock and to give it back. A
thread that finds it taken is counted, and sleeps at the *gate*, a `threading.Lock` that is closed. Who gives
the lock back opens the gate if anybody is counted, and lets one thread through, which tries again: it sleeps
once more if another thread was faster. Signal handlers run while a thread sleeps there; if one raises after
that thread was let through, the thread opens the gate for another one.

Each lock notes the thread that has it. That tells signal handlers what the stack, in which compiled functions
have no frames, does not: whether they interrupt a change.
"""

import threading
from weakref import ref

from cpython.pythread cimport PyThread_get_thread_ident

_locks = []
"""Weak references to all locks."""


def holds_lock():
    """Whether the calling thread has a lock."""
    cdef Lock lock
    cdef unsigned long here = PyThread_get_thread_ident()
    for each in list(_locks):
        lock = each()
        if lock is not None and lock._held and lock._holder == here:
            return True
    return False


cdef class Lock:
    """As `threading.Lock`; without a timeout. In Cython `enter`, `take` and `give` are functions of C."""

    def __init__(self):
        self._held = False
        self._waiters = 0
        self._gate = threading.Lock()
        self._gate.acquire()
        _locks.append(ref(self, _locks.remove))

    cdef bint take(self) noexcept:
        """Take it if it is free; return whether it was."""
        if self._held:
            return False
        self._held = True
        self._holder = PyThread_get_thread_ident()
        return True

    cdef int enter(self) except -1:
        """Take it, or wait until it is free; return 0."""
        return 0 if self.take() else self._wait()

    cdef int give(self) except -1:
        """Give it back; return 0.

        Raises:
            RuntimeError: Nobody has it.
        """
        if not self._held:
            raise RuntimeError("release of a lock that nobody has")
        self._held = False
        return self._open_gate() if self._waiters else 0

    def acquire(self, bint blocking=True):
        """Take it; return False if it is taken and ``blocking`` is false."""
        if not blocking:
            return bool(self.take())
        self.enter()
        return True

    def release(self):
        """Give it back.

        Raises:
            RuntimeError: Nobody has it.
        """
        self.give()

    def locked(self):
        """Whether a thread has it."""
        return bool(self._held)

    def __enter__(self):
        self.enter()

    def __exit__(self, kind: object, error: object, traceback: object):
        # A condition that was interrupted while it took the lock again leaves the block without it.
        if error is None or (self._held and self._holder == PyThread_get_thread_ident()):
            self.give()

    cdef int _wait(self) except -1:
        self._waiters += 1
        try:
            while not self.take():
                self._gate.acquire()
        except BaseException:
            self._waiters -= 1
            if self._waiters and not self._held:
                self._open_gate()
            raise
        self._waiters -= 1
        return 0

    cdef int _open_gate(self) except -1:
        if self._gate.locked():
            self._gate.release()
        return 0
