"""A backend as a parameter of tests, and ranks as threads to run them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from dist2.group.creation import new_group
from dist2.group.process_group import ProcessGroup
from dist2.runtime.deadline import deadline_in, remaining_s
from dist2.store import HashStore

JOIN_S = 50.0


class RankFailed(AssertionError):  # noqa: N818 - a failed assertion, on another thread
    """A rank raised; the cause is the exception of the rank that failed first."""


@attrs.frozen
class BackendCase:
    """A backend and its options: a parameter of the tests.

    Attributes:
        name: Shown in the test's id.
        backend: Name for `new_group`.
        options: Options for it, the same on all ranks.
        bitwise: Its reductions add in rank order, so that results can be compared exactly.
        complete: It takes every dtype with every reduction that makes sense.
        p2p: It has point-to-point operations.
        compares_exchanges: Its ranks compare the sizes of `all_to_all`, as they do in a control group.
    """

    name: str
    backend: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    bitwise: bool = False
    complete: bool = False
    p2p: bool = True
    compares_exchanges: bool = True

    def __str__(self) -> str:
        return self.name

    def run(
        self, world_size: int, body: Callable[[ProcessGroup], Any], *, timeout: float = 20.0
    ) -> list[Any]:
        """Call ``body(pg)`` on ``world_size`` threads, each a rank of one new group; return their results.

        Groups are shut down after the body, and aborted where it raised, so that other ranks do not wait.

        Args:
            world_size: Number of ranks.
            body: Called with the group of each rank.
            timeout: Limit of the group's operations, in seconds.

        Raises:
            RankFailed: A rank raised or did not end; from the exception of the rank that failed first.
        """
        store, results = HashStore(), [None] * world_size
        failures: list[tuple[float, int, BaseException]] = []

        def rank_main(rank: int) -> None:
            torch.set_num_threads(1)
            place: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
            try:
                with new_group(self.backend, timeout, **place, **self.options) as pg:
                    results[rank] = body(pg)
            except BaseException as error:  # noqa: BLE001 - raised in the test's thread
                failures.append((time.monotonic(), rank, error))

        _join([threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)])
        if failures:
            _, rank, error = min(failures, key=lambda failure: failure[0])
            raise RankFailed(f"rank {rank}: {error!r}") from error
        return results


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    deadline_ns = deadline_in(JOIN_S)
    for thread in threads:
        thread.join(remaining_s(deadline_ns))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        raise RankFailed(f"ranks {stuck} did not end within {JOIN_S:g} s")
