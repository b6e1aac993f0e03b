"""Code that interrupts other code: Ctrl-C and signal handlers, destructors and callbacks.

Any of them may find its own thread in the middle of a change, with a lock held. Two rules follow.

**Ctrl-C is raised between steps.** Python raises `KeyboardInterrupt` at any bytecode of the main thread: a
frame half read or a lock just taken would stay so, and break every group of the process. So while this
process has links, SIGINT is handled here, if Python's own handler handled it before. The handler walks the
stack outwards to the first frame whose code has an `OnCtrlC` mark. Where Ctrl-C is deferred, the handler only
records it: waiting loops poll `ctrl_c.pending` many times a second and raise, and a step without a wait ends
within microseconds. The signal is sent again until it is raised, after the step. Programs with a handler of
their own keep it; one that raises may break the links of this process.

**Code that takes locks runs outside of the library's calls.** A signal handler or a destructor may close a
group. Closing takes locks that interrupted frames of the same thread may hold, which would be a deadlock.
`run_outside_locks` therefore looks for frames of the library below it, and for a `Lock` that this thread has
(compiled functions have no frames), and uses another thread if there is one. Here all code of the library
counts unless it is marked by `holds_no_lock`: a forgotten mark costs a thread, and no deadlock.

Marks are on code objects and on packages, never on names: see `code_marks`. None of this costs time until
a signal arrives or a group ends.

Source: trio's "KeyboardInterrupt protection", which looks for marks in the stack as well.
"""

from __future__ import annotations

import _weakrefset
import enum
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import Protocol

from dist2.runtime.code_marks import CodeMarks, Marked, library
from dist2.runtime.deadline import monotonic_ns, remaining_s
from dist2.runtime.lock import holds_lock
from dist2.runtime.threads import Worker

_AGAIN_S = 0.002
_LONGEST_S = 2.5
"""Longest time that Ctrl-C is deferred, in seconds, wherever the main thread is."""
SLICE_NS = 50_000_000
"""How long a wait may last that does not check for Ctrl-C."""


# Marks


class OnCtrlC(enum.Enum):
    """Treatment of Ctrl-C in marked code, and in unmarked code that it calls."""

    DEFER = enum.auto()
    """It waits: this code changes what several threads or groups share."""
    DEFER_IN_CALLS = enum.auto()
    """It waits in functions that this code calls, also by way of C, which has no frames. The code itself is
    only innermost before such a call, or when it has returned: then Ctrl-C is raised."""
    RAISE = enum.auto()
    """It is raised at once: this code may be called by the above, waits for long, and stays in order."""


ctrl_c_marks: CodeMarks[OnCtrlC] = CodeMarks()
lock_marks: CodeMarks[bool] = CodeMarks()
"""Whether code may hold locks that the end of a group takes."""


def on_ctrl_c(mark: OnCtrlC) -> Callable[[Marked], Marked]:
    """Return a decorator that sets the treatment of Ctrl-C in a class or a function."""
    return ctrl_c_marks.add(mark)


def package_on_ctrl_c(spec: ModuleSpec, mark: OnCtrlC) -> None:
    """Set the treatment of Ctrl-C in all code of a package, given its ``__spec__``."""
    ctrl_c_marks.add_package(spec, mark)


def holds_no_lock(function: Marked) -> Marked:
    """Mark a function of the library, or all of a class, that holds no lock while it closes groups."""
    return lock_marks.add(False)(function)


def package_holds_locks(spec: ModuleSpec) -> None:
    """Count the code of another package, given its ``__spec__``, as code of the library."""
    lock_marks.add_package(spec, True)


def package_is_a_program(spec: ModuleSpec) -> None:
    """Count a package inside the library, given its ``__spec__``, as a program that uses the library."""
    lock_marks.add_package(spec, False)


package_holds_locks(library())


# Ctrl-C


