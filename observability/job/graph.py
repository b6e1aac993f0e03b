"""Cycles and paths of a wait-for graph: pure functions of its edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

Edges = Mapping[int, Collection[int]]
"""For each waiting rank the ranks that it waits for."""

MAX_STARTS = 256


def cycles(edges: Edges) -> list[list[int]]:
    """Return the shortest cycle through each rank, each cycle once, beginning with its lowest rank."""
    found: dict[frozenset[int], list[int]] = {}
    for start in sorted(edges)[:MAX_STARTS]:
        cycle = _cycle_from(edges, start)
        if cycle and min(cycle) == start:
            found.setdefault(frozenset(cycle), cycle)
    return list(found.values())


def _cycle_from(edges: Edges, start: int) -> list[int]:
    """Return the shortest way from a rank back to it, by breadth first; empty if there is none."""
    before: dict[int, int] = {}
    frontier = [start]
    while frontier:
        at = frontier.pop(0)
        for other in edges.get(at, ()):
            if other == start:
                path = [at]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return path[::-1]
            if other not in before:
                before[other] = at
                frontier.append(other)
    return []


def longest_path_to(edges: Edges, culprit: int) -> list[int]:
    """Return the longest of the shortest paths from any rank to one; breadth first, backwards."""
    before: dict[int, list[int]] = defaultdict(list)
    for rank, others in edges.items():
        for other in others:
            before[other].append(rank)
    paths, frontier = {culprit: [culprit]}, [culprit]
    last = [culprit]
    while frontier:
        at = frontier.pop(0)
        for rank in before[at]:
            if rank not in paths:
                paths[rank] = last = [rank, *paths[at]]
                frontier.append(rank)
    return last
