"""`Origins`: finds members that have made another group of a group than this rank. Under the fabric's lock.

A group that is made from another one (`split`, `shrink`) is known by the list of its members, so ranks that
give different lists are in different groups, and none of their messages meet. So a rank that has been blocked
for a while sends the members from which it has heard nothing which groups it has made of the same one, and in
which of them it waits; they answer with theirs. So does a rank that has ended its first collective and heard
of no other. All ranks make groups in the same order: if two ranks wait for each other, each in a group that
the other has not made, both groups fail. So does the group of a rank that waits for one that has closed the
group they are made from. Either is told to all members, as not all wait for that rank. A rank also lists the
groups that it has closed: another one may still be in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from time import monotonic_ns

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.messages.absent_groups import AbsentGroups
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.departures import Departures, left_error
from dist2.backends.socket.transport.messages.explaining import NO_OPERATION
from dist2.backends.socket.transport.messages.made import CALL_CHARS, Made
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.wire import ABORTED, ANSWER, TEXT_BYTES, Header, Kind
from dist2.errors import MismatchError, PeerLostError, ResourceError
from dist2.runtime.rank_names import rank_names

_MADE, _CLOSED = 64, 16
"""Groups that a frame lists, and closed ones: the latest."""
_PATIENCE_NS, _PAUSE_NS = 500_000_000, 1_000_000_000
_BLOCKED_NS = 3_000_000_000
"""How long a rank that has asked counts as blocked; it asks at least once a second."""


class Origins:
    """Asks the members of groups that were made from others, and answers.

    Args:
        linkage: The links to them.
        courier: Finds the links to them.
        outcomes: Fails groups.
        departures: Notified of members that make no more groups.
        mailboxes: The mailboxes of the open groups, by context.
        absent: Knows the groups that are closed.
    """

    def __init__(
        self,
        linkage: Linkage,
        courier: Courier,
        outcomes: Outcomes,
        departures: Departures,
        mailboxes: dict[int, Mailbox],
        absent: AbsentGroups,
    ) -> None:
        self._linkage = linkage
        self._courier = courier
        self._outcomes = outcomes
        self._departures = departures
        self._mailboxes = mailboxes
        self._absent = absent

    # Out

    def seek(self, mailbox: Mailbox, ranks: Iterable[int]) -> None:
        """Ask members that this rank waits for; called often, it asks once a second."""
        now = monotonic_ns()
        if not mailbox.ask_ns:
            mailbox.ask_ns = now + _PATIENCE_NS
        elif now >= mailbox.ask_ns:
            mailbox.ask_ns = now + _PAUSE_NS
            self.ask(mailbox, ranks)

    def ask(self, mailbox: Mailbox, ranks: Iterable[int]) -> None:
        """Ask members from which nothing has come which groups they have made."""
        origin = mailbox.origin
        if origin is None or mailbox.fault is not None:
            return
        mailbox.asked_ns = monotonic_ns()
        for rank in ranks:
            unknown = f"{NO_OPERATION}, and no answer whether it has called {self._call_of(mailbox)}"
            mailbox.calls.elsewhere.setdefault(rank, unknown)
            with suppress(
                PeerLostError, ResourceError
            ):  # a loss is reported elsewhere; it can be asked again
                link = self._courier.reach(mailbox, rank)
                self._linkage.send(link, self._frame(origin.parent, mailbox.fabric_ids[rank], 0))

    def announce(self, mailbox: Mailbox) -> None:
        """Ask the members with a link: the first collective has ended here, perhaps not on them."""
        outgoing, calls = self._linkage.outgoing, mailbox.calls
        linked = [rank for rank, each in enumerate(mailbox.fabric_ids) if each in outgoing]
        self.ask(mailbox, [rank for rank in linked if not calls.seen[rank]])

    def _frame(self, parent: int, member: str, flags: int) -> bytes:
        payload = self._made(parent, member).encode()
        return Header(Kind.ORIGIN, flags, parent, nbytes=len(payload)).encode() + payload

    def _made(self, parent: int, member: str) -> Made:
        """Return the groups of another rank and this one that this one has made of a group."""
        made = self._of(parent, member)
        waiting = next((each for each in made if _is_blocked(each)), None)
        shown = waiting or (made[-1] if made else None)
        return Made(
            [*(each.context for each in made[-_MADE:]), *self._absent.closed_last(_CLOSED)],
            waiting.context if waiting is not None else 0,
            "" if shown is None else self._call_of(shown),
            self._last_call(parent),
            self._absent.is_closed(parent),
        )

    def _of(self, parent: int, member: str) -> list[Mailbox]:
        return [
            each
            for each in self._mailboxes.values()
            if each.origin is not None and each.origin.parent == parent and each.rank_of(member) is not None
        ]

    def _call_of(self, mailbox: Mailbox) -> str:
        """Return the call that has made a group, in words; ranks are of the group that it is made from."""
        assert mailbox.origin is not None  # callers look for groups with an origin
        parent = self._mailboxes.get(mailbox.origin.parent)
        if parent is None or parent.names([*range(len(parent.cards))]) == rank_names(
            range(len(parent.cards))
        ):
            return mailbox.origin.words
        return f"{mailbox.origin.words} of {parent.names.group}"

    def _last_call(self, parent: int) -> str:
        mailbox = self._mailboxes.get(parent)
        if mailbox is None:
            return ""
        called = mailbox.calls.describe(0, 0)
        if not called.seq:
            called = mailbox.calls.describe(None, 0)
        return called.text[:CALL_CHARS] if called.seq else ""

    # In

    def on_made(self, link: Link, header: Header, payload: bytearray | None) -> None:
        """Compare the groups of a rank with those of this one; answer, if it asks."""
        said, member = Made.decode(bytes(payload or b"")), link.peer_id or ""
        if said is None:
            return
        answer = self._frame(header.context, member, ANSWER)
        unknown = said.waits not in self._mailboxes and not self._absent.is_closed(said.waits)
        for mailbox in self._of(header.context, member):
            if mailbox.fault is None and _is_blocked(mailbox):
                self._compare(mailbox, member, said, apart=bool(said.waits) and unknown)
        if not header.flags & ANSWER:
            self._linkage.send(self._linkage.outgoing.get(member, link), answer)

    def _compare(self, mailbox: Mailbox, member: str, said: Made, apart: bool) -> None:
        """Note that a member has not made a group in which this rank is blocked.

        Args:
            mailbox: The group.
            member: The member.
            said: What it says.
            apart: It is blocked in a group that this rank has not made.
        """
        rank, calls, mine = mailbox.rank_of(member), mailbox.calls, self._call_of(mailbox)
        assert rank is not None  # `_of` selects such groups
        if mailbox.context in said.contexts:
            calls.elsewhere[rank] = NO_OPERATION
            return
        instead = f", but {said.words}" if said.words else ""
        where = f"; its last call in the group that this one is made from: {said.call}" if said.call else ""
        calls.elsewhere[rank] = f"{NO_OPERATION}: it has not called {mine}{instead}{where}"
        if said.is_closed and rank not in mailbox.left:
            why = f"it closed the group that this one is made from, and has not called {mine}"
            self._tell_all(mailbox, why, tag=rank + 1)
            self._leave_out(mailbox, rank, why)
        elif apart and rank not in mailbox.left:
            here, there = mailbox.names([mailbox.rank], False), mailbox.names([rank], False)
            self._fail(
                mailbox,
                f"ranks make different groups: {here} called {mine}, and {there} {said.words}; give "
                f"the same list in the same order on all its ranks",
            )

    def _fail(self, mailbox: Mailbox, words: str) -> None:
        """Fail a group, on all its members."""
        self._tell_all(mailbox, words)
        self._set_apart(mailbox, words)

    def _tell_all(self, mailbox: Mailbox, words: str, tag: int = 0) -> None:
        """Notify members: not all wait for the one that the words are about, and ask it."""
        text = words.encode()[:TEXT_BYTES]
        frame = Header(Kind.ORIGIN, ABORTED, mailbox.context, tag=tag, nbytes=len(text)).encode() + text
        for rank in range(len(mailbox.fabric_ids)):
            if rank not in mailbox.left:
                self._courier.tell(mailbox, rank, frame)

    def on_failed(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        """Fail a group, as another member found that its members differ, or that one will not make it."""
        words = bytes(payload or b"").decode(errors="replace")
        if not header.tag:
            self._set_apart(mailbox, words)
        elif 0 < header.tag <= len(mailbox.cards) and header.tag - 1 not in mailbox.left:
            self._leave_out(mailbox, header.tag - 1, words)

    def _leave_out(self, mailbox: Mailbox, rank: int, why: str) -> None:
        mailbox.take_reason(rank, bytearray(why.encode()))
        self._departures.member_left(mailbox, rank)
        self._outcomes.fail(mailbox, left_error(mailbox, [rank]))

    def _set_apart(self, mailbox: Mailbox, words: str) -> None:
        mailbox.apart = mailbox.apart or MismatchError(words)
        self._outcomes.fail(mailbox, mailbox.apart)


def _is_blocked(mailbox: Mailbox) -> bool:
    """Whether this rank has asked in a group lately."""
    return bool(mailbox.asked_ns) and monotonic_ns() - mailbox.asked_ns < _BLOCKED_NS
