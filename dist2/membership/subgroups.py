"""`Subgroups`: groups derived from one group, and from several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self, cast

import torch
from torch.distributed import Store

from dist2.backends.base import Backend, GroupSpec
from dist2.errors import Dist2Error, InvalidUsageError
from dist2.membership import members, merging
from dist2.operation.contract import GroupParts
from dist2.operation.runner import Timeout
from dist2.operation.work import Work
from dist2.runtime.arguments import as_int, check_names, check_ranks, check_store
from dist2.runtime.deadline import seconds
from dist2.store import PrefixStore

Opener = Callable[[GroupSpec], object]
"""Makes a group from its spec."""


class Subgroups(GroupParts):
    """The methods that derive groups: `split`, `split_by`, `merge_remote_group`, `reconfigure`."""

    spec: GroupSpec
    backend: Backend
    all_gather_single: Callable[..., Work]
    _open_group: Opener | None
    _subgroup_counts: dict[str, int]
    """How many groups of the same ranks were made before, which numbers the next one."""

    def _new(self, spec: GroupSpec, backend: Backend) -> Self:
        """Return another group of the same class."""
        raise NotImplementedError

    def split(
        self,
        ranks: Sequence[int],
        *,
        timeout: Timeout = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> Self | None:
        """Return a group of some of these ranks, renumbered in the order given; None on other ranks.

        Only the named ranks need to call, all with the same list and in the same order of calls; others may,
        and get None. Nothing is connected, and nothing is sent: lists that differ raise `MismatchError` in an
        operation of the new group, once ranks wait for each other there.

        Args:
            ranks: Ranks of this group.
            timeout: Limit of the new group's operations; this group's by default.
            name: The new group's name in c10d.
            desc: Free text.

        Raises:
            InvalidUsageError: A rank is out of range or named twice.

        Examples:
            >>> swapped = pg.split([1, 0], name="swapped")
            >>> swapped.rank() == 1 - pg.rank()
            True
        """
        chosen = check_ranks(ranks, "ranks", self.info.world_size)
        return self._subgroup(chosen, "split", timeout, name, desc)

    def split_by(
        self,
        color: int | None,
        key: int = 0,
        *,
        timeout: Timeout = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> Self | None:
        """Split the whole group by color (as MPI_Comm_split): ranks of one color make a group.

        Every rank must call.

        Args:
            color: Any int that fits 62 bits; None joins no group and returns None.
            key: An int of the same range that orders the ranks of the new group; equal keys keep this group's
                order.
            timeout: Limit of this call and of the new group's operations; this group's by default.
            name: The new group's name in c10d.
            desc: Free text.

        Raises:
            InvalidUsageError: ``color`` or ``key`` is not an int that fits 62 bits.

        Examples:
            >>> alone = pg.split_by(color=pg.rank())
            >>> alone.size()
            1
        """
        wanted = 0 if color is None else _whole(color, "color")
        order = _whole(key, "key")
        _check_settings(timeout, name, desc)
        mine = torch.tensor([color is not None, wanted, order], dtype=torch.int64, device="cpu")
        everyone = torch.empty(self.info.world_size, 3, dtype=torch.int64, device="cpu")
        self.all_gather_single(everyone, mine, timeout).wait()  # which a coalescing block refuses
        rows: list[list[int]] = everyone.tolist()
        if color is None:
            return None
        choices = [(chosen if joins else -(1 << 62), rank_key) for joins, chosen, rank_key in rows]
        ranks = members.by_color(choices, self.info.rank)
        return self._subgroup(ranks, "split", timeout, name, desc)

    def _subgroup(
        self, ranks: tuple[int, ...], kind: str, timeout: Timeout, name: str | None, desc: str | None
    ) -> Self | None:
        """Return the next group of just these ranks; which number it has, the members know by counting."""
        _check_settings(timeout, name, desc)  # a call that is wrong does not count
        label = f"{kind}{ranks}"
        if self.info.rank in ranks:
            self._runner.check_open()
            self._count_subgroup(label)
        return self._open_subgroup(ranks, kind, self._subgroup_counts.get(label, 0) - 1, timeout, name, desc)

    def _count_subgroup(self, label: str) -> int:
        """Count a group that is made of this one; return how many of its label there were before."""
        self._subgroup_counts[label] = self._subgroup_counts.get(label, 0) + 1
        return self._subgroup_counts[label] - 1

    def _open_subgroup(
        self,
        ranks: tuple[int, ...],
        kind: str,
        number: int,
        timeout: Timeout,
        name: str | None,
        desc: str | None,
    ) -> Self | None:
        """Return a group of some ranks, on the links of this group; None on other ranks."""
        self._runner.check_open()
        if self.info.rank not in ranks:
            return None
        info = members.subgroup(self.info, ranks, number, kind, name, desc)
        limit_s = self._limit_s(timeout)
        spec = self.spec.within(f"{kind}/{info.uid.rsplit('/', 1)[-1]}", info, limit_s)
        return self._new(spec, self.backend.split(spec))

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | float = timedelta(minutes=30),
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Self:
        """Return a group of the members of this group and of others. All call it, with the same store.

        A new process calls it on a group of one rank. This group does not change.

        Args:
            store: The common store; for one merge only (or a `PrefixStore` for each).
            size: Number of ranks of all groups together.
            timeout: Limit of the call, and of the new group's operations.
            group_name: The new group's name in c10d.
            group_desc: Free text.

        Raises:
            InvalidUsageError: ``size`` is less than this group's, or too many ranks registered.
            OperationTimeoutError: Too few ranks registered in time.

        Examples:
            >>> alone = pg.split_by(color=pg.rank())
            >>> both = alone.merge_remote_group(dist2.PrefixStore("merge", pg.get_group_store()), size=2)
            >>> both.size()
            2
        """
        self._runner.check_open()
        if self._open_group is None:
            raise InvalidUsageError(f"group {self.info.name!r} cannot be merged: `new_group` did not make it")
        limit_s = seconds(timeout)
        check_store(store)
        _check_settings(timeout, group_name, group_desc, "group_")
        info = merging.meet(
            self.info,
            store,
            size,
            limit_s,
            group_name,
            group_desc,
            self._runner.check_open,
            self.backend.last_seen,
            self.backend.names,
        )
        met = self.spec.at(PrefixStore("merge/group", store), info, limit_s)
        return cast("Self", self._open_group(met))

    def handle(self) -> str:
        """Return how other processes reach this one, as text to hand to them by any way there is.

        It stays the same as long as this process has a group open.

        Raises:
            InvalidUsageError: The backend needs a store to meet.

        Examples:
            >>> handles = pg.all_gather_object(pg.handle())
            >>> len(handles)
            2
        """
        self._runner.check_open()
        return self.backend.handle()

    def reconfigure(
        self,
        uuid: str,
        handles: Sequence[str],
        timeout: Timeout = None,
        *,
        store: Store | None = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> Self:
        """Return a group of the processes with these handles, in this order, without a store to meet at.

        All of them call, each on any of its open groups, with the same arguments: survivors on the result of
        `shrink`, a restarted process on a group of one rank. The program that restarts processes (an agent, a
        lighthouse) collects the results of `handle` and distributes them. This group does not change.

        Args:
            uuid: Name of this configuration, different each time.
            handles: The results of `handle` on all processes, the caller's included.
            timeout: Limit of the call, and of the new group's operations; this group's by default.
            store: For the new group's `monitored_barrier`; by default this group's, which may differ from the
                others'.
            name: The new group's name in c10d.
            desc: Free text.

        Raises:
            InvalidUsageError: The caller's handle is missing, or one is malformed or listed twice.
            OperationTimeoutError: Some did not call in time: `missing`.
            PeerLostError: Some are gone.

        Examples:
            >>> handles = pg.all_gather_object(pg.handle())
            >>> reordered = pg.reconfigure("configuration 1", handles[::-1])
            >>> reordered.rank() == 1 - pg.rank()
            True
        """
        self._runner.check_open()
        mine = self.backend.handle()
        if not isinstance(uuid, str) or not uuid:
            raise InvalidUsageError(f"uuid must be a non-empty text, got {uuid!r}")
        _check_settings(timeout, name, desc)
        if not isinstance(handles, Sequence) or isinstance(handles, str):
            raise InvalidUsageError(f"handles must be a list of results of `handle`, got {handles!r}")
        if list(handles).count(mine) != 1 or len(set(handles)) != len(handles):
            raise InvalidUsageError(
                f"handles must name this process, and each once, got {list(handles)!r}; ranks that are "
                f"threads of one process and have built no group together have the same handle: merge their "
                f"groups with merge_remote_group"
            )
        info = members.reconfigured(self.info, uuid, list(handles).index(mine), len(handles), name, desc)
        limit_s = self._limit_s(timeout)
        below = PrefixStore(f"reconfigure/{uuid}", self.spec.store if store is None else store)
        spec = self.spec.at(below, info, limit_s)
        try:
            return self._new(spec, self.backend.reconfigure(spec, handles))
        except Dist2Error as error:
            error.locate(info.name, "reconfigure", rank=info.rank, members=info.global_ranks)
            error.prefix(f"reconfigure {uuid!r} of {len(handles)} processes")
            raise


def _whole(value: object, argument: str) -> int:
    """Return a color or a key; True and False are ones, as in ``split_by(rank < 4)``."""
    found = int(value) if isinstance(value, bool) else as_int(value)
    if found is None or abs(found) >= 1 << 62:
        raise InvalidUsageError(f"{argument} must be an int that fits 62 bits, got {value!r}")
    return found


def _check_settings(timeout: Timeout, name: str | None, desc: str | None, prefix: str = "") -> None:
    """Check the arguments that all new groups take."""
    if timeout is not None:
        seconds(timeout)
    check_names(name, desc, prefix)
