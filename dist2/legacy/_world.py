"""What the global API remembers between calls: the only mutable state in `dist2.legacy`.

Every function of the API finds its group here. ``group=None`` is the group of `init_process_group`, or
inside ``with dist2.process_group(pg):`` that group, which then plays the default group's part: ranks
are its own. Ranks beside an explicit ``group`` are those of the group of `init_process_group`.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs
from torch.distributed import Store

from dist2.context import current_process_group
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group import ProcessGroup
from dist2.work import Work

NON_GROUP_MEMBER = -100
"""What `new_group` returns to ranks that are not in the new group, as torch has it."""

Group = ProcessGroup | int | None
"""What ``group`` arguments take: a group, `NON_GROUP_MEMBER`, or None for the default group."""

RendezvousHandler = Callable[..., Iterator[tuple[Store, int, int]]]


@attrs.define(eq=False)
class World:
    """The groups that the global API has made in this process.

    Attributes:
        default: The group of `init_process_group`.
        ranks: For each group, the ranks that its members have in the default group, by group rank.
        made: How many groups were made since `init_process_group`, which counts as one.
        opened: How many of those with a backend of their own were made of the same ranks.
        handlers: Rendezvous by URL scheme, from `register_rendezvous_handler`.
    """

    default: ProcessGroup | None = None
    ranks: dict[ProcessGroup, tuple[int, ...]] = attrs.field(factory=dict)
    made: int = 0
    opened: Counter[tuple[int, ...]] = attrs.field(factory=Counter)
    handlers: dict[str, RendezvousHandler] = attrs.field(factory=dict)

    def add(self, pg: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
        """Remember a group and the ranks its members have in the default group."""
        self.ranks[pg] = tuple(ranks)
        return pg

    def forget(self, pg: ProcessGroup) -> None:
        """Remember a group no longer; with the default group goes everything."""
        self.ranks.pop(pg, None)
        if pg is self.default:
            self.default, self.made = None, 0
            self.ranks.clear()
            self.opened.clear()

    def count(self) -> int:
        """Return a number that names the next group: all ranks that make the same groups agree on it."""
        self.made += 1
        return self.made - 1


world = World()
"""The one world of this process."""


@attrs.frozen(eq=False)
class Seat:
    """A group of a call, and how the call's ranks are meant.

    Attributes:
        pg: The group.
        ranks: For each group rank, the rank that users of the global API know the member by.
    """

    pg: ProcessGroup
    ranks: Sequence[int]

    def group_rank(self, rank: int | None, group_rank: int | None, default: int | None = None) -> int:
        """Return a group rank, given as such or as a global rank.

        Args:
            rank: Global rank.
            group_rank: Group rank.
            default: Global rank to take where neither is given.

        Raises:
            InvalidUsageError: Both are given, or neither and there is no default, or it is not a member.
        """
        if group_rank is not None:
            if rank is not None:
                raise InvalidUsageError(
                    f"Can't specify both group_rank and global_rank, got {group_rank} and {rank}"
                )
            return group_rank
        if rank is None:
            rank = default
        if rank is None:
            raise InvalidUsageError("Must specify global_rank or group_rank")
        if type(rank) is not int:
            rank = as_rank(rank)
        if rank not in self.ranks:
            raise InvalidUsageError(
                f"Global rank {rank} is not part of group {self.pg.group_name!r} (ranks {list(self.ranks)})"
            )
        return self.ranks.index(rank)

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a member.

        Raises:
            InvalidUsageError: There is no such rank.
        """
        if not 0 <= group_rank < len(self.ranks):
            raise InvalidUsageError(
                f"Group rank {group_rank} is not part of group {self.pg.group_name!r} "
                f"(size {len(self.ranks)})"
            )
        return self.ranks[group_rank]


def as_rank(rank: object) -> int:
    """Return a rank that is given as what counts as an int: of numpy, or a tensor of one.

    Raises:
        ArgumentTypeError: It does not.
    """
    try:
        return operator.index(rank)  # type: ignore[arg-type]  # which is found out here
    except TypeError:
        raise ArgumentTypeError(f"a rank must be an int, got {rank!r} ({type(rank).__name__})") from None


def default_group_if_any() -> ProcessGroup | None:
    """Return the group that calls without ``group`` act on, or None."""
    return current_process_group() or world.default


def default_group() -> ProcessGroup:
    """Return the group that calls without ``group`` act on.

    Raises:
        InvalidUsageError: There is none.
    """
    pg = default_group_if_any()
    if pg is None:
        raise InvalidUsageError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return pg


def is_outside(group: Group) -> bool:
    """Whether ``group`` is what `new_group` returned to a rank that is not in the group."""
    return isinstance(group, int) and group == NON_GROUP_MEMBER


def seat(group: Group) -> Seat:
    """Return the group of a call.

    Raises:
        InvalidUsageError: It is None and there is no default group, or the caller is not in it.
        ArgumentTypeError: It is no group of dist2's.
    """
    if group is None:
        pg = default_group()
        return Seat(pg, range(pg.size()))
    if is_outside(group):
        raise InvalidUsageError("Invalid process group specified: this rank is not in it")
    if not isinstance(group, ProcessGroup):
        raise ArgumentTypeError(
            f"group must be a dist2 process group, got {group!r} ({type(group).__name__})"
        )
    return Seat(group, world.ranks.get(group, group.global_ranks))


def seat_or_warn(group: Group, op: str) -> Seat | None:
    """Return the group of an operation; None, with a warning, where the caller is not in it."""
    if not is_outside(group):
        return seat(group)
    rank = -1 if world.default is None else world.default.rank()
    warnings.warn(
        f"Running {op} on global rank {rank} which does not belong to the given group.", stacklevel=3
    )
    return None


def asked(work: Work, async_op: bool) -> Work | None:
    """Return an operation's Work to a caller that asked for one; None to others, whose it has completed."""
    return work if async_op else None
