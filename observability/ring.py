"""`PythonRing`: the operations begun last, and the last ones of each group; `records.Ring` is the same in C.

One ring for all groups would hold none of a group that is seldom used, as soon as a busy group has filled it.
So an operation that a later one displaces goes into a smaller ring of its group. That costs nothing until
the ring is full, and then a look-up.
"""

from __future__ import annotations

from collections import deque

from dist2.operation.signature import GroupInfo, Operation


class PythonRing:
    """The operations begun last.

    Args:
        capacity: How many of all groups.
        kept: How many displaced ones of each watched group.
    """

    def __init__(self, capacity: int, kept: int) -> None:
        self._recent: deque[Operation] = deque()
        self._capacity = capacity
        self._kept = kept
        self._tails: dict[GroupInfo, deque[Operation]] = {}

    def __call__(self, operation: Operation) -> None:
        """Add an operation."""
        if len(self._recent) >= self._capacity:
            displaced = self._recent.popleft()
            tail = self._tails.get(displaced.signature.group)
            if tail is not None:
                tail.append(displaced)
        self._recent.append(operation)

    @property
    def is_full(self) -> bool:
        """Whether earlier operations may have been displaced."""
        return len(self._recent) >= self._capacity

    def recent(self) -> list[Operation]:
        """Return the operations begun last, in order."""
        return list(self._recent)

    def displaced(self) -> list[Operation]:
        """Return earlier operations of the watched groups, group by group, in order."""
        return [operation for tail in list(self._tails.values()) for operation in list(tail)]

    def watch(self, group: GroupInfo) -> None:
        """Keep displaced operations of a group."""
        self._tails.setdefault(group, deque(maxlen=self._kept))

    def forget(self, group: GroupInfo) -> None:
        """Keep none of them any more."""
        self._tails.pop(group, None)

    def replace(self, old: Operation, new: Operation) -> bool:
        """Put an operation in the place of another; return whether that was there."""
        for held in (self._recent, self._tails.get(old.signature.group, ())):
            for index, operation in enumerate(held):
                if operation is old:
                    held[index] = new  # type: ignore[index]  # an empty tuple has no operation
                    return True
        return False

    def clear(self) -> None:
        """Forget all operations and groups."""
        self._recent.clear()
        self._tails.clear()