@on_ctrl_c(OnCtrlC.DEFER)
class CtrlC:
    """State of SIGINT in this process.

    Attributes:
        pending: Ctrl-C was pressed and has not been raised yet.
    """

    def __init__(self) -> None:
        self.pending = False
        self._since = 0.0
        self._echo = False
        self._main = threading.main_thread().ident

    def take_over(self) -> None:
        """Handle SIGINT from now on, if Python's own handler does and this is the main thread."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._main = get_ident()
            signal.signal(signal.SIGINT, self._came)

    def give_back(self) -> None:
        """Leave SIGINT to Python's own handler again."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) == self._came
        ):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        echo, self._echo = self._echo, False
        if echo and not self.pending:  # sent again just when it was heard
            return
        now = time.monotonic()
        if defers_ctrl_c(frame) and not (self.pending and now - self._since > _LONGEST_S):
            if not self.pending:
                self.pending, self._since = True, now
                Worker("dist2-ctrl-c", self._send_again).start()
            return
        self.pending = False
        signal.default_int_handler(number, frame)

    def _send_again(self) -> None:
        while self.pending and self._main is not None:
            time.sleep(_AGAIN_S)
            if self.pending:
                self._echo = True
                signal.pthread_kill(self._main, signal.SIGINT)

    def forget(self) -> None:
        """In a forked child: drop a pending SIGINT, which was the parent's."""
        self.pending = False
        self._main = threading.main_thread().ident

    def look(self) -> None:
        """Raise a pending Ctrl-C, in the main thread between two steps. Read `pending` first: it is cheap.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self.pending and get_ident() == self._main:
            self.pending = False
            raise KeyboardInterrupt


def defers_ctrl_c(frame: FrameType | None) -> bool:
    """Whether the innermost frame that has a mark defers Ctrl-C; locks and destructors always do."""
    if holds_lock():
        return True
    answer: bool | None = None
    innermost = frame
    while frame is not None:
        names = frame.f_globals
        if frame.f_code.co_name == "__del__" or names is vars(weakref) or names is vars(_weakrefset):
            return True  # Python discards exceptions of a destructor, and of a callback of a weak reference
        mark = ctrl_c_marks.of(frame.f_code) if answer is None else None
        if mark is not None and (mark is not OnCtrlC.DEFER_IN_CALLS or frame is not innermost):
            answer = mark is not OnCtrlC.RAISE
        frame = frame.f_back
    return bool(answer)


class Awaited(Protocol):
    """The part of a future that a wait needs."""

    def done(self) -> bool:
        """Whether it is complete."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until it is complete, and return its error."""


@on_ctrl_c(OnCtrlC.DEFER)
def await_end(future: Awaited, deadline_ns: int) -> bool:
    """Wait until a future is done; False if the deadline passes first.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
    """
    while not future.done():
        now = monotonic_ns()
        if now >= deadline_ns:
            return False
        with suppress(TimeoutError):
            future.exception(remaining_s(min(deadline_ns, now + SLICE_NS)))
        ctrl_c.look()
    return True


@on_ctrl_c(OnCtrlC.DEFER)
def wait_for(condition: threading.Condition, met: Callable[[], bool], deadline_ns: int) -> bool:
    """Wait until something is the case, as `threading.Condition.wait_for`; whether it is.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
    """
    while True:
        with condition:
            slice_ns = min(deadline_ns, monotonic_ns() + SLICE_NS)
            if condition.wait_for(met, remaining_s(slice_ns)):
                return True
        ctrl_c.look()
        if monotonic_ns() >= deadline_ns:
            return False


# Locks


@holds_no_lock
def inside_library_call() -> bool:
    """Whether the calling thread runs code of the library that may hold locks."""
    if holds_lock():  # of compiled code, perhaps, which has no frames
        return True
    frame: FrameType | None = _getframe()
    while frame is not None:
        if lock_marks.of(frame.f_code):
            return True
        frame = frame.f_back
    return False


@holds_no_lock
def run_outside_locks(name: str, call: Callable[[], None]) -> None:
    """Call a function that takes locks: here, or on a new thread if this one may hold them already.

    Args:
        name: The thread's name.
        call: It must not raise.
    """
    if inside_library_call():
        Worker(name, call).start()
    else:
        call()


ctrl_c = CtrlC()
"""The one of this process."""
