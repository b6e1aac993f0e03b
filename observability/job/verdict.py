"""What a diagnosis says: operations that wait, the ranks that they wait for, the verdict. See `diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from observability.job.answer import State
from observability.job.rank_text import named

Key = tuple[str, int, bool, int]
"""An operation of the job: uid of its group, number, whether it is a message, the rank of a message or -1."""

SENTENCES = 3
"""Sentences of the verdict in a line of a log, or in an error."""


@attrs.frozen
class Missing:
    """A rank that others wait for in an operation.

    Attributes:
        rank: In the job.
        last: The last it did in that group: ``barrier #201 at job.py:18``; empty where unknown.
        stands: Where its main thread stands, or why it does not answer.
        answers: Whether it answered.
        place: ``rank 1 of tp, host a, pid 4711``, where its rank in the group differs; else empty.
    """

    rank: int
    last: str
    stands: str
    answers: bool
    place: str = ""

    def __str__(self) -> str:
        return self.name if self.last else f"{self.name} ({self.stands})"

    @property
    def name(self) -> str:
        """Its rank, with its place and the last that it did, where these are known."""
        known = [self.place, f"last seen: {self.last}" if self.last else ""]
        beside = "; ".join(filter(None, known))
        return f"rank {self.rank} ({beside})" if beside else f"rank {self.rank}"


@attrs.frozen
class Waiting:
    """An operation that some ranks are inside of, and the ranks that it waits for.

    Where no operation waits, also another call of dist2 that most ranks are in; it has no group.

    Attributes:
        key: Which one.
        group: Name of its group.
        op: Name of the operation.
        call: The call of the first rank inside.
        where: Its line.
        ranks: The ranks inside, in the order of the job.
        age_s: Since the first of them called.
        missing: The ranks that have not entered it, `MAX_MISSING` at most.
        more: How many others have not.
        differs: Whether the ranks inside called different operations under its number.
        met: Of a message: the rank in the matching call; None if none is.
    """

    key: Key
    group: str
    op: str
    call: str
    where: str
    ranks: tuple[int, ...]
    age_s: float
    missing: tuple[Missing, ...]
    more: int = 0
    differs: bool = False
    met: int | None = None

    @property
    def title(self) -> str:
        """The operation in words."""
        if not self.group:
            return f"{self.op} at {self.where}"
        return f"{self.op} #{self.key[1]} of group {self.group}"

    def sentence(self, age_s: float | None = None) -> str:
        """Say which operation waits for which ranks, and how long."""
        age_s = self.age_s if age_s is None else age_s
        if not self.missing and self.differs:
            name = f"operation #{self.key[1]} of group {self.group}"
            return f"{name}, which differs between its ranks, has not ended for {age_s:.1f} s"
        if self.met is not None:
            ranks = f"of ranks {self.ranks[0]} and {self.met}"
            return f"{self.title}, {ranks}, is entered by both and has not ended for {age_s:.1f} s"
        if not self.missing:
            return f"{self.title} is entered by all ranks and has not ended for {age_s:.1f} s"
        if len(self.missing) == 1:
            return f"{self.title} waits for {self.missing[0]} for {age_s:.1f} s"
        seen = "; ".join(str(each) for each in self.missing[:3])
        ranks = named([each.rank for each in self.missing]) + (f" and {self.more} more" if self.more else "")
        return f"{self.title} waits for {ranks} for {age_s:.1f} s: {seen}"


@attrs.frozen
class Diagnosis:
    """The trouble of the job.

    Attributes:
        verdict: The culprits, in sentences; empty where no operation waits.
        culprits: Their ranks.
        waiting: Operations that wait, the oldest first: of very many those for culprits or of most ranks.
        chains: Which rank waits for which, from a waiting rank to a culprit.
        cycles: Ranks that wait for each other in a circle, in sentences.
        divergences: The first number of each group under which members called different operations.
        silent: Ranks that did not answer, and why.
        left: Those of them that no longer belong to the job: no rank that answers shares an open group.
        at_ns: Monotonic nanosecond at which the ranks were asked.
        took_s: How long that took.
    """

    verdict: tuple[str, ...] = ()
    culprits: tuple[int, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    chains: tuple[str, ...] = ()
    cycles: tuple[str, ...] = ()
    divergences: tuple[str, ...] = ()
    silent: Mapping[int, str] = attrs.field(factory=dict)
    left: tuple[int, ...] = ()
    at_ns: int = 0
    took_s: float = 0.0

    @property
    def summary(self) -> str:
        """The first sentences of the verdict, for a line of a log or an error."""
        return "; ".join(self.verdict[:SENTENCES])

    @property
    def has_reason(self) -> bool:
        """Whether it tells why operations wait; a culprit that none waits for is no reason."""
        missing = {missing.rank for each in self.waiting for missing in each.missing}
        return bool(missing.intersection(self.culprits) or self.cycles or self.divergences)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "verdict": list(self.verdict),
            "culprits": list(self.culprits),
            "waiting": [
                {
                    "uid": each.key[0],
                    "seq": each.key[1],
                    "p2p": each.key[2],
                    "caller": each.key[3],
                    "group": each.group,
                    "op": each.op,
                    "call": each.call,
                    "where": each.where,
                    "ranks": list(each.ranks),
                    "age_s": each.age_s,
                    "more": each.more,
                    "differs": each.differs,
                    "met": each.met,
                    "missing": [attrs.asdict(missing) for missing in each.missing],
                    "sentence": each.sentence(),
                }
                for each in self.waiting
            ],
            "chains": list(self.chains),
            "cycles": list(self.cycles),
            "divergences": list(self.divergences),
            "silent": {str(rank): why for rank, why in self.silent.items()},
            "left": list(self.left),
            "took_s": self.took_s,
        }


def waiting_in(document: dict[str, Any]) -> tuple[Waiting, ...]:
    """Return the operations that wait, of a document of another rank.

    Raises:
        KeyError, TypeError, ValueError: It is no such document.
    """
    return tuple(
        Waiting(
            key=(str(each["uid"]), int(each["seq"]), bool(each["p2p"]), int(each["caller"])),
            group=str(each["group"]),
            op=str(each["op"]),
            call=str(each["call"]),
            where=str(each["where"]),
            ranks=tuple(map(int, each["ranks"])),
            age_s=float(each["age_s"]),
            missing=tuple(
                Missing(
                    int(one["rank"]),
                    str(one["last"]),
                    str(one["stands"]),
                    bool(one["answers"]),
                    str(one.get("place", "")),  # incidents of earlier versions have none
                )
                for one in each["missing"]
            ),
            more=int(each["more"]),
            differs=bool(each.get("differs", False)),  # likewise
            met=each.get("met"),
        )
        for each in document["waiting"]
    )


def key_of(operation: State, rank: int) -> Key:
    """Return which operation a rank is inside of: a collective is one for all, a message each rank's own."""
    is_p2p = operation["p2p"]
    return operation["uid"], operation["seq"], is_p2p, rank if is_p2p else -1
