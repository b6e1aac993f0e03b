"""Counters of every operation of this process: always on, cheap to count, rendered when asked.

Counting costs a dictionary look-up and a few additions to a plain list (``docs/metrics.md`` has the
figure); the series of Prometheus are built from the lists at scrape time, in ``exposition.py``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from operator import attrgetter
from time import monotonic_ns
from typing import TYPE_CHECKING

import attrs

from dist2.operation.counters import Counters, Counting, Entering
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from observability.flight_recorder import global_rank
from observability.group_status import Failure, GroupStatusRegistry

if TYPE_CHECKING:
    from dist2.group.process_group import ProcessGroup

OTHER = "(other)"
"""Stands for all groups, or error types, beyond the limit on their number."""

MAX_GROUPS = 64
"""Groups with series of their own; those closed longest ago make room for new ones."""

MAX_ERROR_TYPES = 64
MAX_SIGNATURES = 4096
MAX_LABEL_CHARS = 120

# Places in a series' list of counters. Duration d is counted in place (d - 1).bit_length(), d in
# nanoseconds, so that place b holds 2**(b-1) < d <= 2**b: Prometheus's buckets include their bound.
DURATIONS = 64
SUM_NS, BYTES, MAX_NS, FAILED, LAST_SEQ = range(DURATIONS, DURATIONS + 5)
COUNTERS = LAST_SEQ + 1

SIZES = (0, 64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20, 1 << 30)
"""Payloads are counted under the least of these numbers of bytes that is not smaller."""

LARGER = 1 << 62
"""Stands for all payloads above these."""

WINDOW_NS = 60_000_000_000
WINDOWS = 5
"""The longest operation is that of so many windows. One ends with the first reading after `WINDOW_NS`."""


def size_bucket(nbytes: int) -> int:
    """Return the bound under which a payload of that many bytes is counted: one of `SIZES`, or `LARGER`."""
    place = bisect_left(SIZES, nbytes)
    return SIZES[place] if place < len(SIZES) else LARGER


def size_label(bound: int) -> str:
    """Return a bound as a label, which sorts as a number: ``65536``, or ``+Inf``."""
    return "+Inf" if bound == LARGER else str(bound)


def size_in_words(bound: int) -> str:
    """Return a bound for people to read: ``<=64KiB``."""
    if bound == LARGER:
        return f">{size_in_words(SIZES[-1])[2:]}"
    power = max(0, (bound.bit_length() - 1) // 10)
    return f"<={bound >> 10 * power}{('B', 'KiB', 'MiB', 'GiB')[power]}"


def label_text(text: str) -> str:
    """Return text that any scraper can read: printable, encodable, of bounded length and still unique."""
    if text.isprintable() and len(text) <= MAX_LABEL_CHARS:
        return text
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean[: MAX_LABEL_CHARS - 9]}~{digest}"


GroupKey = tuple[str, str, int]
"""Group, backend, rank in the job."""

ErrorKey = tuple[str, str, str, int, str]
"""Operation, group, backend, rank in the job, type of the error."""


@attrs.frozen(order=True)
class SeriesKey:
    """The labels of one series.

    Attributes:
        op: Modern name of the operation.
        group: Name of its group, or `OTHER`.
        backend: The group's backend.
        rank: The rank in the job that called it.
        world_size: How many ranks its group has.
        size: Bound of the payload's size: see `size_bucket`.
        is_p2p: Whether its sequence numbers are those of point-to-point operations.
    """

    op: str
    group: str
    backend: str
    rank: int
    world_size: int
    size: int
    is_p2p: bool


_ORDER = attrgetter(*(field.name for field in attrs.fields(SeriesKey)))
"""Comparing these tuples is 20 times faster than comparing the keys."""


@attrs.frozen
class Series:
    """The counts under one key, read at one moment.

    Attributes:
        key: The labels.
        durations: How many successful operations took at most ``2**place`` nanoseconds, and more than half.
        total_ns: Their sum, from call to completion.
        longest_ns: The longest of those of the last minutes: see `WINDOWS`.
        nbytes: Payload bytes of the successful operations.
        failed: How many operations failed.
        last_seq: Sequence number of the operation that ended last.
    """

    key: SeriesKey
    durations: tuple[int, ...]
    total_ns: int
    longest_ns: int
    nbytes: int
    failed: int
    last_seq: int

    @classmethod
    def of(cls, key: SeriesKey, counters: Sequence[int], past: Sequence[int] = ()) -> Series:
        """Read a list of counters, already copied.

        Args:
            key: The labels.
            counters: The numbers, by place.
            past: The values at `MAX_NS` at the end of each of the last windows.
        """
        durations = tuple(counters[:DURATIONS])
        succeeded = sum(durations)
        return cls(
            key=key,
            durations=durations,
            total_ns=counters[SUM_NS] + succeeded,  # each was counted a nanosecond short
            longest_ns=_longest(max([counters[MAX_NS], *past]), bool(succeeded and not past)),
            nbytes=counters[BYTES],
            failed=counters[FAILED],
            last_seq=counters[LAST_SEQ],
        )

    @property
    def succeeded(self) -> int:
        """How many operations succeeded."""
        return sum(self.durations)


def _longest(counted_ns: int, any_since_start: bool) -> int:
    """Return the longest duration: each was counted a nanosecond short, and 0 stands for none as well."""
    return counted_ns + 1 if counted_ns or any_since_start else 0


def _waited_ns(group: ProcessGroup) -> int | None:
    """Return the time that a group has waited; None for an object that does not count it."""
    asked = getattr(group, "waited_ns", None)
    return None if asked is None else asked()


class Metrics:
    """An instrument that counts operations, bytes, durations and errors, and knows the operations in flight.

    Counting takes no lock: one addition to a list is atomic under the interpreter lock, and a series
    is seldom touched by two threads. On a free-threaded interpreter a count may be lost.

    Attributes:
        statuses: The groups, and the last failures.

    Examples:
        >>> metrics = observability.Metrics()
        >>> remove = dist2.add_instrument(metrics)
        >>> pg.barrier()
        >>> remove()
        >>> metrics.errors()
        {}
    """

    def __init__(self) -> None:
        self.statuses = GroupStatusRegistry()
        self._in_flight: set[Operation] = set()
        self._discard = self._in_flight.discard
        self._by_signature: dict[Signature, Counters] = {}
        self._fresh: list[tuple[Signature, Counters]] = []  # without labels yet: see `_sort_in`
        self._series: dict[str, dict[SeriesKey, Counters]] = {}  # by the label of their group
        self._past: dict[SeriesKey, deque[int]] = {}  # values at MAX_NS when the last windows ended
        self._window_began_ns = monotonic_ns()
        self._errors: dict[ErrorKey, int] = {}
        self._waited: Counter[GroupKey] = Counter()  # in groups that are closed
        self._labels: dict[str, str] = {}
        self._open: dict[str, int] = {}  # how many groups have a name: ranks that are threads share one
        # Names of the others that have labels, the one closed first before.
        self._closed: dict[str, None] = {}
        self._lock = threading.Lock()
        # The methods below, compiled: they are called before and after every operation. The second one leaves
        # failures to the method.
        self.operation_started = Entering(self._in_flight)  # type: ignore[method-assign]  # in place of the method
        self.operation_finished = Counting(  # type: ignore[method-assign]  # in place of the method
            self._in_flight, self._by_signature, self.operation_finished, self._fresh
        )

    # Instrument

    def group_opened(self, group: ProcessGroup) -> None:
        """Take up a group. Idempotent."""
        name, waited_ns = group.info.name, _waited_ns(group)
        with self._lock:
            if self.statuses.opened(group.info):
                before = self.statuses.taken_back(group.info)
                if before is not None and waited_ns:  # renamed: the backend still counts its waits
                    self._waited[self._group_key(before)] -= waited_ns
                self._open[name] = self._open.get(name, 0) + 1
                self._closed.pop(name, None)
                self._number_anew(group.info)

    def group_closed(self, group: ProcessGroup) -> None:
        """Note the end of a group; its series stay until others need the room."""
        waited_ns = _waited_ns(group)
        with self._lock:
            self._sort_in()
            if self.statuses.closed(group.info):
                if waited_ns:
                    self._waited[self._group_key(group.info)] += waited_ns
                self._count_closed(group.info.name)
            self._by_signature.clear()  # it would keep the signatures of the group alive

    def operation_started(self, operation: Operation) -> None:
        """Take up an operation."""
        self._in_flight.add(operation)

    def operation_finished(self, operation: Operation) -> None:
        """Count an operation."""
        self._discard(operation)
        signature = operation.signature
        try:
            counters = self._by_signature[signature]
        except KeyError:
            counters = self._counters_of(signature)
        if operation.error is None:
            elapsed = operation.finished_ns - operation.created_ns - 1
            counters[elapsed.bit_length()] += 1
            counters[SUM_NS] += elapsed
            counters[BYTES] += signature.nbytes
            if elapsed > counters[MAX_NS]:
                counters[MAX_NS] = elapsed
        else:
            counters[FAILED] += 1
            self._failed(operation, operation.error)
        counters[LAST_SEQ] = operation.seq

    # Readings

    def in_flight(self) -> list[Operation]:
        """Return the operations that have begun and not ended, oldest first.

        Examples:
            >>> observability.Metrics().in_flight()
            []
        """
        return sorted(self._in_flight.copy(), key=lambda operation: operation.created_ns)

    def series(self) -> list[Series]:
        """Return every series as it is now, in the order of their labels.

        Examples:
            >>> metrics = observability.Metrics()
            >>> remove = dist2.add_instrument(metrics)
            >>> pg.barrier()
            >>> remove()
            >>> {series.key.op for series in metrics.series()}
            {'barrier'}
        """
        with self._lock:
            self._sort_in()
            series = [pair for some in self._series.values() for pair in some.items()]
            copies = [(key, list(counters), tuple(self._past.get(key, ()))) for key, counters in series]
            if monotonic_ns() - self._window_began_ns >= WINDOW_NS:
                self._end_window(series)
        return [Series.of(*copy) for copy in sorted(copies, key=lambda copy: _ORDER(copy[0]))]

    def totals(self) -> dict[tuple[str, int], Counters]:
        """Return the counters of each (operation, number of ranks), without ending a window."""
        found: dict[tuple[str, int], Counters] = {}
        with self._lock:
            self._sort_in()
            for some in self._series.values():
                for key, counters in some.items():
                    found.setdefault((key.op, key.world_size), Counters()).add(counters)
        return found

    def times(self) -> dict[GroupKey, int]:
        """Return the nanoseconds inside successful operations of each group, without ending a window.

        Examples:
            >>> observability.Metrics().times()
            {}
        """
        found: Counter[GroupKey] = Counter()
        with self._lock:
            self._sort_in()
            for some in self._series.values():
                for key, counters in some.items():
                    found[key.group, key.backend, key.rank] += counters[SUM_NS]
        return dict(found)

    def errors(self) -> dict[ErrorKey, int]:
        """Return how many operations failed, by (op, group, backend, rank, type of error).

        Examples:
            >>> observability.Metrics().errors()
            {}
        """
        with self._lock:
            return dict(self._errors)

    def waited(self, groups: Iterable[ProcessGroup]) -> dict[GroupKey, int]:
        """Return for how many nanoseconds each group has waited for other ranks, where its backend can tell.

        Args:
            groups: The open groups.

        Examples:
            >>> metrics = observability.Metrics()
            >>> list(metrics.waited([pg])) == [metrics.group_key(pg.info)]
            True
        """
        with self._lock:
            waited = Counter(self._waited)
            for group in groups:
                if (waited_ns := _waited_ns(group)) is not None:
                    waited[self._group_key(group.info)] += waited_ns
        return dict(waited)

    def group_key(self, info: GroupInfo) -> GroupKey:
        """Return the labels of a group's samples: group, backend, rank in the job.

        Args:
            info: The group, as `ProcessGroup.info` has it.

        Examples:
            >>> observability.Metrics().group_key(pg.info) == (pg.info.name, pg.info.backend, pg.rank())
            True
        """
        with self._lock:
            return self._group_key(info)

    def label_of(self, info: GroupInfo) -> str:
        """Return the label of a group in its series: its name, or one label for all groups beyond a limit.

        Args:
            info: The group, as `ProcessGroup.info` has it.

        Examples:
            >>> observability.Metrics().label_of(pg.info) == pg.info.name
            True
        """
        with self._lock:
            return self._label_of(info)

    # Cold paths

    def _number_anew(self, info: GroupInfo) -> None:
        """Forget the numbers of an earlier group of the same name: its counts go on, but not these."""
        self._sort_in()
        label, of = self._labels.get(info.name, ""), (label_text(info.backend), global_rank(info))
        for key, counters in self._series.get(label, {}).items():
            if (key.backend, key.rank) == of:
                counters[LAST_SEQ] = 0

    def _end_window(self, series: Sequence[tuple[SeriesKey, Counters]]) -> None:
        """Begin anew to look for the longest operation of each series. Under the lock."""
        self._window_began_ns = monotonic_ns()
        for key, counters in series:
            self._past.setdefault(key, deque(maxlen=WINDOWS - 1)).append(counters[MAX_NS])
            counters[MAX_NS] = 0

    def _counters_of(self, signature: Signature) -> Counters:
        """Return the counters that a signature new to us shares with others of its labels."""
        with self._lock:
            self._sort_in()
            if len(self._by_signature) >= MAX_SIGNATURES:
                self._by_signature.clear()
            counters = self._series_at(self._key_of(signature))
            self._by_signature[signature] = counters
            return counters

    def _sort_in(self) -> None:
        """Give the counters of new signatures their labels, which takes too long inside a first call."""
        fresh = self._fresh[:]
        del self._fresh[: len(fresh)]  # C may have added others meanwhile
        for signature, counters in fresh:
            key = self._key_of(signature)
            known = self._series.setdefault(key.group, {}).setdefault(key, counters)
            if known is counters:
                continue
            if self._by_signature.get(signature) is counters:
                self._by_signature[signature] = known
            known.add(counters)

    def _series_at(self, key: SeriesKey) -> Counters:
        """Return the counters of a series, new ones if there were none."""
        some = self._series.setdefault(key.group, {})
        counters = some.get(key)
        if counters is None:
            counters = some[key] = Counters()
        return counters

    def _key_of(self, signature: Signature) -> SeriesKey:
        return SeriesKey(
            op=signature.kind.value,
            group=self._label_of(signature.group),
            backend=label_text(signature.group.backend),
            rank=global_rank(signature.group),
            world_size=signature.group.world_size,
            size=size_bucket(signature.nbytes),
            is_p2p=signature.kind.is_p2p,
        )

    def _group_key(self, info: GroupInfo) -> GroupKey:
        return self._label_of(info), label_text(info.backend), global_rank(info)

    def _label_of(self, info: GroupInfo) -> str:
        label = self._labels.get(info.name)
        if label is not None:
            return label
        if len(self._labels) >= MAX_GROUPS and not self._retire_a_closed_group():
            return OTHER
        label = self._labels[info.name] = label_text(info.name)
        if info.name not in self._open:  # an operation that ends after its group was aborted
            self._closed[info.name] = None
        return label

    def _count_closed(self, name: str) -> None:
        """Note that one group less has a name; without any, its label can make room."""
        left = self._open.get(name, 1) - 1
        if left:
            self._open[name] = left
            return
        self._open.pop(name, None)
        if name in self._labels:
            self._closed[name] = None

    def _retire_a_closed_group(self) -> bool:
        """Fold the series of the group that was closed longest ago into those of `OTHER`."""
        name = next(iter(self._closed), None)
        if name is None:
            return False
        del self._closed[name]
        label = self._labels.pop(name)
        self._by_signature.clear()
        for key, counters in self._series.pop(label, {}).items():
            into = self._series_at(attrs.evolve(key, group=OTHER))
            into.add(counters)
            self._past.pop(key, None)
            into[LAST_SEQ] = 0
        for error in [error for error in self._errors if error[1] == label]:
            folded = (error[0], OTHER, *error[2:])
            self._errors[folded] = self._errors.get(folded, 0) + self._errors.pop(error)
        for group in [group for group in self._waited if group[0] == label]:
            self._waited[OTHER, group[1], group[2]] += self._waited.pop(group)
        return True

    def _failed(self, operation: Operation, error: BaseException) -> None:
        self.statuses.failed(Failure.of(operation, error))
        name = label_text(type(error).__name__)
        with self._lock:
            known = {key[-1] for key in self._errors}
            if name not in known and len(known) >= MAX_ERROR_TYPES:
                name = OTHER
            group = operation.signature.group
            backend = label_text(group.backend)
            key = (operation.signature.kind.value, self._label_of(group), backend, global_rank(group), name)
            self._errors[key] = self._errors.get(key, 0) + 1


instrument = Metrics()
"""The one of this process, loaded with its first group."""
