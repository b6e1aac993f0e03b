"""State of the global API between calls: the only mutable state in `dist2.legacy`.

A `World` is the state of one rank. A process is usually one rank, and all its threads share its world.
Where ranks are threads of one process, each calls `init_process_group` and gets a separate world. A thread
that has not called it uses the only world of the process. If there were several at the same time, it has
none, as it may work for any of these ranks.

Every function of the API finds its group here. ``group=None`` is the group of `init_process_group`, or
inside ``with dist2.process_group(pg):`` that group, which then plays the default group's part: ranks
are its own. Ranks beside an explicit ``group`` are those of the group of `init_process_group`; of a group
that was not made from that one, the ranks that its members have in the first group of their job.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import attrs

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group.context import current_process_group
from dist2.group.process_group import ProcessGroup
from dist2.group.torch_tables import TorchDefaultGroup
from dist2.operation.work import Work
from dist2.runtime.process import InChild, in_child

NON_GROUP_MEMBER = -100
"""Result of `new_group` on ranks that are not in the new group, as in torch."""

Group = ProcessGroup | int | None
"""Type of ``group`` arguments: a group, `NON_GROUP_MEMBER`, or None for the default group."""


@attrs.define(eq=False)
class World:
    """The groups that the global API has made for one rank.

    Attributes:
        rank: The rank, as far as it is known.
        default: The group of `init_process_group`.
        ranks: For each group, the ranks that its members have in the default group, by group rank.
        made: How many groups were made since `init_process_group`, which counts as one.
        is_shared: Whether all threads use it that have none: it was the only one of the process all the time.
        in_torch: Its groups in torch's tables, if they are there.
    """

    rank: int | None = None
    default: ProcessGroup | None = None
    ranks: dict[ProcessGroup, tuple[int, ...]] = attrs.field(factory=dict)
    made: int = 0
    is_shared: bool = True
    in_torch: TorchDefaultGroup | None = None

    @property
    def is_over(self) -> bool:
        """Whether torch's ``destroy_process_group`` has shut its groups down."""
        return self.in_torch is not None and self.in_torch.is_destroyed

    @property
    def usable(self) -> ProcessGroup | None:
        """The default group, unless torch has shut it down."""
        return None if self.is_over else self.default

    def enter_torch(self) -> None:
        """Enter the default group in torch's tables.

        torch has one default group for all threads: of a process with several ranks, none is entered.

        Raises:
            InvalidUsageError: torch has a default group already.
        """
        if self.is_shared and self.default is not None:
            self.in_torch = TorchDefaultGroup(self.default)

    def leave_torch(self) -> None:
        """Take all groups out of torch's tables; groups that torch has made of them are closed."""
        entered, self.in_torch = self.in_torch, None
        if entered is not None:
            entered.leave()

    def add(self, pg: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
        """Remember a group and the ranks its members have in the default group."""
        self.ranks[pg] = tuple(ranks)
        if self.in_torch is not None:
            self.in_torch.add(pg, ranks)
        return pg

    def forget(self, pg: ProcessGroup) -> None:
        """Remember a group no longer; with the default group goes everything."""
        self.ranks.pop(pg, None)
        if self.in_torch is not None:
            self.in_torch.remove(pg)
        if pg is self.default:
            self.leave_torch()
            self.default, self.made = None, 0
            self.ranks.clear()


class Worlds:
    """The worlds of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worlds: list[World] = []  # also those whose default group is being made
        self._apart: WeakKeyDictionary[ProcessGroup, World] = WeakKeyDictionary()
        self._own = threading.local()

    def here(self) -> World:
        """Return the world of this thread; an empty one if it has none."""
        own: World | None = getattr(self._own, "world", None)
        if own is not None and (own.default is not None or not own.is_shared):
            return own
        return next((world for world in self.open() if world.is_shared), None) or World()

    def open(self) -> list[World]:
        """Return those that have a default group."""
        return [world for world in self._worlds if world.default is not None]

    def find(self, pg: ProcessGroup) -> World | None:
        """Return the world that a group was made in; None if the global API has not made it."""
        here = self.here()
        if pg in here.ranks:
            return here
        return next((each for each in (*self.open(), *self._apart.values()) if pg in each.ranks), None)

    def default_above(self, pg: ProcessGroup) -> ProcessGroup | None:
        """Return the default group, of any world of this rank, that a group was made from by methods."""
        for world in (self.here(), *self.open()):
            default = world.default
            if (
                default is not None
                and pg.info.uid.startswith(f"{default.info.uid}/")
                and pg.global_rank() == default.global_rank()
            ):
                return default
        return None

    def of(self, parent: ProcessGroup) -> World:
        """Return the world that remembers groups made from a group."""
        found = self.find(parent) or self.here()
        if found.default is not None:
            return found
        with self._lock:  # a group of the object API, without a call of `init_process_group`
            return self._apart.setdefault(parent, found)

    def add(self, parent: ProcessGroup, pg: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
        """Remember a group made from another one, and the ranks its members have in the default group."""
        world = self.of(parent)
        if world.default is None:
            with self._lock:
                self._apart[pg] = world  # as long as that group, also where its parent is closed
        return world.add(pg, ranks)

    @contextmanager
    def claim(self, rank: int | None) -> Iterator[World]:
        """Yield a new world of this thread, for a block in which its default group is made.

        Args:
            rank: The rank that this thread is said to be; None where only the environment says it, which all
                threads share.

        Raises:
            InvalidUsageError: The thread has a world, or the process has one of the same rank.
        """
        world = World(rank)
        for each in self.open():
            if each.is_over:
                self.end(each)
                each.leave_torch()
                each.default = None
        with self._lock:
            own: World | None = getattr(self._own, "world", None)
            if own is not None and own.default is not None:
                raise InvalidUsageError(_TWICE)
            if any(rank is None or each.rank == rank for each in self._worlds):
                raise InvalidUsageError(f"{_TWICE} {_IN_THREADS}")
            self._worlds.append(world)
            if len(self._worlds) > 1:
                for each in self._worlds:
                    each.is_shared = False
                    each.leave_torch()
        try:
            yield world
            self._own.world = world
        except BaseException:
            self.end(world)
            raise

    def begin(self, world: World, pg: ProcessGroup) -> None:
        """Give a world its default group."""
        world.made += 1
        world.default, world.rank = world.add(pg, range(pg.size())), pg.rank()
        with self._lock:
            if world not in self._worlds:
                self._worlds.append(world)

    def replace_default(self, pg: ProcessGroup | None) -> None:
        """Make another group the default group of this thread's world, or none; the one before stays open.

        Raises:
            InvalidUsageError: It is no group of dist2's.
        """
        if pg is not None and not isinstance(pg, ProcessGroup):
            raise InvalidUsageError(
                f"group.WORLD must be a dist2 process group or None, got {pg!r} ({type(pg).__name__})"
            )
        world = self.here()
        is_in_torch = world.in_torch is not None or world.default is None
        if world.default is not None:
            self.end(world)
            world.forget(world.default)
        if pg is not None:
            self.begin(world, pg)
            if is_in_torch:
                world.enter_torch()

    def end(self, world: World) -> None:
        """Note that a world has no default group any more."""
        with self._lock:
            if world in self._worlds:
                self._worlds.remove(world)

    def forget_in_child(self) -> None:
        """After a fork: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()


_TWICE = "trying to initialize the default process group twice!"
_IN_THREADS = (
    "Another thread of this process has done so. For ranks that are threads, call init_process_group in "
    "each with its rank=."
)

worlds = Worlds()
"""Those of this process."""

in_child(InChild.WORLDS)(worlds.forget_in_child)


@attrs.frozen(eq=False)
class GroupRanks:
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
    """Return a rank that is given as an int, one of numpy's, or a tensor of one element.

    Raises:
        ArgumentTypeError: It does not.
    """
    try:
        return operator.index(rank)  # type: ignore[arg-type]  # which is found out here
    except TypeError:
        raise ArgumentTypeError(f"a rank must be an int, got {rank!r} ({type(rank).__name__})") from None


def default_group_if_any() -> ProcessGroup | None:
    """Return the group that calls without ``group`` act on, or None."""
    return current_process_group() or worlds.here().usable


def default_group() -> ProcessGroup:
    """Return the group that calls without ``group`` act on.

    Raises:
        InvalidUsageError: There is none.
    """
    pg = default_group_if_any()
    if pg is None and any(each.usable for each in worlds.open()):
        raise InvalidUsageError(
            "the ranks of this process are threads, and this thread is none of them: give `group`, or enter "
            "a group with dist2.process_group"
        )
    if pg is None:
        raise InvalidUsageError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return pg


def is_outside(group: Group) -> bool:
    """Whether ``group`` is the result of `new_group` on a rank that is not in the group."""
    return isinstance(group, int) and group == NON_GROUP_MEMBER


def group_ranks(group: Group) -> GroupRanks:
    """Return the group of a call.

    Raises:
        InvalidUsageError: It is None and there is no default group, or the caller is not in it.
        ArgumentTypeError: It is no group of dist2's.
    """
    if group is None:
        pg = default_group()
        return GroupRanks(pg, range(pg.size()))
    if is_outside(group):
        raise InvalidUsageError("Invalid process group specified: this rank is not in it")
    if not isinstance(group, ProcessGroup):
        raise ArgumentTypeError(
            f"group must be a dist2 process group, got {group!r} ({type(group).__name__})"
        )
    world = worlds.find(group)
    if world is not None:
        return GroupRanks(group, world.ranks[group])
    # Not made here. After `shrink_group` the default group is not the one that global ranks count in.
    above = worlds.default_above(group)
    if above is None:
        return GroupRanks(group, group.global_ranks)
    return GroupRanks(group, [above.group_rank(rank) for rank in group.global_ranks])


def group_ranks_or_warn(group: Group, op: str) -> GroupRanks | None:
    """Return the group of an operation; None, with a warning, where the caller is not in it."""
    if not is_outside(group):
        return group_ranks(group)
    _warn_outside(op)
    return None


def group_or_warn(group: Group, op: str) -> ProcessGroup | None:
    """Like `group_ranks_or_warn`, without the ranks, which cost as much as a small operation."""
    if group is None:
        return default_group()
    if type(group) is ProcessGroup:
        return group
    if not is_outside(group):
        return group_ranks(group).pg
    _warn_outside(op)
    return None


def _warn_outside(op: str) -> None:
    default = worlds.here().default
    rank = -1 if default is None else default.rank()
    warnings.warn(
        f"Running {op} on global rank {rank} which does not belong to the given group.", stacklevel=4
    )


def asked(work: Work, async_op: bool) -> Work | None:
    """Return an operation's Work if the caller asked for it; else None, as the operation is complete."""
    return work if async_op else None
