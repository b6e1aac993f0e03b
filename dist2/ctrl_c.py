"""Ctrl-C comes between steps, and not in the midst of one.

Python raises `KeyboardInterrupt` wherever the main thread is: a frame half read or a lock just taken would
stay so, and spoil every group of the process. So while this process has links, SIGINT is handled here, if
it was handled by Python's own handler. It looks at the stack: in the midst of a step of the data plane it
only notes that Ctrl-C came. Whatever waits there looks at the note many times a second and raises; a step
that does not wait is over in microseconds, and the signal, sent again until it is heard, raises after it.
That costs nothing until Ctrl-C is pressed.

Programs with a handler of their own keep it. One that raises may break the links of this process.

Source: trio's "KeyboardInterrupt protection", which looks at the stack as well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import get_ident
from types import FrameType
from typing import TypeVar

from dist2.clock import monotonic_ns, remaining_s
from dist2.completion import Completion
from dist2.worker import Worker

_PATIENT = tuple(
    f"dist2.{name}."
    for name in (
        *("backends.socket", "runner", "lane", "turns"),
        *("work", "completion", "coalescing", "ctrl_c"),
    )
)
"""Modules in which Ctrl-C waits: those that change what several threads or groups share."""
_CALLERS = ("dist2.collectives.", "dist2.point_to_point.")
"""Modules that call steps in C, which have no frames: Ctrl-C waits in whatever these call."""
_IMPATIENT = ("dist2.store.", "dist2.rendezvous.")
"""Modules that may be called from those, wait for long, and stay in order whatever raises."""

_AGAIN_S = 0.002
_LONGEST_S = 2.5
"""How long Ctrl-C is put off at most, in seconds, whatever the main thread is doing."""
SLICE_NS = 50_000_000
"""How long a wait may last that does not look whether Ctrl-C came."""

Result = TypeVar("Result")


class CtrlC:
    """What became of SIGINT in this process.

    Attributes:
        pending: It came, and has not been raised yet.
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
        if _is_in_a_step(frame) and not (self.pending and now - self._since > _LONGEST_S):
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
        """In a forked child: what came was for the parent."""
        self.pending = False
        self._main = threading.main_thread().ident

    def look(self) -> None:
        """Raise if Ctrl-C came: for the main thread, between two steps. Ask `pending` first, which is cheap.

        Raises:
            KeyboardInterrupt: It came.
        """
        if self.pending and get_ident() == self._main:
            self.pending = False
            raise KeyboardInterrupt


def _is_in_a_step(frame: FrameType | None) -> bool:
    """Whether the innermost module that minds is one where Ctrl-C waits; it waits in all destructors."""
    answer: bool | None = None
    innermost = frame
    while frame is not None:
        name = frame.f_globals.get("__name__", "") + "."
        if frame.f_code.co_name == "__del__" or name == "weakref.":
            return True  # what a destructor raises is lost
        if answer is None and name.startswith(_PATIENT + _IMPATIENT):
            answer = name.startswith(_PATIENT)
        elif answer is None and name.startswith(_CALLERS) and frame is not innermost:
            answer = True
        frame = frame.f_back
    return bool(answer)


def await_end(future: Future[Result] | Completion, deadline_ns: int) -> bool:
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


ctrl_c = CtrlC()
"""The one of this process."""

os.register_at_fork(after_in_child=ctrl_c.forget)
