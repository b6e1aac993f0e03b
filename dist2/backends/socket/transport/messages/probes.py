"""`Probes`: questions between blocked members. Under the fabric's lock; never blocks.

Ranks that called different things may exchange no message, and a death is seen only over a link. So a rank
that has been blocked for a while sends its call to the others, and receives theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.messages.calls import NOTHING_YET
from dist2.backends.socket.transport.messages.comparison import Comparison, called_of
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.departures import Departures, behind, did_not_call
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.origins import Origins
from dist2.backends.socket.wire import ANSWER, Header, Kind
from dist2.errors import PeerLostError, ResourceError
from dist2.operation.description import Call

ALL_PROBED = 64
"""Up to this many members, a blocked rank probes all; in larger groups those 1, 2, 4, ... ranks away."""


class Probes:
    """Asks the members of groups for their current calls, and answers.

    Args:
        linkage: The links to them.
        courier: Finds the links to them.
        presence: Knows which processes are watched.
        comparison: Compares their calls.
        departures: Notified of members that do not answer.
        origins: Asks those from which nothing has come whether they have made the group.
    """

    def __init__(
        self,
        linkage: Linkage,
        courier: Courier,
        presence: Presence,
        comparison: Comparison,
        departures: Departures,
        origins: Origins,
    ) -> None:
        self._linkage = linkage
        self._courier = courier
        self._presence = presence
        self._comparison = comparison
        self._departures = departures
        self._origins = origins

    def probe(self, mailbox: Mailbox) -> None:
        """Send this rank's call to the other members after it has been blocked for a while.

        It also makes links to them: the end of a link reports a death.
        """
        if mailbox.fault is not None:
            return
        frame = self._probe_frame(mailbox, 0)
        for link in self.reach(mailbox):
            self._linkage.send(link, frame)
        unknown = [rank for rank in self._probed(mailbox) if not mailbox.calls.seen[rank]]
        self._origins.ask(mailbox, unknown)
        lagging = behind(mailbox)
        if lagging:
            self._departures.fall_behind(mailbox, lagging)

    def reach(self, mailbox: Mailbox) -> list[Link]:
        """Return links to the members to probe; those that cannot be reached are gone, after a while."""
        links = []
        for rank in self._probed(mailbox):
            try:
                links.append(self._courier.reach(mailbox, rank))
            except PeerLostError as error:
                self._nobody_answered(mailbox, rank, error)
            except ResourceError:
                continue  # it can be asked again
        return links

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
        calls, size = mailbox.calls, len(mailbox.cards)
        called = calls.describe(calls.latest, 0) if calls.begun else NOTHING_YET
        seen = calls.latest_seen() if size <= ALL_PROBED else []
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

    def _nobody_answered(self, mailbox: Mailbox, rank: int, error: PeerLostError) -> None:
        """No process listens at a member's address.

        The member may have exited cleanly without a link for its report, after it did its part: then others
        know that it did. A process of this host has a watcher, which decides instead.
        """
        fabric_id = mailbox.fabric_ids[rank]
        if self._presence.has_parted(fabric_id):
            self._departures.process_left(fabric_id)
            return
        if self._presence.is_watched(fabric_id):
            return
        if did_not_call(mailbox, rank, at_least=1):
            self._departures.connection_lost(fabric_id, str(error))

    def on_probe(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        if mailbox.fault is not None:
            if not header.flags & ANSWER:
                self._comparison.repeat(mailbox, peer)
            return
        seen, _, text = bytes(payload or b"").partition(b"\n")
        mailbox.calls.note_seen(peer, header.seq, _numbers(seen))
        called = called_of(header, Call.decode(text))
        if header.seq > mailbox.calls.latest:
            mailbox.calls.probes[peer] = called
        if mailbox.calls.contradicts(header):  # also if this rank has called it since: see `Mailbox.begin`
            mailbox.calls.described[peer] = called
            self._comparison.contradiction(mailbox, peer, header)
        if not header.flags & ANSWER and mailbox.fault is None:
            link = self._courier.reach(mailbox, peer)  # it has just spoken
            self._linkage.send(link, self._probe_frame(mailbox, ANSWER))


def _numbers(data: bytes) -> list[int]:
    """Parse a frame of `_probe_frame`; a malformed one is ignored."""
    try:
        numbers = json.loads(data)
    except (ValueError, RecursionError):
        return []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return []
    return numbers
