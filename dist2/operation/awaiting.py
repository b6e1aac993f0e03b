"""Waits for operations: by a thread, and by a task of asyncio or trio, for which no thread waits.

The thread that completes the operation notifies the task's event loop. A task that is cancelled stops
waiting; the operation goes on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from dist2.errors import InvalidUsageError
from dist2.operation.queue import refuse_to_wait
from dist2.operation.record import Operation
from dist2.runtime.signals import Awaited, OnCtrlC, await_end, on_ctrl_c


@on_ctrl_c(OnCtrlC.DEFER)
def wait_in_thread(
    operation: Operation,
    pending: Awaited,
    helper: Callable[[int], None] | None,
    deadline_ns: int,
) -> bool:
    """Wait until an operation is complete; False if the deadline passes first.

    A Work is compiled. This has a frame, which tells signal handlers that Ctrl-C is to be deferred, and
    instruments that look at threads for which operation they wait.

    Args:
        operation: The operation.
        pending: Its completion.
        helper: Runs it in this thread, until it is done or a deadline passes.
        deadline_ns: When to give up waiting.
    """
    if helper is not None and not pending.done():
        helper(min(deadline_ns, operation.deadline_ns))
    if not pending.done() and not operation.started_ns:
        refuse_to_wait(operation)
    return await_end(pending, deadline_ns)


async def completed(add_done_callback: Callable[[Callable[[], None]], None]) -> None:
    """Wait in the calling task until a callback is called, in whichever thread.

    Args:
        add_done_callback: Takes the callback.

    Raises:
        InvalidUsageError: Neither asyncio nor trio runs in this thread.
    """
    await _waiter(add_done_callback)


async def in_thread(function: Callable[[], None]) -> None:
    """Call a function that blocks in a thread of the event loop's pool, and wait for it."""
    if _asyncio_loop() is not None:
        await asyncio.to_thread(function)
    else:
        await _trio().to_thread.run_sync(function)


def _waiter(add_done_callback: Callable[[Callable[[], None]], None]) -> Awaitable[object]:
    loop = _asyncio_loop()
    if loop is not None:
        future: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not future.done():  # a task that was cancelled has cancelled it
                future.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has been closed since
                loop.call_soon_threadsafe(end)

        add_done_callback(tell)
        return future
    trio = _trio()
    event, token = trio.Event(), trio.lowlevel.current_trio_token()

    def tell_trio() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(event.set)

    add_done_callback(tell_trio)
    awaitable: Awaitable[object] = event.wait()
    return awaitable


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _trio() -> Any:
    """Return trio, which runs in this thread."""
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):
            trio.lowlevel.current_trio_token()
            return trio
    raise InvalidUsageError("await needs a running event loop of asyncio or trio in this thread: use wait()")
