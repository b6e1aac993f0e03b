"""`Comparison`: compares the calls of a group's members. Under the fabric's lock; never blocks.

Fingerprints ride on messages and are compared on arrival; where ranks that differ exchange none, `Probes`
bring them. A rank that finds a difference notifies all members.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.messages.calls import UNKNOWN, Called
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.explaining import explained
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.wire import TAGGED, TEXT_BYTES, Header, Kind
from dist2.errors import MismatchError, PeerLostError, ResourceError
from dist2.operation.description import MAX_BYTES, Call

PUT_OFF_NS = 100_000_000
"""How long a collective may take to end where messages did not fit: all that it needs may be on its way."""

MAX_TOLD = 4096
"""Fingerprints that a member is remembered to know."""


class Comparison:
    """Compares calls of all groups, and notifies members of differences.

    Args:
        linkage: The links to them.
        courier: Finds the links to them.
        outcomes: Fails the messages of groups whose members differ.
        attend: Sees to it that links are accepted while no thread waits.
    """

    def __init__(
        self, linkage: Linkage, courier: Courier, outcomes: Outcomes, attend: Callable[[], None]
    ) -> None:
        self._linkage = linkage
        self._courier = courier
        self._outcomes = outcomes
        self._attend = attend

    # On arrival

    def compare(self, mailbox: Mailbox, seq: int, fingerprint: int) -> None:
        """Compare the messages that have arrived with the current call of this rank."""
        if mailbox.calls.described:  # others found that ranks differ before this one had called
            self.report(mailbox, seq)
            return
        for arrived in mailbox.strays(seq):
            if arrived.header.fingerprint != fingerprint:
                self._accuse(mailbox, arrived.peer, arrived.header)
        for peer, called in list(mailbox.calls.probes.items()):
            if called.seq <= seq:
                del mailbox.calls.probes[peer]
            if called.seq == seq and called.fingerprint != fingerprint:
                mailbox.calls.described[peer] = called
                mailbox.calls.offenders.add(peer)
        if mailbox.calls.offenders:
            self.report(mailbox, seq)

    def contradiction(self, mailbox: Mailbox, peer: int, header: Header) -> bool:
        """Fail the group if a message is of an operation that this rank called differently."""
        if not mailbox.calls.contradicts(header):
            return False
        self._accuse(mailbox, peer, header)
        self.report(mailbox, header.seq)
        return True

    def agrees(self, mailbox: Mailbox, receiving: Receiving, peer: int, header: Header) -> bool:
        """Whether a message matches its receive; if not, the group fails on both sides."""
        if receiving.fits(header):
            return True
        self._accuse(mailbox, peer, header)
        if receiving.tagged:
            mine = called_in_message(mailbox, "recv", peer, receiving.number)
            self._report(mailbox, mine, tagged=True, theirs=header.transfer)
        else:
            self.report(mailbox, receiving.seq, _sizes(mailbox, receiving, peer, header))
        self._outcomes.finish(receiving, mailbox.fault)
        return False

    def _accuse(self, mailbox: Mailbox, peer: int, header: Header) -> None:
        """Note the sender of a message that did not match, and its call if it is known."""
        mailbox.calls.offenders.add(peer)
        call = mailbox.calls.introduced.get((peer, header.fingerprint))
        if call is not None:
            call = call.with_tag(header.tag) if header.flags & TAGGED else attrs.evolve(call, seq=header.seq)
            mailbox.calls.described.setdefault(peer, called_of(header, call))

    def report(self, mailbox: Mailbox, seq: int, sizes: str = "") -> None:
        """Fail the group because calls of a collective differ, and send this rank's to all members, once.

        Args:
            seq: The collective.
            sizes: A part that came with another length than this rank expects, in words.
        """
        if mailbox.fault is None:
            called = mailbox.calls.describe(seq, 0)
            if sizes:
                called = attrs.evolve(called, call=attrs.evolve(called.call, sizes=sizes))
            self._report(mailbox, called)

    def _report(self, mailbox: Mailbox, called: Called, tagged: bool = False, theirs: int = 0) -> None:
        """Fail the group because calls differ, and send this rank's call to all members, once.

        Args:
            called: This rank's call.
            tagged: It is a point-to-point operation.
            theirs: Number that the sender gave the message then; 0 if it gave none.
        """
        if mailbox.fault is not None:
            return
        mailbox.calls.mine = called
        # Asynchronous messages fail with it as it is: only a thread that waits can add calls that come later.
        mailbox.fault = explained(mailbox.calls)
        # Reported first: a withdrawn message looks to others like one of a rank that gave up by itself.
        self._tell_mismatch(mailbox, called, tagged, theirs)
        self._outcomes.fail(mailbox, mailbox.fault)

    def _tell_mismatch(self, mailbox: Mailbox, called: Called, tagged: bool, theirs: int) -> None:
        payload = self._payload(mailbox, called)
        for rank in range(len(mailbox.fabric_ids)):
            if rank != mailbox.rank and rank not in mailbox.left:
                number = theirs if rank in mailbox.calls.offenders else 0
                self._tell(mailbox, rank, called, payload, TAGGED if tagged else 0, number)

    def _tell(
        self, mailbox: Mailbox, rank: int, called: Called, payload: bytes, flags: int = 0, theirs: int = 0
    ) -> None:
        try:
            link = self._courier.reach(mailbox, rank)
        except (PeerLostError, ResourceError):
            return  # its death is reported elsewhere
        header = Header(
            Kind.MISMATCH,
            flags,
            mailbox.context,
            seq=called.seq,
            fingerprint=called.fingerprint,
            nbytes=len(payload),
            transfer=theirs,
        )
        self._linkage.send(link, header.encode() + payload)

    # Mismatches that shared memory has shown

    def found(self, mailbox: Mailbox, error: MismatchError) -> None:
        """Fail the group because calls of a collective differ, without a message.

        Members that come to the collective's fences find it as well; one that waits for a message asks, and
        is told by `repeat`.
        """
        if mailbox.fault is None:
            mailbox.calls.take(error)
            self._outcomes.fail(mailbox, error)
            self._attend()

    def repeat(self, mailbox: Mailbox, rank: int) -> None:
        """Tell a member that waits that calls of a collective differ, if the group failed here for that."""
        called = mailbox.calls.mine
        if called.call.op not in ("", "send", "recv"):  # of messages that differ all members were told
            self._tell(mailbox, rank, called, self._payload(mailbox, called))

    @staticmethod
    def _payload(mailbox: Mailbox, called: Called) -> bytes:
        """Return this rank's call, and a line for each rank that called something else: as many as fit."""
        lines = b""
        for rank in sorted(mailbox.calls.offenders):
            described = mailbox.calls.described.get(rank)
            line = b"\n%d " % rank + (described.call.encode() if described is not None else b"")
            if len(lines) + len(line) <= TEXT_BYTES - MAX_BYTES:
                lines += line
        return called.call.encode() + lines

    def on_mismatch(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        said, *accusations = bytes(payload or b"").split(b"\n")
        mailbox.calls.described[peer] = called_of(header, Call.decode(said))
        own: Called | None = None
        for line in accusations:
            number, _, text = line.partition(b" ")
            rank = int(number) if number.isdigit() and len(number) < 10 else -1
            call = Call.decode(text) if text else Call()
            if rank == mailbox.rank:
                own = Called(call.seq, UNKNOWN, call.text, call)
            elif 0 <= rank < len(mailbox.cards):
                mailbox.calls.offenders.add(rank)
                if text:
                    mailbox.calls.described.setdefault(rank, Called(call.seq, UNKNOWN, call.text, call))
        tagged = bool(header.flags & TAGGED)
        if tagged and own is not None:  # it is about a message that this rank sent
            mailbox.calls.offenders.add(peer)
            if header.transfer or own.call.op != "send":
                own = called_in_message(mailbox, "send", peer, header.transfer)
            self._report(mailbox, own, tagged=True)
        elif tagged:  # it is between others
            if mailbox.waits_for_collective():
                mailbox.calls.put_off_ns = time.monotonic_ns() + PUT_OFF_NS
            else:
                self.put_off_no_more(mailbox)
        elif mailbox.calls.has_begun(header.seq) or mailbox.waits_for_messages_only():
            self.report(mailbox, header.seq)

    def put_off_no_more(self, mailbox: Mailbox) -> None:
        """Fail the group over messages between other ranks, which have notified all members themselves."""
        mailbox.calls.put_off_ns = 0
        if mailbox.fault is None:
            mailbox.calls.mine = mailbox.calls.describe(None, 0)
            self._outcomes.fail(mailbox, explained(mailbox.calls))

    # Introductions

    def introduce(
        self, mailbox: Mailbox, link: Link, peer: int, fingerprint: int, seq: int | None, number: int = 0
    ) -> None:
        """Send a member the call behind a fingerprint, once, before the first message that carries it.

        A rank that only sends may be done and compute when others find that it called something else.

        Args:
            seq: The collective that it is of; None for a point-to-point message.
            number: Number of that message; 0 for the last one.
        """
        told = mailbox.calls.told[peer]
        if len(told) >= MAX_TOLD:
            told.clear()
        told.add(fingerprint)
        called = mailbox.calls.describe(seq, number)
        if called.fingerprint == fingerprint and (seq is not None or _is_message(called.call, "send", peer)):
            payload = called.call.encode()
            header = Header(
                Kind.CALLED,
                context=mailbox.context,
                seq=called.seq,
                fingerprint=called.fingerprint,
                nbytes=len(payload),
            )
            self._linkage.send(link, header.encode() + payload)

    def on_called(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        mailbox.calls.note_introduced(peer, header.fingerprint, Call.decode(payload or b""))


def _sizes(mailbox: Mailbox, receiving: Receiving, peer: int, header: Header) -> str:
    """Return how a message of a collective differs from its receive, if the calls are alike otherwise."""
    if header.fingerprint != receiving.fingerprint:
        return ""
    sender, receiver = mailbox.names([peer], False), mailbox.names([mailbox.rank], False)
    return f"{sender} sends {header.total} bytes to {receiver}, which receives {receiving.nbytes}"


def called_in_message(mailbox: Mailbox, op: str, peer: int, number: int) -> Called:
    """Return this rank's call whose message has a number; without its details if it is not known any more.

    Args:
        mailbox: The group.
        op: ``"send"`` or ``"recv"``.
        peer: Group rank of the other side.
        number: The message's number; 0 for the last operation.
    """
    called = mailbox.calls.describe(None, number)
    if _is_message(called.call, op, peer):
        return called
    text = f"{op}(peer={peer}), which is long ago"
    return Called(0, 0, text, Call(op=op, peer=peer, text=text))


def _is_message(call: Call, op: str, peer: int) -> bool:
    """Whether a call may be the one of a message; a receive from any rank has no peer."""
    return call.op == op and call.peer in ((peer,) if op == "send" else (peer, None))


def called_of(header: Header, call: Call) -> Called:
    """Return the call that a member described in a frame."""
    return Called(header.seq, header.fingerprint, call.text, call)
