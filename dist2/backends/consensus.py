"""`Consensus`: the survivors of a group reach one decision though ranks die meanwhile. Pure: no I/O.

Every rank tells all others its vote. The *coordinator*, the lowest rank that is not known to be gone,
decides once it has a vote from every live rank, and tells all; a rank that learns a decision tells
all others before it uses it. When the coordinator is gone, all vote again, for the next one: a vote
names the coordinator that it is for (its *view*), which grows only. It binds: a rank that has voted in a
view accepts no decision of an earlier one, except from that coordinator itself. So a new coordinator,
which has an answer from every survivor, knows of every decision that one of them has accepted, and
repeats the latest.

All this holds if only ranks are taken for gone that are: the failure detector may be slow, not wrong. Where
two ranks have lost their connection, each holds the other for gone though both live. The coordinator, which
has the votes of both, leaves one of them out: see `settle`. If the coordinator is one of the two, the other
gets no answer from it, and all others accept its decision.
It follows the agreement of MPI's User Level Failure Mitigation (Bland et al., 2013; Herault et al., 2015:
early returning agreement), with a flat tree.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen
class Agreement:
    """The decision that all survivors of a group have in common.

    Attributes:
        flags: Bitwise and of the survivors' flags.
        failed: Group ranks that are gone, in order: they died, or left the group.

    Examples:
        >>> pg.agree(flags=0b11)
        Agreement(flags=3, failed=())
    """

    flags: int
    failed: tuple[int, ...]


@attrs.frozen
class Vote:
    """One rank's vote.

    Attributes:
        view: The coordinator that it is for.
        flags: Its contribution to the bitwise and.
        failed: The ranks that it knows to be gone.
        shrinking: The rank itself, if it called `shrink`, and not `agree`.
    """

    view: int
    flags: int
    failed: frozenset[int]
    shrinking: frozenset[int] = frozenset()


@attrs.frozen
class Decision:
    """A coordinator's decision.

    Attributes:
        view: The coordinator.
        flags: The bitwise and.
        failed: The ranks that are gone.
        shrinking: The ranks that called `shrink`, and not `agree`: all or none in a correct program.
    """

    view: int
    flags: int
    failed: frozenset[int]
    shrinking: frozenset[int] = frozenset()


Letter = Vote | Decision
Letters = list[tuple[int, Letter]]
"""Destination rank and message, for each message to send."""


class Consensus:
    """One agreement, as one rank sees it: feed it events, and send the messages that it returns.

    Letters between two ranks must arrive in the order sent. They may arrive before `propose`.

    Attributes:
        rank: The caller's group rank.
        decision: The answer, once it is known. It counts when the letters returned with it are sent.
        expelled: Others hold this rank for gone: there will be no answer for it.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.decision: Decision | None = None
        self.expelled = False
        self._others = [other for other in range(world_size) if other != rank]
        self._gone: set[int] = set()
        self._flags: int | None = None
        self._shrinking: frozenset[int] = frozenset()
        self._view = -1
        self._told: Vote | None = None
        self._votes: dict[int, Vote] = {}
        self._decisions: dict[int, Decision] = {}
        self._settles = False

    def propose(self, flags: int, gone: Iterable[int], shrinks: bool = False) -> Letters:
        """Vote. To vote again otherwise replaces the first vote, if nothing is decided yet.

        Args:
            flags: For the bitwise and.
            gone: The ranks that are known to be gone.
            shrinks: Whether `shrink` was called, and not `agree`.
        """
        self._flags = flags
        self._shrinking = frozenset([self.rank] if shrinks else ())
        self._gone.update(gone)
        return self._advance()

    def leave_out(self, rank: int) -> Letters:
        """Take in that a rank is gone."""
        self._gone.add(rank)
        return self._advance()

    def settle(self) -> Letters:
        """As the coordinator, leave out ranks so that no two remain of which one holds the other for gone.

        Both have voted, so both live, and have lost their connection; or one has died since, which the
        coordinator learns in a moment: it calls this after that moment.
        """
        self._settles = True
        return self._advance()

    def receive(self, sender: int, letter: Letter) -> Letters:
        """Take in a letter."""
        if self.rank in letter.failed:
            self.expelled = True
        elif isinstance(letter, Vote):
            self._votes[sender] = letter
        else:
            self._decisions[sender] = letter
        return self._advance()

    @property
    def awaited(self) -> list[int]:
        """The remaining ranks that have sent neither a vote nor a decision."""
        return [rank for rank in self._left() if rank not in self._votes and rank not in self._decisions]

    @property
    def is_disputed(self) -> bool:
        """Whether only `settle` can end this: all have voted, and some hold others of them for gone."""
        return self.decision is None and self._is_complete and not self._decisions and bool(self._disputes())

    @property
    def _is_complete(self) -> bool:
        left = self._left()
        return (
            self._view == self.rank
            and min([self.rank, *left]) == self.rank
            and all(map(self._has_answered, left))
        )

    def _disputes(self) -> list[tuple[int, int]]:
        """Return the pairs of remaining ranks of which one holds the other for gone."""
        left = self._left()
        voted = [rank for rank in left if rank in self._votes]
        return [(rank, other) for rank in voted for other in self._votes[rank].failed if other in left]

    def _left(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._gone]

    def _advance(self) -> Letters:
        if self._flags is None or self.decision is not None or self.expelled:
            return []
        coordinator = min([self.rank, *self._left()])
        known = self._binding()
        if known is None and coordinator > self._view:
            self._view = coordinator
            known = self._binding()
        if known is not None:
            return self._decide(known)
        letters: Letters = []
        mine = Vote(self._view, self._flags, frozenset(self._gone), self._shrinking)
        if self._told is None or attrs.evolve(self._told, failed=mine.failed) != mine:
            self._told = mine
            letters = [(rank, mine) for rank in self._left()]
        if self._is_complete:
            latest = max(self._decisions.values(), key=lambda decision: decision.view, default=None)
            if latest is not None or self._settles or not self._disputes():
                letters += self._decide(latest or self._count())
        return letters

    def _binding(self) -> Decision | None:
        """Return a decision that this rank may accept.

        Not of an earlier view than the one that it has voted in, except from that view's coordinator:
        this will never decide anything else.
        """
        for sender, decision in self._decisions.items():
            if decision.view >= self._view or sender == self._view:
                return decision
        return None

    def _has_answered(self, rank: int) -> bool:
        """Whether a rank has voted for this coordinator, or sent a decision."""
        vote = self._votes.get(rank)
        return rank in self._decisions or (vote is not None and vote.view == self.rank)

    def _count(self) -> Decision:
        """Return the decision that the votes give."""
        assert self._flags is not None  # only called after `propose`
        votes = [self._votes[rank] for rank in self._left()]
        accused = frozenset().union(*(vote.failed for vote in votes))
        failed = frozenset(self._gone) | (accused - set(self._left())) | self._settled()
        flags, shrinking = self._flags, self._shrinking
        for rank in self._left():
            if rank not in failed:
                flags &= self._votes[rank].flags
                shrinking |= self._votes[rank].shrinking
        return Decision(self.rank, flags, failed, shrinking)

    def _settled(self) -> set[int]:
        """Return the ranks to leave out for their disputes: those in most of them first, then the highest."""
        disputes, out = self._disputes(), set[int]()
        while disputes:
            ranks = [rank for pair in disputes for rank in pair]
            worst = max(ranks, key=lambda rank: (ranks.count(rank), rank))
            out.add(worst)
            disputes = [pair for pair in disputes if worst not in pair]
        return out

    def _decide(self, decision: Decision) -> Letters:
        self._view = max(self._view, decision.view)
        self.decision = attrs.evolve(decision, view=self._view)
        return [(rank, self.decision) for rank in self._left()]
