"""`StragglerWatch`: asks the control planes of all ranks when they called collectives, and judges.

The watch of the lowest rank of a job asks every `TICK_S`, over the tree of `observability.job.gathering`, and
logs stragglers as they are found, and counts their cost. Any other control plane forwards `/stragglers` to
it, or asks all ranks itself. Each rank tells what has begun since it told last. The more ranks there are, the
more seldom they are asked, and the fewer calls of a group each tells.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic_ns, time_ns
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from observability.clocks import ClockOffset
from observability.entries import MOST_TOLD, Entries
from observability.frames import no_collection
from observability.job.answer import Answer
from observability.stragglers import Ledger, Straggler

Document = dict[str, Any]

Ask = Callable[[Mapping[int, int], int], Mapping[int, Answer]]
"""Returns the answers of ranks, as `Member.entries` does: by the time after which each tells its calls."""

TICK_S = 10.0
"""To answer takes a rank 2 to 4 ms, so once in five seconds would cost 0.04 to 0.08 % of a core."""
RANKS_A_SECOND = 64
"""With more ranks, the watch asks less often."""
TOLD_IN_ALL = 1 << 16
"""Calls of one group that all ranks tell at a time."""
LEAST_TOLD = 16

UNKNOWN = Answer(silence="no control plane of this rank is known")

log = logging.getLogger("dist2.stragglers")


class StragglerWatch:
    """Finds the ranks that arrive late.

    Args:
        ask: Asks ranks.
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
            most = max(LEAST_TOLD, min(MOST_TOLD, TOLD_IN_ALL // len(ranks)))
            answers = self._ask({rank: self._after_ns.get(rank, 0) for rank in ranks}, most)
            with no_collection():  # of the calls of thousands of ranks, none is garbage yet
                found = self._judged(ranks, answers)
            self._say(found)
            self.stragglers = found
        return found

    def _judged(self, ranks: Iterable[int], answers: Mapping[int, Answer]) -> tuple[Straggler, ...]:
        read = {rank: self._read(rank, answers.get(rank, UNKNOWN)) for rank in ranks}
        told = {rank: entries for rank, entries in read.items() if entries is not None}
        with self._lock:
            for rank, entries in told.items():
                offset = self._clocks[rank].at(monotonic_ns())
                assert offset is not None  # there is a sample: the answer
                self._ledger.take(rank, entries, offset, self._processes[rank])
            return tuple(self._ledger.close(told))

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
                "groups_left_out": self._ledger.left_out,
            }

    def _run(self) -> None:
        while not self._ends.wait(max(TICK_S, len(self._clocks) / RANKS_A_SECOND)):
            try:
                self.look()
            except Exception:  # the watch must outlive a single failure
                log.exception("the watch for stragglers failed; it goes on")

    def _read(self, rank: int, answer: Answer) -> list[Entries] | None:
        """Return the new entries of a rank; None where it does not answer."""
        self.silent[rank] = answer.silence
        if answer.state is None:
            return None
        try:
            document = answer.state["entries"]
            entries = [Entries.of(each) for each in document["groups"]]
            there_ns, newest_ns = int(document["now_ns"]), int(document["newest_ns"])
            epoch_ns, clock = int(answer.state["epoch_ns"]), str(document["clock"])
            process = str(document["process"])[:200]
        except (ValueError, KeyError, TypeError) as error:
            self.silent[rank] = f"{type(error).__name__}: {error}"[:200]
            return None
        del self.silent[rank]
        now_ns = monotonic_ns()
        ours_ns = epoch_ns - int(answer.offset_s * 1e9) - (time_ns() - now_ns)  # when it read both its clocks
        known = self._clocks.setdefault(rank, ClockOffset())
        known.note(ours_ns - there_ns, int(answer.error_s * 1e9), now_ns, clock)
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
