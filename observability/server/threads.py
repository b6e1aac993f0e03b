"""Calls that wait for others, off the event loop: on daemon threads, which the end of the program ends.

The threads of asyncio's default executor are joined when the interpreter exits: a rank would not end as long
as other ranks and pages ask it. The number of threads is bounded by that of the connections (`MAX_CLIENTS`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


def on_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Call a function on a thread of its own; the future gets its result, or its exception."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # None only with an error
        else:
            future.set_exception(error)

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = function(*arguments), None
        except BaseException as error:  # noqa: BLE001 - for the coroutine that waits
            outcome = None, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, *outcome)

    threading.Thread(target=run, name="dist2-answer", daemon=True).start()
    return future


class Together(Generic[T]):
    """One call for all that ask while it runs, so that they wait without a thread each.

    Args:
        function: Called on a thread.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        self._function = function
        self._running: dict[Hashable, asyncio.Future[T]] = {}

    async def __call__(self, *arguments: Hashable) -> T:
        """Return the result of the call with these arguments."""
        running = self._running.get(arguments)
        if running is None:
            running = self._running[arguments] = on_thread(self._function, *arguments)
            running.add_done_callback(lambda _: self._running.pop(arguments))
        return await asyncio.shield(running)
