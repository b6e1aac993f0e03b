"""`Departures`: fails operations with members that are gone. Under the fabric's lock; never blocks."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence

from dist2.backends.consensus import Consensus
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.messages.assembly import Assembly
from dist2.backends.socket.transport.messages.explaining import left_words
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE
from dist2.backends.socket.wire import ABORTED, TEXT_BYTES, UNSEEN, Header, Kind
from dist2.errors import AuthenticationError, PeerLostError
from dist2.security.refusals import refusals

LINGER_S = 0.25
"""How long after a member's abort operations that do not need that member may still succeed: it may have done
its part of an operation that the others are about to complete."""


UNANSWERED_S = 0.5
"""Time without an answer at a member's address after which it counts as dead, unless it is found to have
exited cleanly, or to have done its part."""


class Departures:
    """Fails operations that need members that died, left their group or aborted it.

    Args:
        linkage: The links to them.
        presence: Which processes are there.
        outcomes: Fails their messages.
        assembly: Notified of members that have lost their vote.
        mailboxes: The mailboxes of the open groups, by context.
        me: Fabric id of this process.

    Attributes:
        deserted: Groups that a member has aborted, and when they fail for that (in seconds).
    """

    def __init__(
        self,
        linkage: Linkage,
        presence: Presence,
        outcomes: Outcomes,
        assembly: Assembly,
        mailboxes: dict[int, Mailbox],
        me: str,
    ) -> None:
        self.deserted: dict[Mailbox, float] = {}
        self._linkage = linkage
        self._presence = presence
        self._outcomes = outcomes
        self._assembly = assembly
        self._mailboxes = mailboxes
        self._me = me
        self._cuts: set[tuple[str, str]] = set()

    # Members

    def member_left(self, mailbox: Mailbox, peer: int) -> None:
        """Fail the operations that are pending with a member that closed the group."""
        mailbox.left.add(peer)
        self._assembly.departed(mailbox, peer)
        error = departed_error(mailbox, [peer])
        alone = len(mailbox.left | {mailbox.rank}) == len(mailbox.cards)
        for message in mailbox.pending():
            if message.source == peer or (alone and message.source == ANY_SOURCE):
                self._outcomes.cancel(mailbox, message, error)

    def fall_behind(self, mailbox: Mailbox, ranks: Sequence[int]) -> None:
        """Fail the pending collective: members have left without having called it.

        It may need them only through others, which tell nothing of it.
        """
        error = left_error(mailbox, ranks)
        for message in mailbox.pending():
            if not message.tagged:
                self._outcomes.cancel(mailbox, message, error)

    def member_aborted(self, mailbox: Mailbox, peer: int) -> None:
        """Fail operations pending with a member that aborted the group; the others a moment later."""
        mailbox.aborters.add(peer)
        self.member_left(mailbox, peer)
        self.deserted.setdefault(mailbox, time.monotonic() + LINGER_S)

    def leave_out(self, mailbox: Mailbox, consensus: Consensus, ranks: Iterable[int]) -> None:
        """Note the ranks that have left without a vote; ranks that voted announce it themselves."""
        for rank in set(ranks).intersection(consensus.awaited):
            self.member_left(mailbox, rank)

    def on_leave(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        mailbox.take_reason(peer, payload)
        if 0 < header.tag <= len(mailbox.cards):
            mailbox.followed[peer] = header.tag - 1
        mailbox.calls.note_called(peer, header.seq)
        mailbox.unanswered[peer] = 0.0  # it calls nothing more
        if header.flags & ABORTED:
            self.member_aborted(mailbox, peer)
        else:
            self.member_left(mailbox, peer)

    # Processes

    def process_left(self, fabric_id: str) -> None:
        """A process closed everything in good order."""
        for mailbox in self._mailboxes.values():
            peer = mailbox.rank_of(fabric_id)
            if peer is not None and peer not in mailbox.left:
                self.member_left(mailbox, peer)

    def process_died(self, fabric_id: str, words: str = "died") -> None:
        """Declare a process dead that a rank of its host has seen end.

        Args:
            fabric_id: Its id.
            words: Its end, as reported by another process.
        """
        presence = self._presence
        if presence.is_alive(fabric_id) or (fabric_id in presence.dead and fabric_id not in presence.unseen):
            return
        presence.unseen.discard(fabric_id)
        words = presence.ends.get(fabric_id, words)
        self._bury(fabric_id, words, _frame(f"{fabric_id} {words}"))

    def connection_lost(self, fabric_id: str, why: str) -> None:
        """Fail the groups with a process that cannot be reached any more, of whose end nobody knows.

        Other processes hear of the lost connection, and not of a death: see `cut_between`.
        """
        presence = self._presence
        if fabric_id not in presence.dead:
            presence.unseen.add(fabric_id)
            self._cuts.add((self._me, fabric_id))
            words = f"is cut off: lost the connection to it ({why})"
            self._bury(fabric_id, words, _frame(f"{self._me} {fabric_id} {why}", UNSEEN))

    def cut_between(self, reporter: str, lost: str, why: str) -> None:
        """Take in that another process has lost its connection to a third one, or to this one.

        Groups of both fail. Whether one of them is left out is for the survivors' vote: each may have
        connections to all others.
        """
        if (reporter, lost) in self._cuts:
            return
        self._cuts.add((reporter, lost))
        if lost == self._me:
            self._presence.cut_off(reporter, why)
            return
        self._forward(_frame(f"{reporter} {lost} {why}", UNSEEN), (reporter, lost))
        for mailbox in list(self._mailboxes.values()):
            from_rank, rank = mailbox.rank_of(reporter), mailbox.rank_of(lost)
            if from_rank is None or rank is None or not mailbox.left.isdisjoint({from_rank, rank}):
                continue
            names = mailbox.names
            text = f"{names([rank])} is cut off: {names([from_rank])} lost the connection to it ({why})"
            self._outcomes.fail(mailbox, PeerLostError(text, ranks=[rank]))

    def _bury(self, fabric_id: str, words: str, frame: bytes) -> None:
        """Hold a process for gone: fail its groups, and notify processes that have no link to it."""
        dead = self._presence.dead
        affected = [
            mailbox
            for mailbox in self._mailboxes.values()
            if (rank := mailbox.rank_of(fabric_id)) is not None and rank not in mailbox.left
        ]
        if not affected:
            return
        dead[fabric_id] = words
        # Reported first: a withdrawn message looks to others like one of a rank that gave up by itself.
        self._forward(frame, (fabric_id,))
        for mailbox in affected:
            error = lost_error(mailbox, dead)
            if isinstance(mailbox.fault, PeerLostError):
                mailbox.fault = error  # later errors name all dead ranks
            self._outcomes.fail(mailbox, error)
            self._assembly.departed(mailbox, mailbox.fabric_ids.index(fabric_id))

    def _forward(self, frame: bytes, but: Container[str]) -> None:
        for other, link in list(self._linkage.outgoing.items()):
            if other not in but:
                self._linkage.send(link, frame)

    def process_refused(self, fabric_id: str, error: AuthenticationError) -> None:
        """A process refuses this one, or fails authentication: fail its groups."""
        for mailbox in list(self._mailboxes.values()):
            rank = mailbox.rank_of(fabric_id)
            if rank is not None and rank not in mailbox.left:
                card = mailbox.cards[rank]
                where = f"{card.host}:{card.port}"
                refusals.note("data", error.reason, where, str(error), rank=rank)
                why = f"no connection to {mailbox.names([rank])} at {where}: {error}"
                self._outcomes.fail(mailbox, AuthenticationError(why, reason=error.reason))

    # Deferred departures

    def resolve(self) -> None:
        """Act on deferred departures whose delay has passed."""
        if self._presence.suspects:
            self._resolve_suspects()
        if self.deserted:
            self._resolve_deserted()

    def _resolve_suspects(self) -> None:
        presence = self._presence
        for fabric_id in presence.overdue():
            links = self._linkage.to(fabric_id)
            if presence.has_parted(fabric_id):
                self.process_left(fabric_id)
            elif not links or presence.was_cut_off(fabric_id):
                # Held open by forked children of the process; or one of two links is cut, and frames were
                # lost with it.
                for link in links:
                    self._linkage.remove(link)
                if presence.has_ended(fabric_id):
                    self.process_died(fabric_id)
                else:
                    self.connection_lost(fabric_id, presence.why_lost(fabric_id))

    def _resolve_deserted(self) -> None:
        """Fail the groups that a member aborted a moment ago."""
        now = time.monotonic()
        for mailbox in [each for each, end in self.deserted.items() if end <= now]:
            del self.deserted[mailbox]
            lagging = behind(mailbox)
            if lagging and all(map(mailbox.follows, mailbox.aborters)):
                self._outcomes.fail(mailbox, gone_error(mailbox, lagging))
            else:
                self._outcomes.fail(mailbox, gone_error(mailbox, sorted(mailbox.aborters)))


def _frame(text: str, flags: int = 0) -> bytes:
    payload = text.encode()[:TEXT_BYTES]
    return Header(Kind.DEATH, flags, nbytes=len(payload)).encode() + payload


def did_not_call(mailbox: Mailbox, rank: int, at_least: int = 0) -> bool:
    """Whether a member that is gone is known not to have called this rank's latest collective.

    Others that know better say so within a while.

    Args:
        mailbox: The group.
        rank: The member.
        at_least: Number of a collective that it must have called.
    """
    now = time.monotonic()
    since = mailbox.unanswered.setdefault(rank, now)
    latest = max(mailbox.calls.latest, at_least)
    return now - since >= UNANSWERED_S and mailbox.calls.seen[rank] < latest


def behind(mailbox: Mailbox) -> list[int]:
    """Return the members that have left without having called this rank's latest collective."""
    return [rank for rank in sorted(mailbox.left) if did_not_call(mailbox, rank)]


