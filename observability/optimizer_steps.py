"""Ends of the steps of all optimizers of this process, while a control plane watches."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from time import monotonic_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

KEPT = 4096


class OptimizerSteps:
    """Counts steps by torch's hook for all optimizers: less than a microsecond a step."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._count = 0
        self._watchers = 0
        self._handle: RemovableHandle | None = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Begin to count; `ignore` as often ends it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        with self._lock:
            self._watchers += 1
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(self.ended)

    def ignore(self) -> None:
        """Undo a `watch`."""
        with self._lock:
            self._watchers -= 1
            if not self._watchers and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def ended(self, *_: object) -> None:
        """Count a step that ends now."""
        self._count += 1
        self._ends.append((monotonic_ns(), self._count))

    def known(self) -> list[tuple[int, int]]:
        """Return the monotonic nanosecond of the end of each of the last steps, and its number."""
        return list(self._ends)


def step_at(known: list[tuple[int, int]], at_ns: int) -> int:
    """Return the number of the step that ended last before a monotonic nanosecond; 0 before the first one.

    Args:
        known: As `OptimizerSteps.known` returns it.
        at_ns: That time.
    """
    place = bisect_right(known, at_ns, key=itemgetter(0))
    return known[place - 1][1] if place else 0


optimizer_steps = OptimizerSteps()
"""Those of this process."""
