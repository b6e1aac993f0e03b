"""`Batch`: the operations of a coalescing block, issued together at its end; `BatchWork`: their one Work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

from dist2.operation.work import Work
from dist2.runtime.completion import Completion
from dist2.runtime.signals import OnCtrlC, on_ctrl_c

Start = Callable[[], None]
Drop = Callable[[BaseException], None]


@on_ctrl_c(OnCtrlC.DEFER)
class Batch:
    """The operations of one block, of the thread that opened it.

    They start at the end of the block, in the order given: point-to-point ones without waiting for each
    other, so that a ring of sends and receives cannot deadlock.

    Attributes:
        works: The Work of each call in the block; they complete after the block.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._starts: list[Start] = []
        self._drops: list[Drop] = []

    def add(self, work: Work, start: Start, drop: Drop) -> Work:
        """Add an operation, with functions that start it and that fail it without a start."""
        self.works.append(work)
        self._starts.append(start)
        self._drops.append(drop)
        return work

    def issue(self) -> None:
        """Start all operations, in order; where one cannot start, waiting for it or for later ones raises."""
        for number, start in enumerate(self._starts):
            try:
                start()
            except BaseException as error:
                self.abandon(error, number)
                raise

    def abandon(self, error: BaseException, first: int = 0) -> None:
        """Start no operation from the first one on: waiting for one raises ``error``."""
        for work, drop in zip(self.works[first:], self._drops[first:], strict=True):
            if not work.is_completed():
                drop(error)

    def when_done(self, done: Completion) -> None:
        """Complete a future once all operations are done, with the first error if any."""
        lock, waiting = threading.Lock(), len(self.works)

        def one_done() -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                if waiting:
                    return
            errors = (work.exception() for work in self.works)
            failed = next((error for error in errors if error is not None), None)
            if failed is None:
                done.set_result(None)
            else:
                done.set_exception(failed)

        for work in self.works:
            work.add_done_callback(one_done)

    def help(self, deadline_ns: int) -> None:
        """Run queued operations of the batch in this thread, where that makes them complete earlier."""
        for work in self.works:
            helper = work.helper
            if helper is not None:
                helper(deadline_ns)

    def wait(self) -> None:
        """Wait for all operations."""
        for work in self.works:
            work.wait()

    def __await__(self) -> Generator[Any, Any, None]:
        """Wait for all operations in a task of asyncio or trio, as `Work` does for one."""
        return self._awaited().__await__()

    async def _awaited(self) -> None:
        for work in self.works:
            await work


class BatchWork(Work):
    """One Work for all operations of a batch, which has some; as c10d has it for a coalescing block."""

    def __init__(self, batch: Batch) -> None:
        done = Completion()
        outputs = [tensor for work in batch.works for tensor in work.outputs]
        super().__init__(batch.works[-1].operation, outputs, done)
        self._batch = batch
        self.helper = batch.help
        batch.when_done(done)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for each operation, as its own Work does: on a stream of a device, that blocks no thread."""
        if timeout:
            return super().wait(timeout)
        self._batch.wait()
        return True
