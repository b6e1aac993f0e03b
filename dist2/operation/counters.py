# cython: annotation_typing=False, boundscheck=False, wraparound=False
"""Listeners: `Entering` notes operations that begin, `Counting` and `Tallying` count those that ended.

They handle what is usual, at every operation, without a Python call. The rest is left to a method of the
instrument, ``rare``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cython.cimports.dist2.operation.interpreter import bits_of

from dist2.operation.record import Listener, Operation
from dist2.runtime.built import check_built

if TYPE_CHECKING:
    from dist2.operation.signature import Signature

check_built(__name__, __file__)

SUM_NS, BYTES, MAX_NS, LAST_SEQ, PLACES = 64, 65, 66, 68, 69
"""Places in `Counters`, as in observability/metrics.py; the first are durations, by the number of bits."""

MOST_FRESH, MOST_SIGNATURES = 64, 4096
"""Limits on signatures without labels, and on all, before the instrument handles them."""

VALUE_BITS = 62
VALUE_END = 1 << 62
"""Numbers are unbounded, as in Python: each is ``carry * VALUE_END + value``."""

Rare = Callable[[Operation], None]


class Counters:
    """The numbers of one series: a list of `PLACES` integers, all 0 at first."""

    _values: Any
    _carries: Any

    def __len__(self) -> int:
        return PLACES

    def __iter__(self) -> Iterator[int]:
        return iter([self._number(place) for place in range(PLACES)])

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < PLACES:
            raise IndexError(f"place {place} of {PLACES}")
        return self._number(place)

    def __setitem__(self, place: int, number: int) -> None:
        if not 0 <= place < PLACES:
            raise IndexError(f"place {place} of {PLACES}")
        self._carries[place], self._values[place] = number >> VALUE_BITS, number % VALUE_END

    def _number(self, place: int) -> int:
        """Return a number without a check of its place: a scrape reads all numbers of all series."""
        carry: int = self._carries[place]  # 0, for most
        return (carry << VALUE_BITS) + int(self._values[place]) if carry else int(self._values[place])

    def add(self, counters: Counters) -> None:
        """Add others' counts, in one step; of the longest durations and the last numbers the larger stay."""
        if not isinstance(counters, Counters):
            raise TypeError(f"counters must be Counters, got {counters!r}")
        for place in range(PLACES):
            number, other = self[place], counters[place]
            self[place] = max(number, other) if place in (MAX_NS, LAST_SEQ) else number + other

    def _grow(self, place: int, amount: int) -> None:
        """Add less than `VALUE_END`."""
        self._values[place] += amount
        if self._values[place] >= VALUE_END:
            self._values[place] -= VALUE_END
            self._carries[place] += 1

    def _count(self, operation: Operation, nbytes: int) -> bool:
        """Add an operation that succeeded; False, with nothing done, if a value is implausible."""
        elapsed = operation.finished_ns - operation.created_ns - 1
        if not (0 <= elapsed < VALUE_END and 0 <= nbytes < VALUE_END and operation.seq < VALUE_END):
            return False
        self._grow(bits_of(elapsed), 1)
        self._grow(SUM_NS, elapsed)
        self._grow(BYTES, nbytes)
        if elapsed > self._values[MAX_NS] and not self._carries[MAX_NS]:
            self._values[MAX_NS] = elapsed
        self._values[LAST_SEQ] = operation.seq
        return True


class Entering(Listener):
    """Notes operations that begin.

    Args:
        in_flight: Gets them.
    """

    def __init__(self, in_flight: set[Operation]) -> None:
        self._in_flight = in_flight

    def hear(self, operation: Operation) -> int:
        """Note an operation."""
        self._in_flight.add(operation)
        return 0


class Counting(Listener):
    """Counts operations that ended.

    Args:
        in_flight: Operations are removed from it.
        by_signature: The counters. A new signature gets new `Counters`.
        rare: Called with operations that failed, and with operations of new signatures if there are many
            already.
        fresh: Gets signatures with their new counters, which have no labels yet.
    """

    def __init__(
        self,
        in_flight: set[Operation],
        by_signature: dict[Signature, Counters],
        rare: Rare,
        fresh: list[tuple[Signature, Counters]],
    ) -> None:
        self._in_flight = in_flight
        self._by_signature = by_signature
        self._rare = rare
        self._fresh = fresh

    def hear(self, operation: Operation) -> int:
        """Count an operation."""
        self._in_flight.discard(operation)
        signature = operation.signature
        counters = self._counters_of(signature) if operation.error is None else None
        if counters is None or not counters._count(operation, signature.nbytes):
            self._rare(operation)
        return 0

    def _counters_of(self, signature: Signature) -> Counters | None:
        """Return the counters of a signature, made if it is new; None if the instrument has to sort first."""
        counters = self._by_signature.get(signature)
        if counters is not None:
            return counters
        if len(self._fresh) < MOST_FRESH and len(self._by_signature) < MOST_SIGNATURES:
            counters = Counters()
            self._by_signature[signature] = counters
            self._fresh.append((signature, counters))
        return counters


class Tally:
    """A count.

    Attributes:
        count: 0 at first.
    """

    count: int


class Tallying(Listener):
    """Counts messages.

    Args:
        kinds: Values of `signature.kind` that are messages.
        by_signature: The tallies.
        rare: Called with operations that failed, and with messages without a `Tally`.
    """

    def __init__(self, kinds: tuple[object, ...], by_signature: dict[Signature, Tally], rare: Rare) -> None:
        self._kinds = kinds
        self._by_signature = by_signature
        self._rare = rare

    def hear(self, operation: Operation) -> int:
        """Count a message that succeeded, if it is one."""
        if operation.error is None:
            kind = operation.signature.kind
            for each in self._kinds:
                if each is kind:
                    break
            else:
                return 0
            tally: Tally | None = self._by_signature.get(operation.signature)
            if tally is not None:
                tally.count += 1
                return 0
        self._rare(operation)
        return 0