def lost_error(mailbox: Mailbox, dead: Mapping[str, str]) -> PeerLostError:
    """Return the error that names the members that died."""
    ends = {rank: dead[each] for rank, each in enumerate(mailbox.fabric_ids) if each in dead}
    return PeerLostError(mailbox.names.ended(ends), ranks=list(ends))


def gone_error(mailbox: Mailbox, ranks: Sequence[int]) -> PeerLostError:
    """Return the error that names the first of some members that closed or aborted the group."""
    ranks = mailbox.first_of(ranks)
    error = departed_error(mailbox, ranks)
    error.ranks = tuple(mailbox.first_lost(ranks))
    return error


def departed_error(mailbox: Mailbox, ranks: Sequence[int]) -> PeerLostError:
    """Return the error that names members that closed or aborted the group."""
    return (left_error if mailbox.aborters.isdisjoint(ranks) else aborted_error)(mailbox, ranks)


def left_error(mailbox: Mailbox, ranks: Sequence[int]) -> PeerLostError:
    """Return the error that names members that closed the group."""
    return PeerLostError(f"{mailbox.names(ranks)} {left_words(mailbox.why(ranks))}", ranks=ranks)


def aborted_error(mailbox: Mailbox, ranks: Sequence[int]) -> PeerLostError:
    """Return the error that names members that aborted the group."""
    return PeerLostError(f"{mailbox.names(ranks)} aborted the group{mailbox.why(ranks)}", ranks=ranks)
