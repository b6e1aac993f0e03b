# cython: annotation_typing=False
"""`Intake`: handles arrived frames. Under the fabric's lock; never blocks."""

from __future__ import annotations

from collections.abc import Callable

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.messages.absent_groups import AbsentGroups
from dist2.backends.socket.transport.messages.assembly import Assembly
from dist2.backends.socket.transport.messages.comparison import Comparison
from dist2.backends.socket.transport.messages.delivery import Delivery
from dist2.backends.socket.transport.messages.departures import Departures
from dist2.backends.socket.transport.messages.dispatch import Dispatch
from dist2.backends.socket.transport.messages.given_up import GivenUp
from dist2.backends.socket.transport.messages.mailbox import Arrived, Mailbox
from dist2.backends.socket.transport.messages.origins import Origins
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.probes import Probes
from dist2.backends.socket.transport.messages.transfer import Sending
from dist2.backends.socket.wire import ABORTED, UNSEEN, Header, Kind
from dist2.errors import AuthenticationError, WireError
from dist2.runtime.built import check_built

check_built(__name__, __file__)

_WORDS = 300
"""Longest text about the end of a process, in characters."""

Handler = Callable[[Link, Mailbox, int, Header, "bytearray | None"], None]
"""Handles a frame: its link, its group, the sender's group rank, header and payload."""


class Intake:
    """Routes arrived frames to the part of the fabric that handles them.

    Args:
        linkage: The links; their events arrive here.
        presence: Notified of processes that exit cleanly.
        outcomes: Notified of sent messages, and of lost links.
        departures: Notified of lost processes.
        delivery: Takes messages and their payloads.
        mailboxes: The mailboxes of the open groups, by context.
        absent: Keeps frames of groups that are not open.
        handlers: Handlers of the other frames of a group.
        origins: Takes what ranks say of the groups that they have made.
        given_up: Answers messages to a group that has failed here.
    """

    def __init__(
        self,
        linkage: Linkage,
        presence: Presence,
        outcomes: Outcomes,
        departures: Departures,
        delivery: Delivery,
        mailboxes: dict[int, Mailbox],
        absent: AbsentGroups,
        handlers: dict[Kind, Handler],
        origins: Origins,
        given_up: GivenUp,
    ) -> None:
        self._rings = linkage.rings
        self._presence = presence
        self._outcomes = outcomes
        self._departures = departures
        self._delivery = delivery
        self._mailboxes = mailboxes
        self._absent = absent
        self._handlers = handlers
        self._origins = origins
        self._given_up = given_up
        self._payloads: dict[Link, bytearray] = {}

    # Events of links

    def greet(self, link: Link) -> None:
        """Send a process the notices that were deferred until there was a link to it."""
        self._absent.tell(link)

    def frame_begins(self, link: Link, header: Header) -> memoryview | None:
        """Return the buffer for a payload."""
        if header.kind is Kind.HELLO:
            raise WireError("a second hello")
        if header.kind is Kind.DATA:
            return self._delivery.begin_segment(link, header)
        if header.kind is Kind.EAGER:
            place = self._place_of_eager(link, header)
            if place is not None:
                return place
        payload = self._payloads[link] = bytearray(header.nbytes)
        return memoryview(payload)

    def frame_ended(self, link: Link, header: Header) -> None:
        """Act on a complete frame."""
        payload = self._payloads.pop(link, None)
        if header.kind is Kind.DATA:
            self._delivery.end_segment(link, header)
        elif header.kind is Kind.RING:
            self._rings.read(link, bytes(payload or b"").decode(errors="replace"))
        elif header.kind is Kind.EAGER and payload is None:
            self._delivery.end_eager(link)
        else:
            self.act_on(link, header, payload)

    def message_sent(self, sending: Sending) -> None:
        """The last byte of a message is with the kernel."""
        self._outcomes.message_sent(sending)

    def link_is_gone(self, link: Link) -> None:
        """Fail the messages that were arriving over a closed link."""
        self._payloads.pop(link, None)
        self._outcomes.link_is_gone(link)

    def refused(self, fabric_id: str, error: AuthenticationError) -> None:
        """A process refuses this one, or fails authentication."""
        self._departures.process_refused(fabric_id, error)

    # Frames

    def _place_of_eager(self, link: Link, header: Header) -> memoryview | None:
        mailbox = self._mailboxes.get(header.context)
        peer = mailbox.rank_of(link.peer_id or "") if mailbox is not None else None
        if mailbox is None or peer is None:
            return None
        return self._delivery.begin_eager(link, mailbox, peer, header)

    def act_on(self, link: Link, header: Header, payload: bytearray | None) -> None:
        """Have a frame acted on.

        Raises:
            WireError: It is not the protocol.
        """
        if header.kind is Kind.DEATH:
            fabric_id, _, words = bytes(payload or b"").decode(errors="replace").partition(" ")
            if header.flags & UNSEEN:
                lost, _, why = words.partition(" ")
                self._departures.cut_between(fabric_id, lost, why[:_WORDS])
            else:
                self._departures.process_died(fabric_id, words[:_WORDS] or "died")
            return
        if header.kind is Kind.BYE:
            self._presence.parted.add(link.peer_id or "")
            return
        if header.kind is Kind.ORIGIN and not header.flags & ABORTED:
            self._origins.on_made(link, header, payload)
            return
        mailbox = self._mailboxes.get(header.context)
        if mailbox is None:
            self._absent.hold(link, header, payload)
            return
        peer = mailbox.rank_of(link.peer_id or "")
        if peer is None:
            raise WireError("a frame for a group that its sender is not in")
        if header.kind in _MESSAGES:
            if mailbox.fault is None:
                self._delivery.place(mailbox, _arrived(link, peer, header, payload))
            if mailbox.gave_up is not None:
                self._given_up.answer(mailbox, peer, header)
        else:
            self._handlers[header.kind](link, mailbox, peer, header, payload)


_MESSAGES = (Kind.EAGER, Kind.ANNOUNCE)


def _arrived(link: Link, peer: int, header: Header, payload: bytearray | None) -> Arrived:
    """Return the message that a frame contains, or announces."""
    return Arrived(header, peer, payload if header.kind is Kind.EAGER else None, link=link)


def handlers(
    assembly: Assembly,
    comparison: Comparison,
    delivery: Delivery,
    departures: Departures,
    dispatch: Dispatch,
    probes: Probes,
    origins: Origins,
    given_up: GivenUp,
) -> dict[Kind, Handler]:
    """Return the handlers of a group's frames, except for messages."""
    return {
        Kind.ACCEPT: dispatch.on_accept,
        Kind.CREDIT: dispatch.on_credit,
        Kind.CANCEL: delivery.on_cancel,
        Kind.LEAVE: departures.on_leave,
        Kind.MISMATCH: comparison.on_mismatch,
        Kind.CALLED: comparison.on_called,
        Kind.REVOKE: assembly.on_revoke,
        Kind.VOTE: assembly.on_letter,
        Kind.DECISION: assembly.on_letter,
        Kind.PROBE: probes.on_probe,
        Kind.ORIGIN: origins.on_failed,
        Kind.GAVE_UP: given_up.on_gave_up,
    }
