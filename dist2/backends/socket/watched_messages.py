"""Messages that another library moves, watched over a group's links.

The library may neither notice a death nor know a deadline, and may make progress only when it is called. So
the thread that waits for a message polls it and the links (`WatchedMessage.help`). A thread of the group
(`Progress`) does so for messages that no caller waits for.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import attrs

from dist2.backends.socket.outside import Outside, peers_of
from dist2.errors import Dist2Error, OperationTimeoutError
from dist2.operation.execution import Helped
from dist2.operation.record import Operation
from dist2.runtime.completion import Completion
from dist2.runtime.resources import scarce_resources
from dist2.runtime.threads import Worker

IDLE_S = 2.0
"""How long an idle thread stays for the next message."""


class WatchedMessage(Helped, ABC):
    """A message under way.

    Args:
        outside: The control links.
        operation: Its operation.
    """

    def __init__(self, outside: Outside, operation: Operation) -> None:
        self.operation = operation
        self._outside = outside
        self._lock = threading.Lock()
        self._is_over = False
        self._done = Completion()

    @abstractmethod
    def _advance(self) -> bool:
        """Make progress; return whether it has succeeded. Raises its error."""

    @abstractmethod
    def _give_up(self) -> None:
        """Stop it as far as the library can."""

    def _wait(self, until_ns: int) -> None:
        """Poll it until it is over; see `Outside.wait`."""
        self._outside.wait(self.poll, until_ns, peers_of(self.operation))

    def poll(self) -> bool:
        """Make progress; return whether it is over, successfully or not."""
        fault: Exception | None = None
        with self._lock:
            if self._is_over:
                return True
            try:
                if not self._advance():
                    return False
            except Exception as error:  # noqa: BLE001 - delivered to those that wait
                fault = error
            self._is_over = True
        self._end(fault)
        return True

    def fail(self, error: BaseException) -> None:
        """Give it up, unless it is over."""
        with self._lock:
            if self._is_over:
                return
            self._give_up()
            self._is_over = True
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    # Called by the group

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        self._done.add_done_callback(lambda _: callback(self))

    def exception(self) -> BaseException | None:
        return self._done.exception()

    def help(self, deadline_ns: int) -> None:
        ends_ns = self.operation.deadline_ns
        try:
            self._wait(min(deadline_ns, ends_ns))
        except OperationTimeoutError as error:
            if deadline_ns >= ends_ns:  # else only this wait has ended
                self.fail(error)
        except Dist2Error as error:
            self.fail(error)
        except BaseException as error:  # an interrupt
            self.fail(error)
            raise


@attrs.define(eq=False)
class Progress:
    """A thread of a group that completes messages; it ends when there were none for a while.

    Args:
        name: The thread's.
        outside: The control links, at which it waits.
        look_ns: Interval between two looks at all messages, unless something wakes the thread.
    """

    _name: str
    _outside: Outside
    _look_ns: int
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _pending: list[WatchedMessage] = attrs.field(factory=list, init=False)
    _thread: Worker | None = attrs.field(default=None, init=False)
    _ends: bool = attrs.field(default=False, init=False)

    def started(self, message: WatchedMessage) -> WatchedMessage | None:
        """Wait for a synchronous message, and return None; have an asynchronous one completed.

        Raises:
            Dist2Error: A synchronous message failed.
        """
        operation = message.operation
        if operation.is_async:
            if not message.poll():
                self._watch(message)
            return message
        message.help(operation.deadline_ns)
        error = message.exception()
        if error is not None:
            raise error
        return None

    def _watch(self, message: WatchedMessage) -> None:
        """Complete a message, unless a thread that waits for it does."""
        with self._changed:
            self._pending.append(message)
            if self._thread is None:
                thread = Worker(self._name, self._run, end=self.stop)
                try:
                    with scarce_resources():
                        thread.start()
                except BaseException:
                    self._pending.pop()  # the caller gets the error
                    raise
                self._thread = thread
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread once nothing is pending."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (soonest := self._soonest()) is not None:
            operation = soonest.operation
            try:
                self._outside.wait(
                    self._look, operation.deadline_ns, peers_of(operation), self._look_ns, is_patient=True
                )
            except OperationTimeoutError as error:
                soonest.fail(error)
            except Dist2Error as error:
                with self._changed:
                    failed = list(self._pending)
                for each in failed:
                    each.fail(error.again(str(error)))

    def _soonest(self) -> WatchedMessage | None:
        """Return the pending message with the earliest deadline; None: the thread has to end."""
        with self._changed:
            self._pending = [each for each in self._pending if not each.poll()]
            if not self._pending and not self._ends:
                self._changed.wait_for(lambda: self._pending or self._ends, IDLE_S)
            if not self._pending:
                self._thread = None
                return None
            return min(self._pending, key=lambda each: each.operation.deadline_ns)

    def _look(self) -> bool:
        """Make progress; return whether the pending messages have changed."""
        with self._changed:
            pending = list(self._pending)
        return sum(each.poll() for each in pending) > 0  # polls all
