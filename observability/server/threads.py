"""Calls that wait for others, off the event loop: on daemon threads, which the end of the program ends.

The threads of asyncio's default executor are joined when the interpreter exits: a rank would not end as long
as other ranks and pages ask it. The number of threads is bounded by that of the connections (`MAX_CLIENTS`).
"""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

GZIP_LEVEL = 3
"""Metrics take half of the time of level 4, and become no larger."""


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


class Heavy:
    """Answers that take the interpreter for long: made on a thread, one at a time, one for equal requests.

    So the event loop goes on answering probes, however many clients ask for dumps.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: dict[Hashable, asyncio.Task[bytes]] = {}

    async def __call__(self, make: Callable[..., bytes], *arguments: Hashable, zipped: bool = False) -> bytes:
        """Return the result of a function, compressed on demand."""
        key = (make, arguments, zipped)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.ensure_future(self._made(make, arguments, zipped))
            running.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(running)

    async def _made(self, make: Callable[..., bytes], arguments: tuple[Hashable, ...], zipped: bool) -> bytes:
        def made() -> bytes:
            body = make(*arguments)
            return gzip.compress(body, GZIP_LEVEL) if zipped else body

        async with self._turn:
            return await on_thread(made)


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
