"""`Inbound`: what becomes of frames that come in. Under the fabric's lock; never blocks.

How frames get to another process is the part of `Fabric` that is left abstract here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import structlog

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.mailbox import FRAME_COST, Arrived, Mailbox
from dist2.backends.socket.transport.messages.outbound import Outbound
from dist2.backends.socket.transport.messages.outcomes import lost_error
from dist2.errors import Dist2Error, PeerLostError, WireError
from dist2.wire import ABORTED, TAGGED, Header, Kind, Loan

log = structlog.get_logger("dist2.fabric")


class Inbound(Outbound):
    """Opens groups and acts on frames, of all groups of a fabric."""

    @abstractmethod
    def take_ring(self, link: Link, text: str) -> None:
        """Read what a peer sends from its ring from now on."""

    # Groups

    def open_mailbox(self, mailbox: Mailbox) -> None:
        """Let a group receive: also what came before it was opened."""
        self._mailboxes[mailbox.context] = mailbox
        if self._ended is not None:
            self.fail(mailbox, self._ended)
        if not self._dead.isdisjoint(mailbox.fabric_ids):
            self.fail(mailbox, lost_error(mailbox, self._dead))
        for link, header, payload in self._absent_groups.take(mailbox.context):
            try:
                self._dispatch_frame(link, header, payload)
            except WireError as error:  # the fault of who sent it, not of who opens the group
                log.warning("connection_closed", reason=str(error), peer=link.peer_id)
                link.reject()

    def close_mailbox(self, mailbox: Mailbox, error: Dist2Error) -> None:
        """Leave a group: what is pending fails, members are told, now or once they have a link."""
        if self._mailboxes.pop(mailbox.context, None) is None:
            return
        self._absent_groups.close(mailbox.context)
        self.fail(mailbox, error)
        self._deserted.pop(mailbox, None)
        flags = 0 if mailbox.aborted is None else ABORTED
        why = mailbox.reason if flags else b""
        frame = Header(Kind.LEAVE, flags, mailbox.context, nbytes=len(why)).encode() + why
        for rank, fabric_id in enumerate(mailbox.fabric_ids):
            if self._outgoing.get(fabric_id) is not None or mailbox.aborted is not None:
                # After an abort the others may wait for this member, which may never come to wait itself.
                self._tell(mailbox, rank, frame)
            elif rank != mailbox.rank and rank not in mailbox.left and fabric_id not in self._dead:
                self._absent_groups.tell_later(fabric_id, mailbox.context)

    # Frames in

    def frame_begins(self, link: Link, header: Header) -> memoryview | None:
        """Say where a payload goes."""
        if header.kind is Kind.HELLO:
            raise WireError("a second hello")
        if header.kind is Kind.DATA:
            return self._place_of_segment(link, header)
        if header.kind is Kind.EAGER:
            self._heard[link.peer_id or ""] = link
            place = self._place_of_eager(link, header)
            if place is not None:
                return place
        payload = self._payloads[link] = bytearray(header.nbytes)
        return memoryview(payload)

    def frame_ended(self, link: Link, header: Header) -> None:
        """Act on a complete frame."""
        payload = self._payloads.pop(link, None)
        if header.kind is Kind.DATA:
            self._segment_ended(link, header)
        elif header.kind is Kind.RING:
            self.take_ring(link, bytes(payload or b"").decode(errors="replace"))
        elif header.kind is Kind.EAGER and payload is None:
            receiving, link.receiving = link.receiving, None
            if receiving is not None:  # else it was cancelled while its payload came in
                self._received(receiving)
        else:
            self._dispatch_frame(link, header, payload)

    def _place_of_eager(self, link: Link, header: Header) -> memoryview | None:
        """Return the memory of the receive that is posted for a message, if one is."""
        mailbox = self._mailboxes.get(header.context)
        peer = mailbox.rank_of(link.peer_id or "") if mailbox is not None else None
        if mailbox is None or peer is None or mailbox.fault is not None:
            return None
        receiving = mailbox.match(Arrived(header, peer).key)
        if receiving is None:
            self._contradiction(mailbox, peer, header)
            return None
        self.account_for(mailbox, peer, receiving.tagged, FRAME_COST + header.nbytes)
        if not self._agrees(mailbox, receiving, peer, header):
            return None
        receiving.source, receiving.nbytes = peer, header.nbytes
        link.receiving = receiving
        mailbox.accepted.add(receiving)
        assert receiving.data is not None  # it was posted
        return receiving.data[: header.nbytes]

    def _place_of_segment(self, link: Link, header: Header) -> memoryview | None:
        receiving = link.incoming.get(header.transfer)
        if receiving is None or receiving.data is None:
            return None  # cancelled meanwhile
        if header.tag < 0 or header.tag + header.nbytes > receiving.nbytes:
            raise WireError("a segment outside of its message")
        link.receiving = receiving
        return receiving.data[header.tag : header.tag + header.nbytes]

    def _segment_ended(self, link: Link, header: Header) -> None:
        receiving, link.receiving = link.receiving, None
        if receiving is None:
            return
        receiving.missing -= header.nbytes
        if receiving.missing <= 0:
            link.incoming.pop(header.transfer, None)
            self._received(receiving)

    def _dispatch_frame(self, link: Link, header: Header, payload: bytearray | None) -> None:
        if header.kind is Kind.DEATH:
            self._lost(bytes(payload or b"").decode(errors="replace"))
            return
        if header.kind is Kind.BYE:
            self._parted.add(link.peer_id or "")
            return
        mailbox = self._mailboxes.get(header.context)
        if mailbox is None:
            self._absent_groups.hold(link, header, payload)
            return
        peer = mailbox.rank_of(link.peer_id or "")
        if peer is None:
            raise WireError("a frame for a group that its sender is not in")
        if header.kind is Kind.OFFER:
            if mailbox.fault is None:
                loan = Loan.decode(payload or b"")
                header = header._replace(transfer=loan.number)
                self._place(mailbox, Arrived(header, peer, link=link, loan=loan))
        elif header.kind in (Kind.EAGER, Kind.ANNOUNCE):
            if mailbox.fault is None:
                eager = header.kind is Kind.EAGER
                self._place(mailbox, Arrived(header, peer, payload if eager else None, link=link))
        else:
            _HANDLERS[header.kind](self, link, mailbox, peer, header, payload)

    def _on_accept(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        sending = mailbox.sending.get(header.transfer)
        out = self._outgoing.get(mailbox.fabric_ids[peer])  # if it is gone, so is the announcement
        if sending is None or out is None or sending.peer != peer or sending.unasked:
            return
        if not sending.accepted:
            sending.accepted = True
            out.stream(sending)
            if not self._gathers:
                self.flush(out)

    def _on_credit(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        account = mailbox.accounts[bool(header.flags & TAGGED)][peer]
        account.used = max(0, account.used - header.total)
        self._send_waiting(mailbox, account)

    def _on_taken(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        sending = mailbox.sending.get(header.transfer)
        if sending is None or sending.peer != peer or sending.loan is None or sending.accepted:
            return
        self.message_sent(sending)

    def _on_cancel(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        mailbox.take_reason(peer, payload)
        receiving = link.incoming.pop(header.transfer, None)
        if receiving is None:
            dropped = mailbox.drop_announced(peer, header.transfer)
            if dropped is not None:
                self.account_for(mailbox, peer, dropped.key[0], dropped.cost)
        else:
            mailbox.accepted.discard(receiving)
            why = mailbox.why([peer])
            self.finish(receiving, PeerLostError(f"rank {peer} gave up sending{why}", ranks=[peer]))

    def _on_leave(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        mailbox.take_reason(peer, payload)
        if header.flags & ABORTED:
            self._member_aborted(mailbox, peer)
        else:
            self._member_left(mailbox, peer)


Handler = Callable[[Inbound, Link, Mailbox, int, Header, "bytearray | None"], None]
_HANDLERS: dict[Kind, Handler] = {
    Kind.ACCEPT: Inbound._on_accept,
    Kind.CREDIT: Inbound._on_credit,
    Kind.TAKEN: Inbound._on_taken,
    Kind.CANCEL: Inbound._on_cancel,
    Kind.LEAVE: Inbound._on_leave,
    Kind.MISMATCH: Inbound._on_mismatch,
    Kind.REVOKE: Inbound._on_revoke,
    Kind.VOTE: Inbound._on_letter,
    Kind.DECISION: Inbound._on_letter,
    Kind.PROBE: Inbound._on_probe,
    Kind.CALLED: Inbound._on_called,
}
