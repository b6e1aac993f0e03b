"""`Subgroups`: the groups that are made from a group, and from several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self, cast

import torch
from torch.distributed import Store

from dist2.backends.base import Backend, GroupSpec
from dist2.errors import Dist2Error, InvalidUsageError
from dist2.membership import merging
from dist2.membership import naming as membership
from dist2.operation.contract import GroupParts
from dist2.operation.runner import Timeout
from dist2.operation.work import Work
from dist2.runtime.arguments import as_int, check_names, check_ranks, check_store
from dist2.runtime.deadline import seconds
from dist2.store import PrefixStore

Opener = Callable[[GroupSpec], object]
"""Makes a group from who is in it and where they meet."""


class Subgroups(GroupParts):
    """What makes groups from this one: `split`, `split_by`, `merge_remote_group`, `reconfigure`."""

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

        Only the named ranks need to call, all with the same list; others may, and get None. Nothing
        new is connected.

        Args:
            ranks: Ranks of this group.
            timeout: Limit of the new group's operations; this group's by default.
            name: What c10d calls the new group.
            desc: Free text.

        Raises:
            InvalidUsageError: A rank is out of range or named twice.
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
            key: An int like it: orders the ranks of the new group; equal keys keep the order of this one.
            timeout: Limit of this call and of the new group's operations; this group's by default.
            name: What c10d calls the new group.
            desc: Free text.

        Raises:
            InvalidUsageError: ``color`` or ``key`` is not an int that fits 62 bits.
        """
        wanted = 0 if color is None else _whole(color, "color")
        order = _whole(key, "key")
        _check_settings(timeout, name, desc)
        mine = torch.tensor([color is not None, wanted, order], dtype=torch.int64)
        everyone = torch.empty(self.info.world_size, 3, dtype=torch.int64)
        self.all_gather_single(everyone, mine, timeout)
        rows: list[list[int]] = everyone.tolist()
        if color is None:
            return None
        choices = [(chosen if joins else -(1 << 62), rank_key) for joins, chosen, rank_key in rows]
        ranks = membership.by_color(choices, self.info.rank)
        return self._subgroup(ranks, "split", timeout, name, desc)

    def _subgroup(
        self, ranks: tuple[int, ...], kind: str, timeout: Timeout, name: str | None, desc: str | None
    ) -> Self | None:
        """Return the next group of just these ranks; which number it has, the members know by counting."""
        _check_settings(timeout, name, desc)  # a call that is wrong does not count
        label = f"{kind}{ranks}"
        if self.info.rank in ranks:
            self._runner.check_open()
            self._subgroup_counts[label] = self._subgroup_counts.get(label, 0) + 1
        return self._open_subgroup(ranks, kind, self._subgroup_counts.get(label, 0) - 1, timeout, name, desc)

    def _open_subgroup(
        self,
        ranks: tuple[int, ...],
        kind: str,
        number: int,
        timeout: Timeout,
        name: str | None,
        desc: str | None,
    ) -> Self | None:
        """Return a group of some ranks on what this one is on; None on other ranks."""
        self._runner.check_open()
        if self.info.rank not in ranks:
            return None
        info = membership.subgroup(self.info, ranks, number, kind, name, desc)
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
        """Return a group of the members of this group and of others, who all call it with the same store.

        A newcomer brings a group of its own, be it of one rank. This group stays as it is.

        Args:
            store: Where all meet; for one merge only (or a `PrefixStore` each).
            size: How many ranks there are in all groups together.
            timeout: Limit of the meeting, and of the new group's operations.
            group_name: What c10d calls the new group.
            group_desc: Free text.

        Raises:
            InvalidUsageError: ``size`` is less than this group's, or too many came.
            OperationTimeoutError: Too few came in time.
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
        )
        met = self.spec.at(PrefixStore("merge/group", store), info, limit_s)
        return cast("Self", self._open_group(met))

    def handle(self) -> str:
        """Return how other processes reach this one, as text to hand to them by any way there is.

        It stays the same as long as this process has a group open.

        Raises:
            InvalidUsageError: The backend needs a store to meet.
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

        All of them call, each on any open group of its own, with the same arguments: survivors on what
        `shrink` returned, a process that was started again on a group of its own, of one rank. Whoever
        restarts processes (an agent, a lighthouse) collects what `handle` returns and hands it out.
        This group stays as it is.

        Args:
            uuid: Of this configuration: another one each time.
            handles: What `handle` returned on each process, the caller among them.
            timeout: Limit of the meeting, and of the new group's operations; this group's by default.
            store: For the new group's `monitored_barrier`; by default this group's, which may not be the
                others'.
            name: What c10d calls the new group.
            desc: Free text.

        Raises:
            InvalidUsageError: The caller's handle is not among the handles, one comes twice or is none.
            OperationTimeoutError: Some did not call in time: `missing`.
            PeerLostError: Some are gone.
        """
        self._runner.check_open()
        mine = self.backend.handle()
        if not isinstance(uuid, str) or not uuid:
            raise InvalidUsageError(f"uuid must be a non-empty text, got {uuid!r}")
        _check_settings(timeout, name, desc)
        if not isinstance(handles, Sequence) or isinstance(handles, str):
            raise InvalidUsageError(f"handles must be a list of what `handle` returned, got {handles!r}")
        if list(handles).count(mine) != 1 or len(set(handles)) != len(handles):
            raise InvalidUsageError(
                f"handles must name this process, and each once, got {list(handles)!r}; ranks that are "
                f"threads of one process and have built no group together have the same handle: merge their "
                f"groups with merge_remote_group"
            )
        info = membership.reconfigured(self.info, uuid, list(handles).index(mine), len(handles), name, desc)
        limit_s = self._limit_s(timeout)
        below = PrefixStore(f"reconfigure/{uuid}", self.spec.store if store is None else store)
        spec = self.spec.at(below, info, limit_s)
        try:
            return self._new(spec, self.backend.reconfigure(spec, handles))
        except Dist2Error as error:
            error.locate(info.name, "reconfigure", rank=info.rank)
            error.prefix(f"reconfigure {uuid!r} of {len(handles)} processes")
            raise


def _whole(value: object, argument: str) -> int:
    """Return a color or a key; True and False are ones, as in ``split_by(rank < 4)``."""
    found = int(value) if isinstance(value, bool) else as_int(value)
    if found is None or abs(found) >= 1 << 62:
        raise InvalidUsageError(f"{argument} must be an int that fits 62 bits, got {value!r}")
    return found


def _check_settings(timeout: Timeout, name: str | None, desc: str | None, prefix: str = "") -> None:
    """Check what any new group may be given."""
    if timeout is not None:
        seconds(timeout)
    check_names(name, desc, prefix)
