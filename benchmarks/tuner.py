"""Measures the constants that algorithms are chosen by, on this machine.

For each constant, two groups differ in nothing else: one that never takes the algorithm for short vectors and
one that always does. Their times over a range of sizes tell where one overtakes the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
from crossings import ALWAYS, CROSSINGS, NEVER, Crossing

from dist2.backends.socket.tuning import Tuning
from dist2.cli.bench.measuring import Contest, Plan
from dist2.cli.bench.peers import Peer, tuned
from dist2.cli.bench.report import machine
from dist2.errors import InvalidUsageError

ROUNDS = 3
_SHARE = 0.5
"""How much of the time is for rounds; the rest goes to starting, checking and finding out how many calls
fill one."""


@attrs.frozen
class Finding:
    """The measurement of one constant.

    Attributes:
        crossing: The crossing.
        value: The measured constant; None if time ran out, or a group failed.
        sizes: The sizes measured, in bytes.
        short_s: Seconds a call with the algorithm for short vectors.
        long_s: Seconds of the other.
    """

    crossing: Crossing
    value: int | None
    sizes: tuple[int, ...] = ()
    short_s: tuple[float, ...] = ()
    long_s: tuple[float, ...] = ()


@attrs.frozen
class _Variants:
    """The two groups of one constant."""

    short: Peer
    long: Peer


class Tuner:
    """Measures constants one after the other. A context manager: leaving it ends the ranks' processes.

    Args:
        ranks: Number of ranks of the groups.
        budget_s: Limit of the whole measurement, in seconds.
        only: Names of constants; by default all that this number of ranks can measure.

    Raises:
        InvalidUsageError: A name is unknown, or so many ranks cannot tell it.
    """

    def __init__(self, ranks: int, budget_s: float, only: Sequence[str] | None = None) -> None:
        self.crossings = _chosen(ranks, only)
        self.steps = sum(len(each.cases) for each in self.crossings)
        self._ranks = ranks
        self._deadline = time.monotonic() + budget_s
        self._round_s = min(0.02, _SHARE * budget_s / (2 * ROUNDS * self.steps))
        self._stack = ExitStack()

    def __enter__(self) -> Tuner:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dist2-tune-")))
            self._variants = {each: _variants(each, self._ranks, folder) for each in self.crossings}
            peers = [peer for each in self._variants.values() for peer in (each.short, each.long)]
            self._contest = stack.enter_context(Contest(peers, Plan(self._ranks, ROUNDS, self._round_s)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, crossing: Crossing, step: Callable[[], None]) -> Finding:
        """Measure one constant.

        Args:
            crossing: The crossing to find.
            step: Called after each of its cases.
        """
        variants = self._variants[crossing]
        sizes: list[int] = []
        times: dict[str, list[float]] = {variants.short.name: [], variants.long.name: []}
        for case in crossing.cases:
            late = time.monotonic() >= self._deadline
            found = [] if late else self._contest.measure(case, [variants.short, variants.long])
            if found and all(each.rounds_s for each in found):
                sizes.append(case.nbytes)
                for each in found:
                    times[each.contender].append(min(each.rounds_s))
            step()
        short, long = times.values()
        is_whole = len(sizes) == len(crossing.cases)
        value = crossing.best(sizes, short, long, self._ranks) if is_whole else None
        return Finding(crossing, value, tuple(sizes), tuple(short), tuple(long))


def _chosen(ranks: int, only: Sequence[str] | None) -> list[Crossing]:
    able = [each for each in CROSSINGS if each.ranks <= ranks]
    if only is None:
        return able
    names = [each.constant for each in able]
    for name in only:
        if name not in names:
            raise InvalidUsageError(f"{ranks} ranks cannot measure {name!r}; they can {', '.join(names)}")
    return [each for each in able if each.constant in only]


def _variants(crossing: Crossing, ranks: int, folder: Path) -> _Variants:
    peers = []
    for name, value in (("short", ALWAYS), ("long", NEVER)):
        path = folder / f"{crossing.constant}-{name}.json"
        Tuning(crossing.thresholds(value, ranks)).write(path)
        peers.append(tuned(crossing.transport, path))
    return _Variants(*peers)


def tuning_of(findings: Sequence[Finding], ranks: int) -> Tuning:
    """Return the constants for a group, and their origin."""
    thresholds = Tuning().thresholds
    for each in findings:
        if each.value is not None:
            thresholds = each.crossing.changed(thresholds, each.value, ranks)
    figures = {
        each.crossing.constant: {
            "op": each.crossing.kind.value,
            "transport": each.crossing.transport,
            "bytes": each.sizes,
            "short_s": each.short_s,
            "long_s": each.long_s,
        }
        for each in findings
    }
    return Tuning(thresholds, {"machine": machine(), "ranks": ranks, "figures": figures})
