"""The members of groups made from groups: names, ids and rank translation. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from dist2.errors import InvalidUsageError
from dist2.operation.signature import GroupInfo


def subgroup(
    parent: GroupInfo, ranks: Sequence[int], nth: int, kind: str, name: str | None, desc: str | None
) -> GroupInfo:
    """Return the identity of a group of some ranks of another, as seen by one of its members.

    Only its own members need to call for it: the uid follows from the parent, the ranks, and how many
    groups of just these ranks were made before, which the members agree on without a message.

    Args:
        parent: The group it is made from.
        ranks: Ranks of the parent, in the order of their new ranks.
        nth: Number of groups of these ranks that were made from this parent before.
        kind: The operation that makes it (``"split"``, ``"shrink"``).
        name: Its name in c10d; by default made from the parent's.
        desc: Free text.
    """
    label = f"{kind}({','.join(map(str, ranks))})#{nth}"
    return GroupInfo(
        uid=f"{parent.uid}/{label}",
        name=name or f"{parent.name}/{label}",
        desc=desc or parent.desc,
        backend=parent.backend,
        rank=ranks.index(parent.rank),
        global_ranks=tuple([parent.global_ranks[rank] for rank in ranks]),
    )


def reconfigured(
    former: GroupInfo, uuid: str, rank: int, world_size: int, name: str | None, desc: str | None
) -> GroupInfo:
    """Return the identity of a group of processes of any groups: its global ranks are counted from 0.

    Args:
        former: A group of the caller's.
        uuid: Equal on all members, and used once.
        rank: The caller's in the new group.
        world_size: Number of members.
        name: Its name in c10d.
        desc: Free text.
    """
    return attrs.evolve(
        former,
        uid=f"reconfigure({uuid})",
        name=name or f"reconfigured-{uuid}",
        desc=desc or former.desc,
        rank=rank,
        global_ranks=tuple(range(world_size)),
    )


def by_color(choices: Sequence[tuple[int, int]], rank: int) -> tuple[int, ...]:
    """Return the ranks that chose this rank's color, ordered by key and then by rank (as MPI does).

    Args:
        choices: For each rank, its ``(color, key)``.
        rank: The caller's.
    """
    color = choices[rank][0]
    chosen = [each for each, (other, _) in enumerate(choices) if other == color]
    return tuple(sorted(chosen, key=lambda each: (choices[each][1], each)))


def without(world_size: int, exclude: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that are left.

    Raises:
        InvalidUsageError: None is left.
    """
    left = tuple(rank for rank in range(world_size) if rank not in set(exclude))
    if not left:
        raise InvalidUsageError(f"exclude names all {world_size} ranks: {sorted(exclude)}")
    return left
