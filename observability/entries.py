"""Times of this rank's calls, which control planes exchange to find the rank that arrives late.

The times are those of the flight recorder, so that they cost nothing when operations run. They are those of
operations in which every rank waits for every other, or for the root: another rank that is late to a
broadcast delays no rank.

DistributedDataParallel calls an operation for each bucket of gradients, and waits for all of them at the end
of the backward pass: they are told as *joint*, with the number of the optimizer's step before. Other
asynchronous operations are assumed to be waited for one by one, as FSDP does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from time import monotonic_ns
from typing import Any

import attrs

from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo
from dist2.runtime.rank_names import host_and_pid
from observability.clocks import clock_id
from observability.flight_recorder import FlightRecorder, global_rank
from observability.job.rank_text import rank_text, ranks_of
from observability.optimizer_steps import optimizer_steps, step_at

Document = dict[str, Any]

MEETINGS = frozenset(
    {
        OpKind.ALL_REDUCE,
        OpKind.ALL_REDUCE_COALESCED,
        OpKind.ALL_GATHER,
        OpKind.ALL_GATHER_V,
        OpKind.ALL_GATHER_SINGLE,
        OpKind.ALL_GATHER_SINGLE_COALESCED,
        OpKind.REDUCE_SCATTER,
        OpKind.REDUCE_SCATTER_V,
        OpKind.REDUCE_SCATTER_SINGLE,
        OpKind.REDUCE_SCATTER_SINGLE_COALESCED,
        OpKind.ALL_TO_ALL,
        OpKind.ALL_TO_ALL_SINGLE,
        OpKind.BARRIER,
    }
)
"""Operations that end on no rank before all have called them."""

FROM_ROOT = frozenset({OpKind.BROADCAST, OpKind.SCATTER})
"""Operations in which all ranks wait for the root, which may run ahead."""

_COUNTED = MEETINGS | FROM_ROOT

MOST_TOLD = 512
"""Operations of a group in one report."""

_PAIRS = ("called_ns", "roots", "joint")

OUT_OF_ORDER_NS = 1_000_000_000
"""By how much the recorder's order may differ from that of the beginnings: threads take turns."""


@attrs.frozen
class Entries:
    """When one rank called the operations of one group.

    Attributes:
        uid: Of the group.
        group: Its name.
        ranks: Ranks of its members in the job.
        called_ns: Sequence number of each operation, and the caller's monotonic nanosecond of the call.
        stride: Operations whose number it divides are reported.
        torn: The recorder has dropped operations between the last report and this one.
        roots: Sequence number, and root's rank in the job, of each operation in which all wait for the root.
        joint: Sequence number, and number of the optimizer step before, of each operation that is waited for
            together with others of that step.
    """

    uid: str
    group: str
    ranks: tuple[int, ...]
    called_ns: tuple[tuple[int, int], ...]
    stride: int = 1
    torn: bool = False
    roots: tuple[tuple[int, int], ...] = ()
    joint: tuple[tuple[int, int], ...] = ()

    def document(self) -> Document:
        """Return it as JSON has it; pairs one after another, as a list for each would take as long again."""
        pairs = {name: list(chain.from_iterable(getattr(self, name))) for name in _PAIRS}
        return {**attrs.asdict(self, recurse=False), **pairs, "ranks": rank_text(self.ranks)}

    @classmethod
    def of(cls, document: Document) -> Entries:
        """Read it back.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        return cls(
            uid=str(document["uid"]),
            group=str(document["group"]),
            ranks=_members(str(document["ranks"])),
            stride=max(1, int(document["stride"])),
            torn=bool(document["torn"]),
            **{name: _paired(document[name]) for name in _PAIRS},
        )


@lru_cache(64)  # all ranks of a group tell the same
def _members(text: str) -> tuple[int, ...]:
    return tuple(ranks_of(text))


def _paired(listed: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    numbers = list(map(int, listed))
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def entries_of(
    recorder: FlightRecorder, rank: int, after_ns: int = 0, most: int = MOST_TOLD
) -> tuple[list[Entries], int]:
    """Return when a rank called the operations of its open groups, and when the last of them began.

    Groups without such operations are listed as well.

    Args:
        recorder: Remembers.
        rank: In the job; only of use where ranks are threads.
        after_ns: Leave out operations that began up to this monotonic nanosecond: an earlier second result.
        most: Number of operations of each group.
    """
    newest_ns = after_ns
    called: dict[GroupInfo, list[Operation]] = {}
    torn = True
    for operation in reversed(recorder.recent()):
        signature, began_ns = operation.signature, operation.started_ns
        if began_ns == 0:
            continue  # in this very moment
        if began_ns <= after_ns:
            torn = False
            if began_ns <= after_ns - OUT_OF_ORDER_NS:
                break
            continue
        newest_ns = max(newest_ns, began_ns)
        if signature.kind in _COUNTED and operation.seq and global_rank(signature.group) == rank:
            called.setdefault(signature.group, []).append(operation)
    told = [
        _told(info, called.get(info, []), torn and after_ns > 0, most)
        for info in recorder.open_groups()
        if info.world_size > 1 and global_rank(info) == rank
    ]
    return told, newest_ns


def _told(info: GroupInfo, operations: list[Operation], torn: bool, most: int) -> Entries:
    """Return some of the operations, if there are many: those of numbers that other ranks choose as well."""
    stride = 1
    while len(operations) > most * stride:
        stride *= 2
    chosen = [each for each in operations if each.seq % stride == 0]
    called_ns = tuple(sorted((each.seq, each.created_ns) for each in chosen))
    roots = tuple(
        (each.seq, info.global_ranks[each.signature.root])
        for each in chosen
        if each.signature.kind in FROM_ROOT and each.signature.root is not None
    )
    joint = _joint(chosen, optimizer_steps.known())
    return Entries(info.uid, info.name, info.global_ranks, called_ns, stride, torn, roots, joint)


def _joint(operations: list[Operation], ends: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the operations of DistributedDataParallel, each with the number of the optimizer step before.

    It calls asynchronous `all_reduce`, and the innermost function of the user's there is the one that calls
    ``backward``. If such operations come from several lines, they may be of tensor parallelism, which waits
    for each: then none are joint.

    Args:
        operations: Those of a group.
        ends: As `OptimizerSteps.known` returns it.
    """
    alike = [each for each in operations if each.is_async and each.signature.kind is OpKind.ALL_REDUCE]
    places = {(each.code, each.instruction) for each in alike}
    code = alike[0].code if len(places) == 1 else None
    if not ends or code is None or "backward" not in code.co_names:
        return ()
    return tuple((each.seq, step_at(ends, each.created_ns)) for each in alike)


def document_of(recorder: FlightRecorder, rank: int, after_ns: int = 0, most: int = MOST_TOLD) -> Document:
    """Return the entries of a rank, with its process and clock, as JSON has them."""
    entries, newest_ns = entries_of(recorder, rank, after_ns, most)
    groups = [each.document() for each in entries]
    return {
        "rank": rank,
        "process": host_and_pid(socket.gethostname(), os.getpid()),
        "clock": clock_id(),
        "groups": groups,
        "newest_ns": newest_ns,
        "now_ns": monotonic_ns(),
    }
