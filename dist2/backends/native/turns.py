"""Running operations of an asynchronous library: collectives one after the other, the rest beside them.

An operation is a generator of *steps*: it stages its tensors, starts something native and yields it;
it is resumed when that is done, puts the results in place, and may start more. `QueueState` drives such
generators from whatever thread completes their steps, and completes one future each.

Collectives take turns, although a library could overlap some: staging reads a tensor when the
operation's turn has come, so the results are those of the order of the calls.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Protocol

import attrs

from dist2.backends.native.waiters import Waiters
from dist2.errors import Dist2Error
from dist2.operation import Operation

Done = Callable[[BaseException | None], None]


class Native(Protocol):
    """Something that a library has started."""

    def when_done(self, done: Done, waiters: Waiters) -> None:
        """Call ``done`` once, from any thread, with the error if it failed."""


Steps = Generator[Native, None, None]
Translate = Callable[[BaseException, Operation], BaseException]
"""QueueState a library's error into one of dist2's."""


@attrs.define(eq=False)
class _Turn:
    """An operation under way."""

    operation: Operation
    steps: Steps
    future: Future[None]
    in_line: bool
    error: BaseException | None = None


class QueueState:
    """Drives the operations of one group.

    Attributes:
        broken: What every operation raises from now on; None while the group works.
    """

    def __init__(self, name: str, translate: Translate) -> None:
        self.broken: Dist2Error | None = None
        self._translate = translate
        self._waiters = Waiters(f"dist2-wait-{name}")
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._line: deque[_Turn] = deque()
        self._line_busy = False
        self._open: set[Future[None]] = set()
        self._under_way = 0

    def in_order(self, operation: Operation, steps: Steps) -> Future[None]:
        """Run a collective after those issued before."""
        turn = self._new(operation, steps, in_line=True)
        with self._lock:
            self._line.append(turn)
            if self._line_busy:
                return turn.future
            self._line_busy = True
        self._run_line()
        return turn.future

    def beside(self, operation: Operation, steps: Steps) -> Future[None]:
        """Run a point-to-point operation now."""
        turn = self._new(operation, steps, in_line=False)
        self._advance(turn)
        return turn.future

    def _new(self, operation: Operation, steps: Steps, in_line: bool) -> _Turn:
        with self._lock:
            if self.broken is not None:
                raise self.broken
            turn = _Turn(operation, steps, Future(), in_line)
            self._open.add(turn.future)
            self._under_way += 1
        return turn

    # Driving

    def _run_line(self) -> None:
        """Run turns of the line until one is left waiting for its library, or none is left."""
        while True:
            with self._lock:
                if not self._line:
                    self._line_busy = False
                    return
                turn = self._line.popleft()
            if not self._advance(turn):
                return

    def _resume(self, turn: _Turn) -> None:
        """Go on after a native step, in the thread that completed it."""
        if self._advance(turn) and turn.in_line:
            self._run_line()

    def _advance(self, turn: _Turn) -> bool:
        """Run an operation's steps; False if it waits for one, whose completion will resume it."""
        while True:
            try:
                native = self._next_step(turn)
            except BaseException as error:  # noqa: BLE001 - delivered to whoever waits
                self._end(turn, self._translate(error, turn.operation))
                return True
            if native is None:
                self._end(turn, None)
                return True
            # The step may end at once, even inside `when_done`: whoever comes second goes on.
            arrivals = itertools.count()

            def done(error: BaseException | None, arrivals: itertools.count[int] = arrivals) -> None:
                turn.error = error
                if next(arrivals):
                    self._resume(turn)

            native.when_done(done, self._waiters)
            if not next(arrivals):
                return False

    def _next_step(self, turn: _Turn) -> Native | None:
        if turn.error is not None:
            raise turn.error
        if self.broken is not None:  # its caller was told; nothing may touch its tensors any more
            turn.steps.close()
            return None
        return next(turn.steps, None)

    def _end(self, turn: _Turn, error: BaseException | None) -> None:
        turn.steps.close()
        with self._lock:
            mine = turn.future in self._open
            self._open.discard(turn.future)
            self._under_way -= 1
            self._quiet.notify_all()
        if not mine:
            return
        if error is None:
            turn.future.set_result(None)
        else:
            turn.future.set_exception(error)

    # The end

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything issued is done; False if that took longer than ``timeout_s``."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._under_way, timeout_s)

    def break_off(self, error: Dist2Error) -> None:
        """Fail what is pending, and everything later. What the library has started it may still finish."""
        with self._lock:
            if self.broken is None:
                self.broken = error
            pending = list(self._open)
            self._open.clear()
            self._under_way -= len(self._line)
            self._line.clear()
            self._quiet.notify_all()
        for future in pending:
            future.set_exception(error)
        self._waiters.stop()

    def wait_quiet(self) -> None:
        """Wait until the library has finished what it had started, however that went."""
        with self._lock:
            self._quiet.wait_for(lambda: not self._under_way)
