"""The content of a store, in memory: keys with values, and queues. Pure; callers bring locks and waiting.

Signal handlers may interrupt a method, and change the table by another one, wherever a function begins or has
returned. So no function is called between the reading of a value and the change that depends on it.
"""

from __future__ import annotations

import re
from collections import deque

from dist2.errors import InvalidUsageError

_INTEGER = re.compile(rb"\s*[+-]?\d{1,4000}\s*")
_INT64 = range(-(1 << 63), 1 << 63)


def counted(key: bytes, value: bytes, amount: int) -> int:
    """Return the new value of a counter that has ``value``.

    Raises:
        InvalidUsageError: ``value`` is no decimal integer, or the sum does not fit 64 bits.
    """
    if _INTEGER.fullmatch(value) is None:
        raise InvalidUsageError(f"add: key {_name(key)} holds {value[:40]!r}, not an integer")
    total = int(value) + amount
    if total not in _INT64:
        raise InvalidUsageError(f"add: key {_name(key)} would become {total}, which does not fit 64 bits")
    return total


def _name(key: bytes) -> str:
    return repr(key.decode(errors="surrogateescape"))


class Table:
    """Keys with values, and queues, which live in a space of their own."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}

    def __len__(self) -> int:
        """How many keys there are; queues do not count, as in torch."""
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        """Whether a wait for the key ends: it has a value, or a queue of that name has an item."""
        return key in self._values or bool(self._queues.get(key))

    def keys(self) -> tuple[bytes, ...]:
        """The names of all keys."""
        return tuple(self._values)

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, or None."""
        return self._values.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        """Give a key a value."""
        self._values[key] = value

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set a key if its value is ``expected``; return its value afterwards.

        A missing key is set only when ``expected`` is empty, and otherwise reported as ``expected``, as in
        torch.
        """
        values = self._values
        if key not in values and expected:
            return expected
        if key not in values or values[key] == expected:
            values[key] = desired
            return desired
        return values[key]

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter, which starts at 0; return its new value.

        Raises:
            InvalidUsageError: The key holds no integer, or the sum does not fit 64 bits.
        """
        values = self._values
        while True:
            held = values.get(key)
            total = counted(key, b"0" if held is None else held, amount)
            if (values[key] if key in values else None) is held:  # noqa: SIM401 - `get` is a function
                values[key] = b"%d" % total
                return total

    def append(self, key: bytes, value: bytes) -> None:
        """Lengthen a value, which starts empty."""
        values = self._values
        values[key] = values[key] + value if key in values else value

    def delete(self, key: bytes) -> bool:
        """Remove a key; return whether there was one. Queues stay, as in torch."""
        return self._values.pop(key, None) is not None

    def push(self, key: bytes, value: bytes) -> None:
        """Put an item at the end of a queue."""
        self._queues.setdefault(key, deque()).append(value)

    def pop(self, key: bytes) -> bytes | None:
        """Take the first item of a queue; None where it is empty."""
        queue = self._queues.get(key)
        if not queue:  # an empty one remains if a signal handler raised below, or in `push`
            return None
        item = queue.popleft()
        if not queue:
            del self._queues[key]
        return item

    def queue_length(self, key: bytes) -> int:
        """Return how many items a queue has."""
        return len(self._queues.get(key, ()))
