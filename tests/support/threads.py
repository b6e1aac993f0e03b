"""Functions called at once, each on a thread of its own: ranks that are threads, say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from support.time_limits import blamed, failure, verdict

LIMIT_S = 40.0


def together(*bodies: Callable[[], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """Return the results of some functions, or raise the first failure: see `blamed`."""
    results, failures = _call(bodies, limit_s)
    if failures:
        raise blamed(failures)
    return results


def ends_of(*bodies: Callable[[], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """Return the result or the exception of each of some functions."""
    return _call(bodies, limit_s)[0]


def _call(bodies: tuple[Callable[[], Any], ...], limit_s: float) -> tuple[list[Any], list[BaseException]]:
    """Return the result or the exception of each function, and the exceptions in the order of time."""
    results: list[Any] = [None] * len(bodies)
    failures: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:  # noqa: BLE001 - reported to the test
            results[index] = error
            failures.append(error)

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [index for index, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        about = f"stuck: functions {stuck}"
        raise failure(about, *map(verdict, failures)) from (failures[0] if failures else None)
    return results, failures
