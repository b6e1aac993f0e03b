"""The ranks of each host, the basis of hierarchical algorithms, and the order of folding.

A *layout* is a tuple of host numbers, one a rank: ``(0, 0, 1, 1)``. Vectors are cut into *rails*, one
for each rank of the largest host; on every host a rail has a *carrier*, and only the carriers of one
rail talk to each other between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs


@attrs.frozen
class HostMap:
    """A layout.

    Attributes:
        of: Number of each rank's host; hosts are numbered by their lowest rank.
        members: Ranks of each host, ascending.
    """

    of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.members)

    @property
    def rails(self) -> int:
        """Ranks of the largest host."""
        return max(map(len, self.members))

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < self.count < len(self.of)

    def beside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's host, itself among them."""
        return self.members[self.of[rank]]

    def carrier(self, host: int, rail: int) -> int:
        """Return the rank that carries a rail on a host."""
        ranks = self.members[host]
        return ranks[rail % len(ranks)]

    def rails_of(self, rank: int) -> range:
        """Return which rails a rank carries."""
        ranks = self.beside(rank)
        return range(ranks.index(rank), self.rails, len(ranks))

    def counterpart(self, rank: int, host: int) -> int:
        """Return the representative of a rank on another host; on its own host, the rank itself."""
        return self.carrier(host, self.beside(rank).index(rank))

    def others(self, host: int) -> list[int]:
        """Return the other hosts, the next one first."""
        return [(host + distance) % self.count for distance in range(1, self.count)]


@lru_cache(maxsize=256)
def host_map(layout: tuple[int, ...]) -> HostMap:
    """Return the map of a layout; its numbers may be any."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(layout))}
    of = tuple(numbers[host] for host in layout)
    members = tuple(
        tuple(rank for rank, each in enumerate(of) if each == host) for host in range(len(numbers))
    )
    return HostMap(of, members)


@lru_cache(maxsize=256)
def folding_groups(layout: tuple[int, ...], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return how an ordered reduction is folded: each group in rank order, then the groups in order.

    With several hosts of several ranks, a group is a host. Otherwise, and without a layout, it is a rank, and
    the whole is one fold in rank order.
    """
    if layout and host_map(layout).is_hierarchical:
        return host_map(layout).members
    return tuple((rank,) for rank in range(world_size))


def layout_of_hosts(keys: Sequence[str]) -> tuple[int, ...]:
    """Return the layout of ranks whose hosts have these names."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)
