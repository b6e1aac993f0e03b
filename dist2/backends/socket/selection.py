"""Which algorithm runs an operation: a registry of all, and a choice by size from measured constants.

    request = Request(OpKind.ALL_REDUCE, world_size, (numel,), itemsize=4, slot_bytes=slot_bytes)
    algorithm = select(request)
    schedule = algorithm.schedule(rank, request)

Everything a choice depends on is equal on all ranks, so that all choose alike.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.ops import OpKind


@attrs.frozen
class Request:
    """What a schedule is wanted for.

    Attributes:
        kind: The operation; spellings of one family (``_single``, ``_v``) are served alike.
        world_size: Ranks of the group.
        counts: Elements a part: one number for `all_reduce`, `broadcast`, `reduce`; for the others one
            a rank, equal on all ranks, except for `all_to_all`: what this rank sends to each.
        itemsize: Bytes an element.
        root: Group rank of the root, where there is one.
        exact: The result does not depend on the order of folding (see `reduction.is_exact`).
        deterministic: The result must not depend on the order of folding even if it could.
        slot_bytes: Bytes of half a slot of shared memory that all ranks can reach; 0: there is none.
        received: For `all_to_all`: elements that this rank gets from each.
        matrix: For `all_to_all`, where every rank knows it: ``matrix[src][dst]`` elements. Flat
            algorithms need it.
        forced: Name of the algorithm that the caller insists on.
    """

    kind: OpKind
    world_size: int
    counts: tuple[int, ...] = (0,)
    itemsize: int = 1
    root: int = 0
    exact: bool = False
    deterministic: bool = True
    slot_bytes: int = 0
    received: tuple[int, ...] = ()
    matrix: tuple[tuple[int, ...], ...] | None = None
    forced: str | None = None


@attrs.frozen(eq=False)
class Algorithm:
    """One line of the registry.

    Attributes:
        name: How users force it; unique in its family.
        kinds: The spellings of the family it serves.
        flat: It runs on shared memory, not on messages.
        ordered: It folds in rank order, so that inexact reductions may use it.
        build: Makes the schedule of a rank.
        fits: Whether it can serve a request at all.
    """

    name: str
    kinds: frozenset[OpKind]
    flat: bool
    ordered: bool
    build: Callable[[int, Request], Schedule]
    fits: Callable[[Request], bool]

    def schedule(self, rank: int, request: Request) -> Schedule:
        """Return what ``rank`` does."""
        return self.build(rank, request)


@attrs.frozen
class Thresholds:
    """Where one algorithm overtakes another: measured constants, in bytes."""


DEFAULT_THRESHOLDS = Thresholds()


def algorithms_for(kind: OpKind) -> tuple[Algorithm, ...]:
    """Return all algorithms of an operation's family."""
    raise NotImplementedError


def select(request: Request, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Algorithm:
    """Return the algorithm to run.

    Raises:
        InvalidUsageError: The forced one is unknown or unfit; the message lists the fit ones.
    """
    raise NotImplementedError
