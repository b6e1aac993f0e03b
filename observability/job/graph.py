"""Cycles and paths of a wait-for graph: pure functions of its edges."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping

Edges = Mapping[int, Collection[int]]
"""For each waiting rank the ranks that it waits for."""

MAX_STEPS = 250_000
"""Edges that a search for cycles follows."""


def cycles(edges: Edges) -> list[list[int]]:
    """Return the shortest cycle through each rank, each cycle once, beginning with its lowest rank."""
    found: dict[frozenset[int], list[int]] = {}
    steps = 0
    for start in sorted(edges):
        cycle, followed = _cycle_from(edges, start)
        if cycle and min(cycle) == start:
            found.setdefault(frozenset(cycle), cycle)
        steps += followed
        if steps >= MAX_STEPS:
            break
    return list(found.values())


def _cycle_from(edges: Edges, start: int) -> tuple[list[int], int]:
    """Return the shortest way from a rank back to it, by breadth first, and the number of edges followed.

    The way is empty if there is none.
    """
    before: dict[int, int] = {}
    frontier, steps = deque([start]), 0
    while frontier:
        at = frontier.popleft()
        for other in edges.get(at, ()):
            steps += 1
            if other == start:
                path = [at]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return path[::-1], steps
            if other not in before:
                before[other] = at
                frontier.append(other)
    return [], steps


def backwards(edges: Edges) -> Edges:
    """Return for each rank those that wait for it."""
    before: dict[int, list[int]] = defaultdict(list)
    for rank, others in edges.items():
        for other in others:
            before[other].append(rank)
    return before


def longest_path_to(culprit: int, before: Edges) -> list[int]:
    """Return the longest of the shortest paths from any rank to one; breadth first.

    Args:
        culprit: The one.
        before: As `backwards` returns it.
    """
    after: dict[int, int] = {}
    frontier, last = deque([culprit]), culprit
    while frontier:
        at = frontier.popleft()
        for rank in before.get(at, ()):
            if rank != culprit and rank not in after:
                after[rank] = at
                last = rank
                frontier.append(rank)
    path = [last]
    while path[-1] != culprit:
        path.append(after[path[-1]])
    return path
