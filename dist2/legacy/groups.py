"""Groups made from the default group: `new_group`, subgroups, `split_group`, `shrink_group`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group.creation import open_group
from dist2.group.process_group import ProcessGroup
from dist2.legacy.checks import limit_or_default
from dist2.legacy.lifecycle import check_backend, chosen_backend, close, close_all, options_of
from dist2.legacy.world import (
    NON_GROUP_MEMBER,
    Group,
    GroupRanks,
    as_rank,
    group_ranks,
    is_outside,
    worlds,
)
from dist2.membership import members
from dist2.runtime.arguments import as_int
from dist2.runtime.signals import holds_no_lock
from dist2.store import PrefixStore

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup | int | None:
    """Return a group of some ranks of the default group; `NON_GROUP_MEMBER` to ranks that are not in it.

    All ranks of the default group call it, in the same order.

    Args:
        ranks: Global ranks; all by default.
        timeout: Limit of the group's operations; by default 30 minutes.
        backend: By default that of the default group, whose links the new group then shares.
        pg_options: A mapping of options for the backend, or an options object of torch.
        use_local_synchronization: Only the ranks in the group call; others may, and nobody waits for them.
        group_desc: Free text.
        device_id: Ignored: the default group determines the device of tensors.
        sort_ranks: Number the members by global rank; otherwise in the order given.

    Raises:
        InvalidUsageError: A rank is out of range or listed twice; on all ranks, as for any wrong argument.
    """
    parent = group_ranks(None)
    chosen = _chosen(parent, ranks, sort_ranks)
    allowed = limit_or_default(timeout)
    kind = parent.pg.name() if backend is None else chosen_backend(backend, None)[0]
    check_backend(kind)
    options = options_of(pg_options, kind)
    # Members and others must agree on names, so all count. Where only members call, the split names it.
    name = None
    if not use_local_synchronization:
        worlds.of(parent.pg).made += 1
        name = f"{parent.pg.group_name}/{parent.pg._count_subgroup('legacy')}"
    if parent.pg.rank() not in chosen:
        return NON_GROUP_MEMBER
    if backend is None and pg_options is None:
        made = parent.pg.split(chosen, timeout=allowed, name=name, desc=group_desc)
    else:
        made = _opened(parent.pg, chosen, kind, allowed, name, group_desc, options)
    return _remembered(made, parent, chosen)


def _chosen(parent: GroupRanks, ranks: Sequence[int] | None, sort_ranks: bool) -> list[int]:
    size = parent.pg.size()
    chosen = list(range(size)) if ranks is None else _ranks_in(ranks, "ranks")
    if sort_ranks:
        chosen.sort()
    if len(set(chosen)) != len(chosen):
        raise InvalidUsageError(f"ranks names a rank twice (duplicate ranks): {chosen}")
    if len(chosen) > size:
        raise InvalidUsageError(
            "the new group's world size should be less or equal to the world size set by "
            f"init_process_group, got {len(chosen)} and {size}"
        )
    outside = [rank for rank in chosen if not 0 <= rank < size]
    if outside:
        raise InvalidUsageError(
            f"Rank {outside[0]} is out of range: the new group's rank should be within the world_size set by "
            f"init_process_group ({size}), got {chosen}"
        )
    return chosen


def _ranks_in(ranks: object, argument: str) -> list[int]:
    if not isinstance(ranks, Iterable):
        raise ArgumentTypeError(f"{argument} must be a list of ranks, got {ranks!r} ({type(ranks).__name__})")
    return list(map(as_rank, ranks))


def _cuts_in(cuts: object, argument: str) -> list[list[int]]:
    if not isinstance(cuts, (list, tuple)):
        raise ArgumentTypeError(
            f"{argument} must be a list of lists of ranks, got {cuts!r} ({type(cuts).__name__})"
        )
    return [_ranks_in(ranks, f"{argument}[{place}]") for place, ranks in enumerate(cuts)]


def _opened(
    parent: ProcessGroup,
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta,
    name: str | None,
    desc: str | None,
    options: Mapping[str, Any],
) -> ProcessGroup:
    """Return a group on a separate backend: its members meet at the parent's store."""
    nth = parent._count_subgroup(f"new{tuple(ranks)}")
    info = members.subgroup(parent.info, ranks, nth, "new", name, desc)
    spec = attrs.evolve(
        parent.spec,
        info=attrs.evolve(info, backend=backend),
        store=PrefixStore(f"legacy/{info.uid}", parent.get_group_store()),
        timeout_s=timeout.total_seconds(),
        options=options,
    )
    return open_group(spec)


