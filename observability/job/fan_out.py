"""`ask_each`: one request to each of several ranks, in few threads while the ranks are well.

Most requests about a large job are for a dozen ranks that answer at once: a thread takes about as long to
start as such a request, and threads of one interpreter that wait for each other take longer. So two threads
begin, and others join, as many as there are, each `PATIENCE_S` while requests are left: ranks that do not
answer delay the requests to the others by that.

The threads are daemons: `concurrent.futures` joins its own when the interpreter exits, so that a rank would
not end before ranks that do not answer have used up their time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

AT_FIRST = 2
"""Number of requests at a time at first."""
PATIENCE_S = 0.2
"""After which further threads join, and again."""
AT_ONCE = 16
"""Number of requests at a time at most. A request waits for its answer, so there are more than cores."""

Rank = TypeVar("Rank")
Answer = TypeVar("Answer")


def ask_each(
    ranks: Iterable[Rank],
    ask: Callable[[Rank], Answer],
    at_once: int = AT_ONCE,
) -> dict[Rank, Answer]:
    """Return the result of a function for each rank. Exceptions of the function are raised."""
    asked = list(ranks)
    if len(asked) == 1:
        return {asked[0]: ask(asked[0])}
    left, answers, errors = deque(asked), dict[Rank, Answer](), list[BaseException]()

    def work() -> None:
        try:
            while left:
                try:
                    rank = left.popleft()
                except IndexError:  # another thread has taken it
                    return
                answers[rank] = ask(rank)
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            left.clear()
            errors.append(error)

    threads: list[threading.Thread] = []
    while left and len(threads) < at_once:
        for _ in range(min(max(AT_FIRST, len(threads)), at_once - len(threads), len(left))):
            threads.append(threading.Thread(target=work, name=f"dist2-ask-{len(threads)}", daemon=True))
            threads[-1].start()
        threads[0].join(PATIENCE_S)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {rank: answers[rank] for rank in asked}
