"""`ask_each`: one request to each of several ranks, several at a time, in threads.

The calling thread takes part: most of the calls about a large job are for two to four ranks, and a thread
takes about as long to start as a request to be answered. The others are daemon threads:
`concurrent.futures` joins its own when the interpreter exits, so that a rank would not end before ranks that
do not answer have used up their time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
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
    left, answers, errors = deque(asked), dict[Rank, Answer](), list[BaseException]()

    def take() -> tuple[Rank] | None:
        try:
            return (left.popleft(),)
        except IndexError:
            return None

    def work() -> None:
        try:
            while (rank := take()) is not None:
                answers[rank[0]] = ask(*rank)
        except BaseException as error:
            left.clear()
            errors.append(error)
            if threading.current_thread() is caller:
                raise

    caller = threading.current_thread()
    threads = [
        threading.Thread(target=work, name=f"dist2-ask-{number}", daemon=True)
        for number in range(1, min(at_once, len(asked)))
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {rank: answers[rank] for rank in asked}
