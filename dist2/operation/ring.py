# cython: annotation_typing=False
"""`Ring`: the operations begun last. Of a watched group it also keeps the last ones that others displaced."""

from __future__ import annotations

from typing import Any

from dist2.operation.record import Listener, Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.built import check_built

check_built(__name__, __file__)


class Ring(Listener):
    """The operations begun last, and the last ones of each watched group.

    One ring for all groups would hold none of a group that is seldom used, as soon as a busy group has filled
    it. So an operation that a later one displaces goes into a smaller ring of its group. That costs nothing
    until the ring is full, and then a look-up.

    Args:
        capacity: How many of all groups.
        kept: How many displaced ones of each watched group.
    """

    def __init__(self, capacity: int, kept: int) -> None:
        if capacity < 1 or kept < 0:
            raise ValueError(f"capacity must be at least 1 and kept at least 0, got {capacity} and {kept}")
        self._slots: list[Operation] = []
        self._capacity = capacity
        self._next = 0
        self._kept = kept
        self._last_group: GroupInfo | None = None
        self._last_tail: Ring | None = None
        self._tails: dict[GroupInfo, Ring] = {}

    def hear(self, operation: Operation) -> int:
        """Add an operation."""
        displaced = self._push(operation)
        if displaced is not None and self._kept:
            tail = self._tail_of(displaced)
            if tail is not None:
                tail._push(displaced)
        return 0

    def _tail_of(self, operation: Operation) -> Ring | None:
        """Return the ring of an operation's group; mostly it is the same one again."""
        group = operation.signature.group
        if group is not self._last_group:
            self._last_group, self._last_tail = group, self._tails.get(group)
        return self._last_tail

    def _push(self, operation: Operation) -> Operation | None:
        """Add an operation; return the displaced one, or None."""
        displaced: Operation | None = None
        if len(self._slots) < self._capacity:
            self._slots.append(operation)
        else:
            displaced = self._slots[self._next]
            self._slots[self._next] = operation
        self._next = 0 if self._next + 1 == self._capacity else self._next + 1
        return displaced

    @property
    def is_full(self) -> bool:
        """Whether earlier operations may have been displaced."""
        return len(self._slots) == self._capacity

    def recent(self) -> list[Operation]:
        """Return the operations begun last, in order."""
        made: list[Any] = [None] * len(self._slots)  # which may collect garbage: other threads may run
        first = self._next if len(self._slots) == self._capacity else 0
        for index in range(len(made)):
            made[index] = self._slots[(first + index) % self._capacity]
        return made

    def displaced(self) -> list[Operation]:
        """Return earlier operations of the watched groups, group by group, in order."""
        return [each for tail in list(self._tails.values()) for each in tail.recent()]

    def recorded(self) -> list[Operation]:
        """Return all, each once: the displaced ones, then the last ones of all groups."""
        recent = self.recent()  # first: one that is displaced meanwhile is in both lists, and not in none
        return list(dict.fromkeys([*self.displaced(), *recent]))

    def watch(self, group: GroupInfo) -> None:
        """Keep displaced operations of a group."""
        self._last_group = self._last_tail = None
        if self._kept and group not in self._tails:
            self._tails[group] = Ring(self._kept, 0)

    def forget(self, group: GroupInfo) -> None:
        """Keep none of them any more."""
        self._last_group = self._last_tail = None
        self._tails.pop(group, None)

    def replace(self, old: Operation, new: Operation) -> bool:
        """Put an operation in the place of another; return whether that was there."""
        if self._put(old, new):
            return True
        tail = self._tail_of(old)
        return tail is not None and bool(tail._put(old, new))

    def _put(self, old: Operation, new: Operation) -> bool:
        for index, each in enumerate(self._slots):
            if each is old:
                self._slots[index] = new
                return True
        return False

    def clear(self) -> None:
        """Forget all operations and groups."""
        self._slots, self._next = [], 0
        self._last_group = self._last_tail = None
        self._tails.clear()
