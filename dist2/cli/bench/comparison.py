"""Measurements of one case beside each other, and the figures that are derived from them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from dist2.cli.bench.measuring import Measurement
from dist2.cli.bench.workloads import Case


@attrs.frozen
class Comparison:
    """The measurements of all contenders for one case, compared with one of them.

    Attributes:
        case: The case.
        by_name: Contender to its measurement.
        subject: The contender that is compared with the others.
        world_size: Number of ranks.
    """

    case: Case
    by_name: dict[str, Measurement]
    subject: str
    world_size: int

    @property
    def own(self) -> Measurement:
        """The subject's measurement."""
        return self.by_name[self.subject]

    def ratio(self, peer: str) -> float | None:
        """Return how many times faster the subject is than a peer; None if either has no figure."""
        mine, theirs = self.own.median_s, self.by_name[peer].median_s
        return theirs / mine if mine and theirs else None

    def algorithm_bandwidth(self, name: str) -> float | None:
        """Return bytes a second as the caller sees them: payload by time."""
        took = self.by_name[name].median_s
        return self.case.nbytes / took if took and self.case.nbytes else None

    def bus_bandwidth(self, name: str) -> float | None:
        """Return the bytes per second that each rank must move at least, with any algorithm."""
        bandwidth = self.algorithm_bandwidth(name)
        return bandwidth * self.case.bus_factor(self.world_size) if bandwidth else None


def compare(measurements: Iterable[Measurement], subject: str, world_size: int) -> list[Comparison]:
    """Group measurements by case, in their order."""
    cases: dict[Case, dict[str, Measurement]] = {}
    for each in measurements:
        cases.setdefault(each.case, {})[each.contender] = each
    return [Comparison(case, by_name, subject, world_size) for case, by_name in cases.items()]
