"""Which ranks arrive late at collectives, and whether that is more than noise.

Theory of operation. Every rank's flight recorder has the time of each call. `Ledger` puts together the
calls of one operation on all ranks of its group, on one clock, and takes the *lateness* of each rank: its
time minus the lower median of all, less the error of the clocks, and at least 0. With a median, up
to half of the ranks may be late without making the others look early. In a broadcast or scatter only the root
can be late: it may run ahead of the other ranks, which then are late to the next operation that all wait for.
If only the latter counted, noise that all ranks have alike would make stragglers of all ranks but the root.

Operations that ranks wait for together, at the end of a backward pass, are one *occasion*: a rank that is
late to each of its buckets delays the others once, by its largest lateness. Any other operation is an
occasion of its own. Where the following says "operation", it means an occasion.

Single operations say little: any rank is preempted now and then. So the operations of a group are divided
into *blocks* of some operations and at least a tenth of a second. A rank is *costly* in a block if its mean
lateness is more than `SHARE` of the time that an operation took there, and more than `LEAST_S`. Of the last
`BLOCKS` blocks, a rank is a straggler if

- it is costly in so many of them that chance would not do it: if the costly (rank, block) pairs, as many as
  were found, had been dealt to ranks and blocks at random, a rank would get that many with a probability
  (the tail of the hypergeometric distribution) of less than `ALPHA`, times ranks and scales (Bonferroni);
  and
- its mean lateness over all of them is costly as well.

The first condition compares ranks with each other, so that noise which all ranks have alike names no rank,
however strong. It takes blocks for independent, which noise that lasts longer than a block is not: blocks
are also merged by 4 and by 16, and a rank that is late for seconds because another process uses its core
*is* late. A rank that is late all the time is found on the smallest scale, one that stalls every few
seconds on a larger one.

Of two ranks one is always the later one, so noise that lasts for seconds would make stragglers of both in
turn. Therefore a rank of a pair must also have been later than the other by `PAIR` times, in the last blocks
and in all that are remembered.

A rank that waits for a straggler in one group arrives late in its other groups. It is a *victim*, and not
named there, if it was not late itself in the group where it waited, lost no more of the time than the
straggler cost, and not all members of the other group waited as well.

Nothing of this runs in an operation: it reads the flight recorder.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from math import comb
from typing import Any

import attrs

from dist2.runtime.rank_names import RankNames
from observability.clocks import Offset
from observability.entries import Entries

BLOCKS = 24
"""Blocks that a verdict is based on."""

SCALES = (1, 4, 16)
"""How many blocks in a row count as one."""

BLOCK_OPERATIONS = 3
BLOCK_NS = 100_000_000
"""A block ends with the operation that makes it both so many and so long."""

SHARE = 0.1
"""Part of the time between two operations that a late rank costs."""

LEAST_S = 200e-6
"""Less than this is never late."""

VICTIM = 1.25
"""How many times the share of a straggler that of its victim may be: both are measured."""

PAIR = 2.0
"""How many times as late as the other one a rank of two must be."""

ALPHA = 1e-6
"""Probability of a false verdict, if ranks were alike and blocks independent."""

MAX_PENDING = 8192
"""Operations of each group that not all ranks have reported yet."""

MAX_GROUPS = 256
"""Groups that are judged, the largest ones: each keeps its blocks, of 8 ranks up to 0.25 MB."""

NOBODY_KNOWN = Offset()


@attrs.frozen
class Straggler:
    """A rank that arrives late at the collectives of a group.

    Attributes:
        rank: In the job.
        group: Name of the group.
        late_s: By how much on average, in seconds.
        share: Part of the time between two operations that this is.
        operations: How many operations the verdict is based on,
        span_s: and how long they took together.
        probability: That chance alone would do this; see the theory of operation.
        name: The rank in words; if its rank in the group differs, with that, its host and pid.

    Examples:
        >>> late = observability.Straggler(3, "tp", 0.002, 0.1, 500, 10.0, 1e-9, "rank 3 (rank 1 of tp)")
        >>> late.sentence().split(", ")[0]
        'rank 3 (rank 1 of tp) arrives 2 ms late at collectives of group tp'
    """

    rank: int
    group: str
    late_s: float
    share: float
    operations: int
    span_s: float
    probability: float
    name: str

    def sentence(self) -> str:
        """Say it."""
        return (
            f"{self.name} arrives {self.late_s * 1e3:.3g} ms late at collectives of group {self.group}, "
            f"{self.share:.0%} of their time, in the last {self.operations} over {self.span_s:.1f} s"
        )


@attrs.define
class _Block:
    """Operations in a row: how many, over how long, and how late each late rank was in all of them."""

    operations: int = 0
    span_ns: int = 0
    late_ns: dict[int, int] = attrs.field(factory=dict)

    def add(self, operations: int, span_ns: int, late_ns: Mapping[int, int]) -> None:
        """Add operations."""
        self.operations += operations
        self.span_ns += span_ns
        for rank, each_ns in late_ns.items():
            self.late_ns[rank] = self.late_ns.get(rank, 0) + each_ns

    def mean_late_ns(self, rank: int) -> float:
        return self.late_ns.get(rank, 0) / max(1, self.operations)

    def share(self, rank: int) -> float:
        """Return which part of the time a rank cost the others."""
        return self.late_ns.get(rank, 0) / max(1, self.span_ns)

    def costly(self) -> list[int]:
        """Return the ranks whose lateness costs much."""
        least_ns = max(SHARE * max(1, self.span_ns), LEAST_S * 1e9 * max(1, self.operations))
        return [rank for rank, each_ns in self.late_ns.items() if each_ns > least_ns]


def _merged(blocks: Iterable[_Block]) -> _Block:
    whole = _Block()
    for block in blocks:
        whole.add(block.operations, block.span_ns, block.late_ns)
    return whole


def chance(costly_of_rank: int, costly: int, ranks: int, blocks: int) -> float:
    """Return how probable it is that one rank has so many costly blocks or more, if all were dealt at random.

    Args:
        costly_of_rank: Of the ``blocks`` of one rank.
        costly: Of all ``ranks * blocks``.
        ranks: How many.
        blocks: How many of each rank.
    """
    others = ranks * blocks - costly
    hits = range(costly_of_rank, min(blocks, costly) + 1)
    ways = sum(comb(costly, hit) * comb(others, blocks - hit) for hit in hits)
    return ways / comb(ranks * blocks, blocks)


@attrs.define(eq=False)
class _GroupLedger:
    """The operations of one group."""

    group: str
    ranks: tuple[int, ...]
    processes: Mapping[int, str]
    members: frozenset[int] = attrs.field(init=False)  # the ranks: a job may have thousands
    pending: dict[int, dict[int, int]] = attrs.field(factory=dict)
    telling: tuple[int, ...] = ()
    strides: dict[int, int] = attrs.field(factory=dict)
    roots: dict[int, int] = attrs.field(factory=dict)
    joint: dict[int, int] = attrs.field(factory=dict)
    step: int = -1  # of the last joint operation; -1 before the first one
    weight: int = 1  # so many occasions are that one
    most_late_ns: dict[int, int] = attrs.field(factory=dict)  # in that
    closed_seq: int = 0
    last_ns: int = 0  # of the operation before; 0 where there is none next to it
    now: _Block = attrs.field(factory=_Block)
    blocks: deque[_Block] = attrs.field(factory=lambda: deque(maxlen=BLOCKS * SCALES[-1]))
    ended: int = 0
    found: Mapping[int, Straggler] = attrs.field(factory=dict)  # lately

    def __attrs_post_init__(self) -> None:
        self.members = frozenset(self.ranks)

    def take(self, rank: int, entries: Entries, offset: Offset) -> None:
        self.strides[rank] = entries.stride
        if entries.torn:
            self.last_ns = 0
        for seq, at_ns in entries.called_ns:
            if seq > self.closed_seq:
                self.pending.setdefault(seq, {})[rank] = at_ns + offset.offset_ns
        self.roots.update(entries.roots)
        self.joint.update(entries.joint)

    def close(self, errors: Mapping[int, int], telling: Container[int]) -> None:
        """Process the operations reported by all ranks that report, in their order."""
        for seq in sorted(self.pending)[:-MAX_PENDING]:
            del self.pending[seq]
        self.roots = {seq: root for seq, root in self.roots.items() if seq in self.pending}
        self.joint = {seq: step for seq, step in self.joint.items() if seq in self.pending}
        self.telling = tuple(rank for rank in self.ranks if rank in telling)
        if len(self.telling) < 2:
            return
        needed = set(self.telling)
        whole = sorted(seq for seq, times in self.pending.items() if times.keys() >= needed)
        for seq in whole:
            self._operation(self.pending.pop(seq), errors, self.roots.get(seq), self.joint.get(seq, -1))
        if whole:
            self.closed_seq = whole[-1]
            for seq in [seq for seq in self.pending if seq < self.closed_seq]:
                del self.pending[seq]  # a rank has forgotten it

    def _operation(
        self, times: Mapping[int, int], errors: Mapping[int, int], root: int | None, step: int
    ) -> None:
        in_order = sorted(self.telling, key=times.__getitem__)
        middle = (len(in_order) - 1) // 2
        known_ns = times[in_order[middle]] + errors.get(in_order[middle], 0)
        late_ns = {
            rank: each_ns
            for rank in in_order[middle + 1 :]
            if (each_ns := times[rank] - known_ns - errors.get(rank, 0)) > 0 and root in (None, rank)
        }
        before_ns, self.last_ns = self.last_ns, times[in_order[-1]]  # no rank leaves before
        if not before_ns:
            return  # there is no time between two
        occasions, cost_ns = self._cost(late_ns, step)
        self.now.add(occasions, max(0, self.last_ns - before_ns), cost_ns)
        if self.now.operations >= BLOCK_OPERATIONS and self.now.span_ns >= BLOCK_NS:
            self.blocks.append(self.now)
            self.ended += 1
            self.now = _Block()

    def _cost(self, late_ns: Mapping[int, int], step: int) -> tuple[int, dict[int, int]]:
        """Return how many occasions an operation adds, and how late each rank was in these."""
        stride = max(self.strides.values())  # it stands for so many
        if step < 0:
            return stride, {rank: stride * each_ns for rank, each_ns in late_ns.items()}
        fresh = 0
        if step != self.step:
            fresh = max(1, min(stride, step - self.step))  # with those steps of which no operation is told
            self.step, self.weight, self.most_late_ns = step, fresh, {}
        cost_ns = {}
        for rank, each_ns in late_ns.items():
            most_ns = self.most_late_ns.get(rank, 0)
            cost_ns[rank] = self.weight * max(0, each_ns - most_ns)
            self.most_late_ns[rank] = max(most_ns, each_ns)
        return fresh, cost_ns

    @property
    def names(self) -> RankNames:
        return RankNames(self.group, self.ranks, lambda rank: self.processes.get(self.ranks[rank], ""))

    def windows(self) -> Iterable[list[_Block]]:
        """Yield the last blocks, on each scale on which there are enough."""
        for scale in SCALES:
            if len(self.blocks) >= scale * BLOCKS:
                last = list(self.blocks)[-scale * BLOCKS :]
                yield [_merged(last[at : at + scale]) for at in range(0, len(last), scale)]

    def stragglers(self) -> dict[int, Straggler]:
        found: dict[int, Straggler] = {}
        for blocks in self.windows():
            told = set(self.telling)
            costly = Counter(rank for block in blocks for rank in block.costly() if rank in told)
            whole, total = _merged(blocks), costly.total()
            tests = len(self.telling) * len(SCALES)
            for rank in sorted(told.intersection(whole.costly())):
                if rank in found or not self._is_later(rank, whole):
                    continue
                probability = tests * chance(costly[rank], total, len(self.telling), len(blocks))
                if probability < ALPHA:
                    found[rank] = Straggler(
                        rank=rank,
                        group=self.group,
                        late_s=whole.mean_late_ns(rank) / 1e9,
                        share=whole.share(rank),
                        operations=whole.operations,
                        span_s=whole.span_ns / 1e9,
                        probability=probability,
                        name=self.names([self.ranks.index(rank)]),
                    )
        return found

    def is_judged(self, rank: int, whole: _Block) -> bool:
        """Whether a rank that is no straggler has been seen for long enough to say so.

        A rank that costs much may yet be found on a larger scale.
        """
        scale = SCALES[-1] if rank in whole.costly() else SCALES[0]
        return len(self.blocks) >= scale * BLOCKS

    def _is_later(self, rank: int, whole: _Block) -> bool:
        """Whether a rank of two is later than the other; True in larger groups, where the median tells."""
        others = [other for other in self.telling if other != rank]
        if len(others) != 1:
            return True
        return all(
            late.get(rank, 0) > PAIR * late.get(others[0], 0)
            for late in (whole.late_ns, _merged(self.blocks).late_ns)
        )


class Ledger:
    """Times at which ranks called the operations of their groups, as far as reported.

    Attributes:
        late_s: By how much stragglers arrived late while they were known as such: seconds by rank.
        left_out: How many groups are not judged, because there are too many.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _GroupLedger] = {}
        self._errors: dict[int, int] = {}
        self._processes: dict[int, str] = {}
        self._listed: set[str] = set()
        self._counted: dict[tuple[str, int], int] = {}
        self.late_s: dict[int, float] = {}
        self.left_out = 0

    def take(
        self, rank: int, entries: Iterable[Entries], offset: Offset = NOBODY_KNOWN, process: str = ""
    ) -> None:
        """Add the entries of one rank.

        Args:
            rank: In the job.
            entries: Of each of its open groups, without operations where there is nothing new.
            offset: Of its clock.
            process: Its host and pid in words, if known.
        """
        self._errors[rank] = offset.error_ns
        self._processes[rank] = process
        for each in entries:
            self._listed.add(each.uid)
            known = self._groups.get(each.uid)
            if known is None:
                known = self._groups[each.uid] = _GroupLedger(each.group, each.ranks, self._processes)
            if rank in known.members:
                known.take(rank, each, offset)

    def close(self, telling: Container[int] | None = None) -> list[Straggler]:
        """Judge after the reports of ranks; return the stragglers, the one that costs most first.

        Args:
            telling: The ranks that have reported; by default all that ever have. Others are not judged, and
                do not delay the verdict on these.
        """
        telling = self._errors if telling is None else telling
        listed = [uid for uid in self._groups if uid in self._listed]  # the others no rank has any more
        self._listed.clear()
        judged = sorted(listed, key=lambda uid: -len(self._groups[uid].ranks))[:MAX_GROUPS]
        self._groups = {uid: self._groups[uid] for uid in judged}
        self.left_out = len(listed) - len(judged)
        for group in self._groups.values():
            group.close(self._errors, telling)
            group.found = group.stragglers()
        self._clear_victims()
        self._count()
        found = [each for group in self._groups.values() for each in group.found.values()]
        return sorted(found, key=lambda each: (-each.share, each.rank))

    def _clear_victims(self) -> None:
        """Take back the verdicts on ranks that were late because they had waited in another group."""
        causes = {
            (uid, rank): self._causes(group, each)
            for uid, group in self._groups.items()
            for rank, each in group.found.items()
        }
        cleared: set[tuple[str, int]] = set()
        known = {rank for (_, rank), others in causes.items() if not others}
        while known:  # a victim has victims of its own
            reached = {key for key, others in causes.items() if key not in cleared and others & known}
            cleared |= reached
            known = {rank for _, rank in reached}
        for uid, group in self._groups.items():
            group.found = {rank: each for rank, each in group.found.items() if (uid, rank) not in cleared}

    def _causes(self, group: _GroupLedger, late: Straggler) -> set[int]:
        """Return the stragglers that a straggler waited for in other groups, unlike all of its own."""
        return {
            rank
            for other in self._groups.values()
            if late.rank in other.members
            and late.rank not in other.found
            and not group.members <= other.members
            for rank, each in other.found.items()
            if late.share <= VICTIM * each.share
        }

    def _count(self) -> None:
        """Count the lateness of stragglers: in the last `BLOCKS` before they were found, and later ones.

        A rank that is late in several groups at a time costs once.
        """
        late_s: dict[int, float] = {}
        counted: dict[tuple[str, int], int] = {}
        for uid, group in self._groups.items():
            for rank in group.found:
                since = self._counted.get((uid, rank), group.ended - BLOCKS)
                fresh = min(group.ended - since, len(group.blocks))
                late_ns = sum(block.late_ns.get(rank, 0) for block in list(group.blocks)[-fresh:] if fresh)
                late_s[rank] = max(late_s.get(rank, 0.0), late_ns / 1e9)
                counted[uid, rank] = group.ended
        self._counted = counted
        for rank, each_s in late_s.items():
            self.late_s[rank] = self.late_s.get(rank, 0.0) + each_s

    @property
    def operations(self) -> int:
        """How many operations the latest verdict may be based on at most."""
        return sum(block.operations for group in self._groups.values() for block in group.blocks)

    def ranking(self) -> list[dict[str, Any]]:
        """Return how late each rank arrived in each group lately, straggler or not; the latest rank first.

        A row that is not ``judged`` clears its rank of nothing: there were too few operations.
        """
        rows = []
        for group in self._groups.values():
            whole = _merged(list(group.blocks)[-BLOCKS:])
            if whole.operations:
                rows += [
                    {
                        "rank": rank,
                        "group": group.group,
                        "late_s": whole.mean_late_ns(rank) / 1e9,
                        "share": whole.share(rank),
                        "operations": whole.operations,
                        "judged": rank in group.found or group.is_judged(rank, whole),
                    }
                    for rank in group.ranks
                ]
        return sorted(rows, key=lambda row: (-row["share"], row["rank"]))
