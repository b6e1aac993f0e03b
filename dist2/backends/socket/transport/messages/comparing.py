"""`Comparing`: whether the members of a group call the same. Under the fabric's lock; never blocks.

Fingerprints ride on messages and are compared on arrival. Where ranks that differ exchange no message,
probes do it: a rank that has been blocked for a while tells the others what it calls. Whoever finds a
difference tells all members.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import attrs

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.mailbox import Called, Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.call import MAX_BYTES, Call
from dist2.errors import MismatchError, PeerLostError
from dist2.wire import ANSWER, TAGGED, TEXT_BYTES, Header, Kind

ALL_PROBED = 64
"""Up to this many members, a blocked rank probes all; in larger groups those 1, 2, 4, ... ranks away."""
UNANSWERED_S = 0.5
"""How long after nobody answered at a member's address it is held for dead, unless it turns out to have
left in good order, or to have done its part."""

PUT_OFF_NS = 100_000_000
"""How long a collective may take to end where messages did not fit: all that it needs may be on its way."""

MAX_TOLD = 4096
"""Fingerprints that a member is remembered to know."""


class Comparing(Outcomes):
    """Compares calls of all groups of a fabric."""

    # On arrival

    def compare(self, mailbox: Mailbox, seq: int, fingerprint: int) -> None:
        """Compare what has already come with what this rank calls now."""
        if mailbox.described:  # others found that ranks differ before this one had called
            self._report_mismatch(mailbox, seq)
            return
        for arrived in mailbox.strays(seq):
            if arrived.header.fingerprint != fingerprint:
                self._accuse(mailbox, arrived.peer, arrived.header)
        for peer, called in list(mailbox.probes.items()):
            if called.seq <= seq:
                del mailbox.probes[peer]
            if called.seq == seq and called.fingerprint != fingerprint:
                mailbox.described[peer] = called
                mailbox.offenders.add(peer)
        if mailbox.offenders:
            self._report_mismatch(mailbox, seq)

    def disagree(self, mailbox: Mailbox, seq: int | None) -> None:
        """Fail the group: ranks were found to have called different things."""
        self._report_mismatch(mailbox, seq)

    def _contradiction(self, mailbox: Mailbox, peer: int, header: Header) -> bool:
        """Fail the group if a message is of an operation that this rank called differently."""
        if not mailbox.contradicts(header):
            return False
        self._accuse(mailbox, peer, header)
        self._report_mismatch(mailbox, header.seq)
        return True

    def _agrees(self, mailbox: Mailbox, receiving: Receiving, peer: int, header: Header) -> bool:
        """Whether a message is what its receive expects; if not, the group fails on both sides."""
        fits = header.total <= receiving.nbytes if receiving.tagged else header.total == receiving.nbytes
        if fits and header.fingerprint == receiving.fingerprint:
            return True
        self._accuse(mailbox, peer, header)
        if receiving.tagged:
            self._report_mismatch(mailbox, None, mine=receiving.number, theirs=header.transfer)
        else:
            self._report_mismatch(mailbox, receiving.seq)
        self.finish(receiving, mailbox.fault)
        return False

    def _accuse(self, mailbox: Mailbox, peer: int, header: Header) -> None:
        """Note who sent what this rank did not expect, and what that means if it has said so."""
        mailbox.offenders.add(peer)
        call = mailbox.introduced.get((peer, header.fingerprint))
        if call is not None:
            if not header.flags & TAGGED:
                call = attrs.evolve(call, seq=header.seq)
            mailbox.described.setdefault(peer, called_of(header, call))

    def _report_mismatch(self, mailbox: Mailbox, seq: int | None, mine: int = 0, theirs: int = 0) -> None:
        """Fail the group, and tell all members what this one called, once.

        Args:
            seq: The collective; None for a point-to-point message.
            mine: Number of this rank's message then.
            theirs: Number that the sender gave it.
        """
        if mailbox.fault is not None:
            return
        called = mailbox.mine = mailbox.describe(seq, mine)
        mailbox.fault = MismatchError("ranks called different operations", expected=called.text)
        # Told first: a message that is withdrawn looks to others like one of a rank that gave up by itself.
        self._tell_mismatch(mailbox, called, seq is None, theirs)
        self.fail(mailbox, mailbox.fault)

    def _tell_mismatch(self, mailbox: Mailbox, called: Called, tagged: bool, theirs: int) -> None:
        payload = called.call.encode() + self._accusations(mailbox)
        frame = Header(
            Kind.MISMATCH,
            flags=TAGGED if tagged else 0,
            context=mailbox.context,
            seq=called.seq,
            fingerprint=called.fingerprint,
            nbytes=len(payload),
        )
        for rank in range(len(mailbox.fabric_ids)):
            if rank != mailbox.rank and rank not in mailbox.left:
                try:
                    link = self.reach(mailbox, rank)
                except PeerLostError:
                    continue  # its death is told elsewhere
                number = theirs if rank in mailbox.offenders else 0
                link.put(frame._replace(transfer=number).encode() + payload)
                self.flush(link)

    @staticmethod
    def _accusations(mailbox: Mailbox) -> bytes:
        """Return a line for each rank that called something else, as far as known and as many as fit."""
        lines = b""
        for rank in sorted(mailbox.offenders):
            described = mailbox.described.get(rank)
            line = b"\n%d " % rank + (described.call.encode() if described is not None else b"")
            if len(lines) + len(line) <= TEXT_BYTES - MAX_BYTES:
                lines += line
        return lines

    def _on_mismatch(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        said, *accusations = bytes(payload or b"").split(b"\n")
        mailbox.described[peer] = called_of(header, Call.decode(said))
        for line in accusations:
            number, _, text = line.partition(b" ")
            rank = int(number) if number.isdigit() else -1
            if rank != mailbox.rank and 0 <= rank < len(mailbox.cards):
                mailbox.offenders.add(rank)
                if text:
                    call = Call.decode(text)
                    mailbox.described.setdefault(rank, Called(call.seq, 0, call.text, call))
        tagged = bool(header.flags & TAGGED)
        if tagged and header.transfer:  # it is about a message that this rank sent
            mailbox.offenders.add(peer)
            self._report_mismatch(mailbox, None, mine=header.transfer)
        elif tagged:  # it is between others
            if mailbox.waits_for_collective():
                mailbox.put_off_ns = time.monotonic_ns() + PUT_OFF_NS
            else:
                self.put_off_no_more(mailbox)
        elif mailbox.has_begun(header.seq) or mailbox.waits_for_messages_only():
            self._report_mismatch(mailbox, header.seq)

    def put_off_no_more(self, mailbox: Mailbox) -> None:
        """Fail the group over messages between others, who have told all members by themselves."""
        mailbox.put_off_ns = 0
        if mailbox.fault is None:
            mailbox.mine = mailbox.describe(None, 0)
            self.fail(mailbox, MismatchError("ranks called different operations"))

    # Introductions

    def introduce(self, mailbox: Mailbox, link: Link, peer: int, fingerprint: int, seq: int | None) -> None:
        """Tell a member what a fingerprint means, once, before the first message that carries it.

        A rank that only sends may be done and compute when others find that it called something else.

        Args:
            seq: The collective that it is of; None for a point-to-point message.
        """
        told = mailbox.told[peer]
        if len(told) >= MAX_TOLD:
            told.clear()
        told.add(fingerprint)
        called = mailbox.describe(seq, 0)
        if called.fingerprint == fingerprint:
            payload = called.call.encode()
            header = Header(
                Kind.CALLED,
                context=mailbox.context,
                seq=called.seq,
                fingerprint=called.fingerprint,
                nbytes=len(payload),
            )
            link.put(header.encode() + payload)
            self.flush(link)

    def _on_called(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        mailbox.note_introduced(peer, header.fingerprint, Call.decode(payload or b""))

    # Probes

    def probe(self, mailbox: Mailbox) -> None:
        """Tell the other members what this rank calls, as it has been blocked for a while.

        It also makes links to them: the end of one tells of a death.
        """
        if mailbox.fault is not None:
            return
        frame = self._probe_frame(mailbox, 0)
        for rank in self._probed(mailbox):
            try:
                link = self.reach(mailbox, rank)
            except PeerLostError:
                self._nobody_answered(mailbox, rank)
                continue
            link.put(frame)
            self.flush(link)

    @staticmethod
    def _probed(mailbox: Mailbox) -> Iterator[int]:
        """Yield the members to probe."""
        size = len(mailbox.cards)
        distances = range(1, size) if size <= ALL_PROBED else [1 << bit for bit in range(size.bit_length())]
        for distance in distances:
            rank = (mailbox.rank + distance) % size
            if rank != mailbox.rank and rank not in mailbox.left:
                yield rank

    @staticmethod
    def _probe_frame(mailbox: Mailbox, flags: int) -> bytes:
        called = mailbox.describe(mailbox.latest, 0) if mailbox.begun else Called(0, 0, "nothing yet")
        size = len(mailbox.cards)
        seen = mailbox.latest_seen() if size <= ALL_PROBED else []
        text = called.call.encode()
        payload = json.dumps(seen).encode() + b"\n" + text
        return (
            Header(
                Kind.PROBE,
                flags,
                mailbox.context,
                seq=called.seq,
                fingerprint=called.fingerprint,
                nbytes=len(payload),
            ).encode()
            + payload
        )

    def _nobody_answered(self, mailbox: Mailbox, rank: int) -> None:
        """Nobody listens at a member's address.

        It may have left in good order without a link to tell over, after it did its part: then others
        know that it did. A process of this host has a watcher, which knows better.
        """
        fabric_id = mailbox.fabric_ids[rank]
        if self.is_watched(fabric_id):
            return
        now = time.monotonic()
        since = mailbox.unanswered.setdefault(rank, now)
        if now - since >= UNANSWERED_S and mailbox.seen[rank] < max(mailbox.latest, 1):
            self._lost(fabric_id)

    def _on_probe(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        if mailbox.fault is not None:
            return
        seen, _, text = bytes(payload or b"").partition(b"\n")
        mailbox.note_seen(peer, header.seq, _numbers(seen))
        called = called_of(header, Call.decode(text))
        if header.seq > mailbox.latest:
            mailbox.probes[peer] = called
        if mailbox.contradicts(header):  # also if this rank has called it since: see `Mailbox.begin`
            mailbox.described[peer] = called
            self._contradiction(mailbox, peer, header)
        if not header.flags & ANSWER and mailbox.fault is None:
            link = self.reach(mailbox, peer)  # it has just spoken
            link.put(self._probe_frame(mailbox, ANSWER))
            self.flush(link)


def called_of(header: Header, call: Call) -> Called:
    return Called(header.seq, header.fingerprint, call.text, call)


def _numbers(data: bytes) -> list[int]:
    """Read what `_probe_frame` wrote; a peer that wrote something else tells nothing."""
    try:
        numbers = json.loads(data)
    except (ValueError, RecursionError):
        return []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return []
    return numbers
