# cython: language_level=3
"""`Lock`: a lock that costs a few nanoseconds while no thread waits for it.

Theory of operation. No other thread runs Python code, or takes a `Lock`, while a compiled function that calls
nothing runs: it holds the interpreter lock. So a flag is enough to take a free lock and to give it back. A
thread that finds it taken is counted, and sleeps at the *gate*, a `threading.Lock` that is closed. Who gives
the lock back opens the gate if anybody is counted, and lets one thread through, which tries again: it sleeps
once more if another thread was faster. Signal handlers run while a thread sleeps there; if one raises after
that thread was let through, the thread opens the gate for another one.

The thread that took a lock gives it back. How many a thread has tells signal handlers what its stack, in which
compiled functions have no frames, does not: whether they interrupt a change.
"""

import threading

cdef extern from *:
    """
    static _Thread_local long held; /* locks that this thread has */
    """
    long held


def locks_held():
    """Return how many locks the calling thread has."""
    return held


cdef class Lock:
    """As `threading.Lock`; without a timeout. In Cython `enter`, `take` and `give` are functions of C."""

    def __init__(self):
        self._held = False
        self._waiters = 0
        self._gate = threading.Lock()
        self._gate.acquire()

    cdef bint take(self) noexcept:
        """Take it if it is free; return whether it was."""
        global held
        if self._held:
            return False
        self._held = True
        held += 1
        return True

    cdef int enter(self) except -1:
        """Take it, or wait until it is free; return 0."""
        return 0 if self.take() else self._wait()

    cdef int give(self) except -1:
        """Give it back; return 0.

        Raises:
            RuntimeError: Nobody has it.
        """
        global held
        if not self._held:
            raise RuntimeError("release of a lock that nobody has")
        self._held = False
        held -= 1
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

    def __exit__(self, *error: object):
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
