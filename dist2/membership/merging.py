"""Merging: members of several groups meet over a store to make one group of all of them.

Theory of operation: each rank takes a number from a counter in the store, writes its registration under it,
and counts the registrations; the last one sets the key for which all wait. Then all read the same
registrations and sort them by the same order, so that they agree on the ranks of the new group without
another message.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
from torch.distributed import Store

from dist2.errors import InvalidUsageError, OperationTimeoutError, WireError
from dist2.operation.signature import GroupInfo
from dist2.runtime.arguments import as_int
from dist2.runtime.deadline import Deadline
from dist2.runtime.rank_names import RANKS, RankNames
from dist2.store.waiting import Look, arrive

_MADE_FROM_IT = re.compile(r"(/\w+\([\d,]*\)#\d+)+$")
"""The suffix that `membership.subgroup` adds to the uid of a group, once or several times."""
_YES = "yes"
_ONE_EACH = "each merge, also one after another has failed, needs keys of its own: give it a PrefixStore"


@attrs.frozen
class Comer:
    """One rank that takes part in the merge.

    Attributes:
        token: Its own, by which it finds itself.
        uid: The group it is from.
        rank: Its rank there.
        global_rank: Its rank in the first group of its job.
    """

    token: str = attrs.field(validator=attrs.validators.instance_of(str))
    uid: str = attrs.field(validator=attrs.validators.instance_of(str))
    rank: int = attrs.field(validator=attrs.validators.instance_of(int))
    global_rank: int = attrs.field(validator=attrs.validators.instance_of(int))

    @property
    def job(self) -> str:
        """The uid of the group that its group was made from, in the end: of itself, where it is new."""
        return _MADE_FROM_IT.sub("", self.uid)


def meet(
    info: GroupInfo,
    store: Store,
    size: int,
    timeout_s: float,
    name: str | None,
    desc: str | None,
    look: Look = lambda: None,
    last_seen: Callable[[list[int]], dict[int, str]] = lambda ranks: {},
    names: RankNames = RANKS,
) -> GroupInfo:
    """Return the identity of the merged group, once all its members have registered in the store.

    Ranks of one job are adjacent. The job with most ranks comes first; among groups of one job, the one with
    the lowest global rank; inside a group the order stays. So survivors keep their order and newcomers follow
    them. Of two jobs with equally many ranks, one with a derived group (by `shrink`) comes before one with a
    new group. Global ranks are kept where they are all different (parts of one job), and else counted from 0.

    Args:
        info: The caller's group.
        store: The common store; used for one merge only (or a `PrefixStore` for each).
        size: Members of the merged group: of all groups together.
        timeout_s: How long to wait for them.
        name: The group's name in c10d.
        desc: Free text.
        look: Called many times a second meanwhile; it raises to end the wait.
        last_seen: Returns the last known operations of missing ranks of the caller's group.
        names: Names the members of the caller's group in texts.

    Raises:
        InvalidUsageError: ``size`` is less than the caller's group, more ranks registered, or the store has
            keys of another merge.
        OperationTimeoutError: Fewer registered in time; names those that did.
        WireError: The store holds malformed values.
    """
    counted = as_int(size)
    if counted is None or counted < info.world_size:
        raise InvalidUsageError(
            f"size must be an int that counts all merged ranks, at least the {info.world_size} of group "
            f"{info.name!r}; got {size!r}"
        )
    size = counted
    asked = store.compare_set("merge/size", "", str(size)).decode(errors="replace")
    if asked != str(size):
        differs = f"size is {asked} on one rank, and {size} on {names([info.rank])} of group {info.name!r}"
        store.compare_set("merge/complete", "", differs)  # for those that wait
        raise InvalidUsageError(differs)
    mine = Comer(secrets.token_hex(8), info.uid, info.rank, info.global_ranks[info.rank])
    nth = store.add("merge/comers", 1) - 1
    if nth >= size:
        raise InvalidUsageError(f"size is {size}, but {nth + 1} ranks use this store: {_ONE_EACH}")
    store.set(_key(nth), json.dumps(attrs.asdict(mine)))
    # All wait for one key: if each waited for all keys, each look would cost size ** 2 lookups.
    if store.add("merge/written", 1) == size:
        store.compare_set("merge/complete", "", _YES)
    keys = [_key(nth) for nth in range(size)]
    if not arrive(store, ["merge/complete"], Deadline.after(timeout_s), look):
        raise _too_few(info, store, keys, timeout_s, last_seen, names)
    verdict = store.get("merge/complete").decode(errors="replace")
    if verdict != _YES:
        raise InvalidUsageError(verdict)
    comers = in_order([_read(key, value) for key, value in zip(keys, store.multi_get(keys), strict=True)])
    seats = [(comer.uid, comer.rank) for comer in comers]
    twice = next((comer for comer in comers if seats.count((comer.uid, comer.rank)) > 1), None)
    if twice is not None:
        raise InvalidUsageError(f"group {twice.uid!r}: {_named(info, [twice])} registered twice: {_ONE_EACH}")
    global_ranks = tuple(comer.global_rank for comer in comers)
    uid = f"merge({'+'.join(dict.fromkeys(comer.uid for comer in comers))})#{comers[0].token}"
    return attrs.evolve(
        info,
        uid=uid,
        name=name or f"merged-{comers[0].token}",
        desc=info.desc if desc is None else desc,
        rank=comers.index(mine),
        global_ranks=global_ranks if len(set(global_ranks)) == size else tuple(range(size)),
    )


def in_order(comers: Sequence[Comer]) -> list[Comer]:
    """Return comers by their new ranks: see `meet`."""
    first: dict[str, int] = {}
    for comer in sorted(comers, key=lambda each: each.rank):
        first.setdefault(comer.uid, comer.global_rank)
    brought = Counter(comer.job for comer in comers)
    lowest = {comer.job: min(first[each.uid] for each in comers if each.job == comer.job) for comer in comers}

    def place(comer: Comer) -> tuple[int, bool, int, str, int, str, int]:
        job, uid = comer.job, comer.uid
        return -brought[job], uid == job, lowest[job], job, first[uid], uid, comer.rank

    return sorted(comers, key=place)


def _too_few(
    info: GroupInfo,
    store: Store,
    keys: list[str],
    timeout_s: float,
    last_seen: Callable[[list[int]], dict[int, str]],
    names: RankNames,
) -> OperationTimeoutError:
    """Return the error that names the ranks that registered, and the missing ones of the caller's group."""
    came = [_read(key, store.get(key)) for key in keys if store.check([key])]
    ours = {comer.rank for comer in came if comer.uid == info.uid}
    missing = [rank for rank in range(info.world_size) if rank not in ours]
    seen = last_seen(missing)
    return OperationTimeoutError(
        f"merge_remote_group of group {info.name!r}: {len(came)} of {len(keys)} ranks arrived within "
        f"{timeout_s:.3g} s: {_named(info, came)}"
        + (f"; of this group {names(missing)} did not{names.last_seen(seen)}" if missing else "")
        + f"; to try again: {_ONE_EACH}",
        missing=missing,
        last_seen=seen,
        timeout_s=timeout_s,
        group=info.name,
        op="merge_remote_group",
        rank=info.rank,
        members=info.global_ranks,
    )


def _named(info: GroupInfo, comers: Sequence[Comer]) -> str:
    """Return ranks of several groups for a message."""
    named = []
    for uid in dict.fromkeys(comer.uid for comer in comers):
        ranks = {comer.rank: comer.global_rank for comer in comers if comer.uid == uid}
        name = info.name if uid == info.uid else uid
        named.append(RankNames(name, [ranks.get(each, each) for each in range(1 + max(ranks))])(ranks))
    return ", ".join(named)


def _read(key: str, value: bytes) -> Comer:
    """Return the member that has written a key.

    Raises:
        WireError: It is no registration for a merge.
    """
    try:
        return Comer(**json.loads(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(
            f"key {key!r} of the store is not the registration of a rank: {value[:80]!r}"
        ) from error


def _key(nth: int) -> str:
    return f"merge/comer/{nth}"
