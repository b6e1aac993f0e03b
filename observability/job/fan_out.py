"""`ask_each`: one request to each of several ranks, in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 16
"""Number of requests at a time. A request waits for its answer, so there are more than cores."""

Rank = TypeVar("Rank")
Answer = TypeVar("Answer")


def ask_each(
    ranks: Iterable[Rank], ask: Callable[[Rank], Answer], at_once: int = AT_ONCE
) -> dict[Rank, Answer]:
    """Return the result of a function for each rank. Exceptions of the function are raised."""
    asked = list(ranks)
    if not asked:
        return {}
    with ThreadPoolExecutor(min(at_once, len(asked)), thread_name_prefix="dist2-ask") as pool:
        return dict(zip(asked, pool.map(ask, asked), strict=True))
