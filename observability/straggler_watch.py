"""`StragglerWatch`: asks the control planes of all ranks when they called collectives, and judges.

The watch of the lowest rank of a job asks every second, logs stragglers as they are found, and counts
their cost. Any other control plane forwards `/stragglers` to it, or asks all ranks itself.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic_ns
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dist2.errors import Dist2Error
from observability.clocks import ClockOffset
from observability.entries import Entries
from observability.job.fan_out import ask_each
from observability.stragglers import Ledger, Straggler

Document = dict[str, Any]

Ask = Callable[[int, str], bytes]
"""Returns the answer of a rank's control plane at a path. Raises `OSError` or `Dist2Error`."""

TICK_S = 1.0
RANKS_A_SECOND = 64
"""With more ranks, the watch asks less often."""

log = logging.getLogger("dist2.stragglers")


class StragglerWatch:
    """Finds the ranks that arrive late.

    Args:
        ask: Asks a rank.
        ranks: Whose control planes are known.

    Attributes:
        stragglers: Those found last, the one that costs most first.
        silent: Ranks that did not answer the last time, and why.
    """

    def __init__(self, ask: Ask, ranks: Callable[[], Iterable[int]]) -> None:
        self._ask = ask
        self._ranks = ranks
        self._ledger = Ledger()
        self._clocks: dict[int, ClockOffset] = {}
        self._after_ns: dict[int, int] = {}
        self._processes: dict[int, str] = {}
        self.stragglers: tuple[Straggler, ...] = ()
        self.silent: dict[int, str] = {}
        self._looking = threading.Lock()  # held while ranks are asked: this process may be one of them
        self._lock = threading.Lock()  # held for moments: scrapes take it
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> tuple[Straggler, ...]:
        """Ask all ranks for new operations, and judge."""
        with self._looking:
            ranks = sorted(self._ranks())
            if not ranks:
                return ()
            answers = ask_each(ranks, self._asked)
            told = {rank: answer for rank, answer in answers.items() if answer is not None}
            with self._lock:
                for rank, entries in told.items():
                    offset = self._clocks[rank].at(monotonic_ns())
                    assert offset is not None  # there is a sample: the answer
                    self._ledger.take(rank, entries, offset, self._processes[rank])
                found = tuple(self._ledger.close(told))
            self._say(found)
            self.stragglers = found
        return found

    def start(self) -> None:
        """Look again and again, in a thread."""
        self._thread = threading.Thread(target=self._run, name="dist2-stragglers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that is inside a request ends by itself, with it. Idempotent."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(2 * TICK_S)

    def late_s(self) -> dict[int, float]:
        """Return by how much stragglers have arrived late while they were known as such, by rank."""
        with self._lock:
            return dict(self._ledger.late_s)

    def document(self) -> Document:
        """Return the latest verdict and its basis as JSON has it."""
        with self._lock:
            now_ns = monotonic_ns()
            offsets = {rank: clock.at(now_ns) for rank, clock in self._clocks.items()}
            return {
                "stragglers": [
                    {
                        "rank": each.rank,
                        "group": each.group,
                        "late_s": each.late_s,
                        "share": each.share,
                        "operations": each.operations,
                        "span_s": each.span_s,
                        "probability": each.probability,
                        "sentence": each.sentence(),
                    }
                    for each in self.stragglers
                ],
                "ranking": self._ledger.ranking(),
                "late_s": {str(rank): late_s for rank, late_s in self._ledger.late_s.items()},
                "clocks": {
                    str(rank): {"offset_s": each.offset_ns / 1e9, "error_s": each.error_ns / 1e9}
                    for rank, each in offsets.items()
                    if each is not None
                },
                "silent": {str(rank): why for rank, why in self.silent.items()},
            }

    def _run(self) -> None:
        while not self._ends.wait(max(TICK_S, len(self._clocks) / RANKS_A_SECOND)):
            try:
                self.look()
            except Exception:  # the watch must outlive a single failure
                log.exception("the watch for stragglers failed; it goes on")

    def _asked(self, rank: int) -> list[Entries] | None:
        """Return the new entries of a rank; None where it does not answer."""
        sent_ns = monotonic_ns()
        try:
            document = json.loads(self._ask(rank, f"/entries?after_ns={self._after_ns.get(rank, 0)}"))
            received_ns = monotonic_ns()
            entries = [Entries.of(each) for each in document["groups"]]
            there_ns, newest_ns = int(document["now_ns"]), int(document["newest_ns"])
            clock = str(document["clock"])
            process = str(document["process"])[:200]
        except (OSError, Dist2Error, ValueError, KeyError, TypeError) as error:
            self.silent[rank] = f"{type(error).__name__}: {error}"[:200]
            return None
        self.silent.pop(rank, None)
        self._clocks.setdefault(rank, ClockOffset()).add(sent_ns, there_ns, received_ns, clock)
        self._after_ns[rank] = newest_ns
        self._processes[rank] = process
        return entries

    def _say(self, found: Iterable[Straggler]) -> None:
        """Log new stragglers, and ranks that recovered."""
        before = {(each.rank, each.group): each for each in self.stragglers}
        now = {(each.rank, each.group): each for each in found}
        for key, each in now.items():
            if key not in before:
                fields = {"rank": each.rank, "group": each.group, "late_s": each.late_s, "share": each.share}
                log.warning("%s", each.sentence(), extra=fields)
        for key in sorted(before.keys() - now.keys()):
            _, group = key
            log.info("%s arrives at collectives of group %s with the others again", before[key].name, group)


class StragglerCollector(Collector):
    """Exports the cost of stragglers to Prometheus: no sample without stragglers."""

    def __init__(self, watch: StragglerWatch) -> None:
        self._watch = watch

    def describe(self) -> Iterable[Metric]:
        """Return no names, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the family as it is now."""
        family = CounterMetricFamily(
            "dist2_straggler_seconds",
            "Seconds by which a straggler arrived later at collectives than the median rank, in all.",
            labels=("rank",),
        )
        for rank, late_s in sorted(self._watch.late_s().items()):
            family.add_metric((str(rank),), late_s)
        yield family