def _remembered(made: ProcessGroup | None, parent: GroupRanks, ranks: Sequence[int]) -> ProcessGroup:
    """Note the global ranks of a new group: those that its members have in the default group."""
    assert made is not None  # the caller is a member
    known = group_ranks(parent.pg).ranks
    return worlds.add(parent.pg, made, [known[rank] for rank in ranks])


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup | int | None]]:
    """Cut a group into groups of equal size, of neighbouring ranks; return one's own, and all.

    Args:
        group_size: Members of each; by default as many as the host has accelerators.
        group: The group to cut; by default the default group.
    """
    ranks = group_ranks(group).ranks
    size = len(ranks)
    each = torch.accelerator.device_count() if group_size is None else as_int(group_size)
    if each is None:
        raise ArgumentTypeError(
            f"group_size must be an int, got {group_size!r} ({type(group_size).__name__})"
        )
    if group_size is None and not each:
        raise InvalidUsageError("Default group size only takes effect when an accelerator is available")
    if each < 1 or each > size:
        raise InvalidUsageError(f"The arg 'group_size' ({each}) must not exceed the world size ({size})")
    if size % each:
        raise InvalidUsageError(f"The world size ({size}) must be divisible by 'group_size' ({each})")
    cuts = [list(ranks[start : start + each]) for start in range(0, size, each)]
    mine, made = new_subgroups_by_enumeration(cuts, timeout, backend, pg_options, group_desc)
    assert mine is not None  # the cuts cover everyone
    return mine, made


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: list[list[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int | None]]:
    """Make a group of each list of global ranks; return one's own (None if in none), and all.

    Raises:
        InvalidUsageError: A rank is in two lists.
    """
    cuts = _cuts_in(ranks_per_subgroup_list, "ranks_per_subgroup_list")
    if not cuts:
        raise InvalidUsageError("The arg 'ranks_per_subgroup_list' cannot be empty")
    everyone = [rank for ranks in cuts for rank in ranks]
    twice = sorted({rank for rank in everyone if everyone.count(rank) > 1})
    if twice:
        raise InvalidUsageError(f"Rank(s) {twice} have been assigned to both of two subgroups")
    made = [new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in cuts]
    mine = next((each for each in made if isinstance(each, ProcessGroup)), None)
    return mine, made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Cut a group into several; return one's own, or None.

    All ranks of the parent call it.

    Args:
        parent_pg: The default group by default.
        split_ranks: Lists of ranks of the parent; sorted.
        timeout: Limit of the new group's operations; by default 30 minutes.
        pg_options: Must be None: the new group is like its parent.
        group_desc: Free text.
        backend: None or the parent's.
    """
    cuts = [] if split_ranks is None else _cuts_in(split_ranks, "split_ranks")
    if not cuts:
        raise InvalidUsageError("split_ranks cannot be None or empty")
    parent = group_ranks(parent_pg)
    if pg_options is not None or (
        backend is not None and chosen_backend(backend, None)[0] != parent.pg.name()
    ):
        raise InvalidUsageError(f"a split has its parent's backend {parent.pg.name()!r} and options")
    for ranks in cuts:
        if not ranks or len(set(ranks)) != len(ranks):
            raise InvalidUsageError(f"the split group cannot be empty or have duplicate ranks, got {ranks}")
    mine = next((sorted(ranks) for ranks in cuts if parent.pg.rank() in ranks), None)
    if mine is None:
        return None
    made = parent.pg.split(mine, timeout=limit_or_default(timeout), desc=group_desc)
    return _remembered(made, parent, mine)


@holds_no_lock
def shrink_group(
    ranks_to_exclude: list[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any | None = None,
) -> ProcessGroup:
    """Return a group without some ranks, and close the old one. Only those that stay call it.

    Shrinking the default group makes the new group the default one and closes all others, as global
    ranks change.

    Args:
        ranks_to_exclude: Ranks of the group.
        group: The default group by default.
        shrink_flags: `SHRINK_ABORT` aborts running operations; otherwise they must have ended.
        pg_options: Must be None: the new group is like the old one.
    """
    if not isinstance(ranks_to_exclude, list):
        raise ArgumentTypeError(f"ranks_to_exclude must be a list, but got {type(ranks_to_exclude).__name__}")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise InvalidUsageError(f"Invalid shrink_flags value: {shrink_flags}")
    if pg_options is not None or is_outside(group):
        raise InvalidUsageError(f"cannot shrink {group!r} with pg_options={pg_options!r}")
    old = group_ranks(group)
    new = old.pg.shrink(ranks_to_exclude)
    if shrink_flags == SHRINK_ABORT:
        old.pg.abort()
    world = worlds.of(old.pg)
    if old.pg is not world.default:
        ranks = [old.ranks[rank] for rank in range(old.pg.size()) if rank not in ranks_to_exclude]
        worlds.add(old.pg, new, ranks)
        close(old.pg)
        return new
    is_in_torch = world.in_torch is not None
    close_all(world)
    worlds.begin(world, new)
    if is_in_torch:
        world.enter_torch()
    return new
