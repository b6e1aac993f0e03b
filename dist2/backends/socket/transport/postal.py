"""`Postal`: what happens to messages. Everything here runs under the fabric's lock and never blocks.

Short messages travel at once (`EAGER`), within a credit that bounds what a receiver may have to hold.
Long ones are announced; the receiver accepts when it has a buffer, and the payload goes straight into
it. How frames get to another process is the part of `Fabric` that is left abstract here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import structlog

from dist2.backends.socket.transport.assembly import Assembly
from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.link import Link
from dist2.backends.socket.transport.loans import Borrowed, Lent
from dist2.backends.socket.transport.mailbox import (
    CREDIT_BYTES,
    FRAME_COST,
    REPORTED_BYTES,
    Account,
    Arrived,
    Mailbox,
    cost_of,
)
from dist2.backends.socket.transport.outcomes import aborted_error, lost_error
from dist2.backends.socket.transport.raw import address_of
from dist2.backends.socket.transport.transfer import Receiving, Sending
from dist2.errors import Dist2Error, PeerLostError, WireError
from dist2.wire import ABORTED, EAGER_BYTES, LOAN_BYTES, PROMPT_BYTES, TAGGED, Header, Kind, Loan

log = structlog.get_logger("dist2.fabric")


class Postal(Assembly):
    """Posts, matches and answers messages of all groups of a fabric."""

    @abstractmethod
    def take_ring(self, link: Link, text: str) -> None:
        """Read what a peer sends from its ring from now on."""

    @abstractmethod
    def hear_why(self, link: Link) -> None:
        """Learn why a connection that takes nothing any more was refused, if it was; no frame is read."""

    # Groups

    def open_mailbox(self, mailbox: Mailbox) -> None:
        """Let a group receive: also what came before it was opened."""
        self._mailboxes[mailbox.context] = mailbox
        if self._ended is not None:
            self.fail(mailbox, self._ended)
        if not self._dead.isdisjoint(mailbox.fabric_ids):
            self.fail(mailbox, lost_error(mailbox, self._dead))
        for link, header, payload in self._lobby.take(mailbox.context):
            try:
                self._dispatch_frame(link, header, payload)
            except WireError as error:  # the fault of who sent it, not of who opens the group
                log.warning("connection_closed", reason=str(error), peer=link.peer_id)
                link.reject()

    def close_mailbox(self, mailbox: Mailbox, error: Dist2Error) -> None:
        """Leave a group: what is pending fails, members are told, now or once they have a link."""
        if self._mailboxes.pop(mailbox.context, None) is None:
            return
        self._lobby.close(mailbox.context)
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
                self._lobby.tell_later(fabric_id, mailbox.context)

    # Posting

    def post_send(self, mailbox: Mailbox, sending: Sending) -> None:
        """Send as far as credit and the receiver allow."""
        refusal = self._refusal(mailbox, sending.peer)
        if refusal is None and sending.tagged and mailbox.aborters:  # nobody may come to receive it
            refusal = aborted_error(mailbox)
        elif refusal is None:
            refusal = self._unreachable(mailbox, sending.peer)
            if refusal is not None:
                self.suspect(mailbox.fabric_ids[sending.peer])
        if refusal is not None:
            self.finish(sending, refusal)
        elif sending.peer == mailbox.rank:
            self._send_to_self(mailbox, sending)
        else:
            account = mailbox.accounts[sending.tagged][sending.peer]
            if account.waiting or account.used + cost_of(sending) > CREDIT_BYTES:
                account.waiting.append(sending)
            else:
                self._send(mailbox, sending)

    def post_recv(self, mailbox: Mailbox, receiving: Receiving) -> None:
        """Take the message if it is here, else wait for it."""
        arrived = mailbox.post(receiving) if mailbox.fault is None else None
        if arrived is not None:
            self._deliver(mailbox, arrived, receiving)
            return
        refusal = self._refusal(mailbox, receiving.peer)
        if refusal is None and self._unreachable(mailbox, receiving.peer) is not None:
            # What it sent before it went may still be coming in; if not, the receive fails in a moment.
            self.suspect(mailbox.fabric_ids[receiving.peer])
        elif refusal is not None:
            mailbox.forget(receiving)
            self.finish(receiving, refusal)

    def _refusal(self, mailbox: Mailbox, peer: int) -> Dist2Error | None:
        """Return why a message with a member cannot be, or None."""
        if mailbox.fault is not None:
            return mailbox.fault
        if peer in mailbox.aborters:
            return aborted_error(mailbox)
        if peer in mailbox.left:
            return PeerLostError(f"rank {peer} has left the group", ranks=[peer])
        if peer == ANY_SOURCE and len(mailbox.left | {mailbox.rank}) == len(mailbox.cards) > 1:
            others = sorted(mailbox.left)
            return PeerLostError(f"rank(s) {', '.join(map(str, others))} have left the group", ranks=others)
        return None

    def _unreachable(self, mailbox: Mailbox, peer: int) -> PeerLostError | None:
        """See to a link to a member, whose end is then noticed; return why there can be none."""
        if peer < 0 or peer == mailbox.rank:
            return None
        try:
            self.reach(mailbox, peer)
        except PeerLostError as error:
            return PeerLostError(f"rank {peer} cannot be reached: {error}", ranks=[peer])
        return None

    def _send(self, mailbox: Mailbox, sending: Sending) -> None:
        try:
            link = self.reach(mailbox, sending.peer)
        except PeerLostError:  # it went while the message waited for credit
            self._unreached(mailbox, sending)
            return
        if sending.fingerprint not in mailbox.told[sending.peer]:
            seq = None if sending.tagged else sending.seq
            self.introduce(mailbox, link, sending.peer, sending.fingerprint, seq)
        account = mailbox.accounts[sending.tagged][sending.peer]
        if not sending.unasked:
            sending.unasked = link.is_free_socket and _may_be_prompt(account, sending)
        account.used += cost_of(sending)
        eager = sending.unasked
        if not eager and self._offer(mailbox, link, sending):
            return
        header = Header(
            Kind.EAGER if eager else Kind.ANNOUNCE,
            flags=TAGGED if sending.tagged else 0,
            context=sending.context,
            seq=sending.seq,
            tag=sending.tag,
            fingerprint=sending.fingerprint,
            nbytes=sending.nbytes if eager else 0,
            transfer=0 if eager else sending.number,
            total=sending.nbytes,
        ).encode()
        if not eager:
            mailbox.sending[sending.number] = sending
            link.put(header)
        else:
            try:
                sent = link.send(header, sending)
            except OSError:
                link.give_up_writing()  # whether it died or left is known once all it sent is read
                self.hear_why(link)
                self._unreached(mailbox, sending)
                return
            if sent:
                self.finish(sending, None)
                return
            mailbox.sending[sending.number] = sending
        self._flush(link)

    def send_rest(self, mailbox: Mailbox, link: Link, header: bytes, sending: Sending, count: int) -> None:
        """Send the rest of a message, of which the kernel took some bytes."""
        mailbox.sending[sending.number] = sending
        link.go_on(header, sending, count)
        self._flush(link)

    def _offer(self, mailbox: Mailbox, link: Link, sending: Sending) -> bool:
        """Announce a long message that the receiver may read where it lies; False if it may not."""
        data = sending.data
        assert data is not None  # it is pending
        if link.tx is None or data.readonly:  # a process that cannot even write it has no address of it
            return False
        lent = Lent.enter(link.tx, sending.number)
        if lent is None:
            return False
        sending.loan = lent
        mailbox.sending[sending.number] = sending
        header = Header(
            Kind.OFFER,
            flags=TAGGED if sending.tagged else 0,
            context=sending.context,
            seq=sending.seq,
            tag=sending.tag,
            fingerprint=sending.fingerprint,
            nbytes=LOAN_BYTES,
            total=sending.nbytes,
        ).encode()
        link.put(header + lent.loan(sending.number, data).encode())
        self._flush(link)
        return True

    def _unreached(self, mailbox: Mailbox, sending: Sending) -> None:
        peer = sending.peer
        self.finish(sending, mailbox.fault or PeerLostError(f"rank {peer} cannot be reached", ranks=[peer]))

    def _send_to_self(self, mailbox: Mailbox, sending: Sending) -> None:
        header = Header(
            Kind.ANNOUNCE,
            flags=TAGGED if sending.tagged else 0,
            context=sending.context,
            seq=sending.seq,
            tag=sending.tag,
            fingerprint=sending.fingerprint,
            transfer=sending.number,
            total=sending.nbytes,
        )
        arrived = Arrived(header, mailbox.rank, local=sending)
        held = mailbox.accounts[sending.tagged][mailbox.rank].held
        if sending.nbytes <= EAGER_BYTES and held + cost_of(sending) <= CREDIT_BYTES:
            assert sending.data is not None  # it is pending
            arrived.payload, arrived.local = bytearray(sending.data), None
            self.finish(sending, None)
        else:
            mailbox.sending[sending.number] = sending
        self._place(mailbox, arrived)

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
            self._lobby.hold(link, header, payload)
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
                self._flush(out)

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

    def _send_waiting(self, mailbox: Mailbox, account: Account) -> None:
        while account.waiting and account.used + cost_of(account.waiting[0]) <= CREDIT_BYTES:
            self._send(mailbox, account.waiting.popleft())

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

    # Matching

    def _place(self, mailbox: Mailbox, arrived: Arrived) -> None:
        """Give a message to its receive, or keep it until there is one."""
        receiving = mailbox.match(arrived.key)
        if receiving is not None:
            self._deliver(mailbox, arrived, receiving)
        elif not self._contradiction(mailbox, arrived.peer, arrived.header):
            mailbox.keep(arrived)

    def _deliver(self, mailbox: Mailbox, arrived: Arrived, receiving: Receiving) -> None:
        header, peer = arrived.header, arrived.peer
        if peer != mailbox.rank:
            self.account_for(mailbox, peer, receiving.tagged, arrived.cost)
        if not self._agrees(mailbox, receiving, peer, header):
            return
        receiving.source, receiving.nbytes = peer, header.total
        assert receiving.data is not None  # it was posted
        if arrived.payload is not None:
            if header.total:  # an empty buffer may be read-only
                receiving.data[: header.total] = arrived.payload
            self._received(receiving)
        elif arrived.local is not None:
            assert arrived.local.data is not None  # it is pending
            receiving.data[: header.total] = arrived.local.data
            del mailbox.sending[arrived.local.number]
            self.finish(arrived.local, None)
            self._received(receiving)
        else:
            self._accept_announced(mailbox, arrived, receiving)

    def _accept_announced(self, mailbox: Mailbox, arrived: Arrived, receiving: Receiving) -> None:
        assert arrived.link is not None  # it was announced over one
        header, peer = arrived.header, arrived.peer
        if arrived.link.fileno() < 0:
            self.finish(receiving, PeerLostError(f"rank {peer} is gone", ranks=[peer]))
            return
        self.await_announced(mailbox, receiving, arrived.link, header.transfer)
        rx = arrived.link.rx
        if arrived.loan is not None and rx is not None and rx.pid:
            assert receiving.data is not None  # it was posted
            receiving.loan = Borrowed(rx, arrived.loan, address_of(receiving.data), header.total)
            self._borrowing.append((receiving, arrived.link))
            return
        self.answer(mailbox, peer, Header(Kind.ACCEPT, context=mailbox.context, transfer=header.transfer))

    def await_announced(self, mailbox: Mailbox, receiving: Receiving, link: Link, number: int) -> None:
        """Have what comes about a message of this number concern a receive from now on."""
        receiving.missing = receiving.nbytes
        link.incoming[number] = receiving
        mailbox.accepted.add(receiving)

    def borrow(self) -> None:
        """Read a piece of a message where it lies: with the role of the poller, without the lock."""
        try:
            receiving, link = self._borrowing.popleft()
        except IndexError:
            return
        loan, refused = receiving.loan, False
        assert isinstance(loan, Borrowed)  # it is what was queued
        try:
            loan.read()
        except OSError:
            refused = True
        except BaseException:  # KeyboardInterrupt, perhaps in a thread that has nothing to do with it
            self._borrowing.append((receiving, link))
            raise
        with self.lock:
            if receiving.done or not (refused or loan.complete):
                if not receiving.done:
                    self._borrowing.append((receiving, link))
                return
            mailbox = self._mailboxes.get(receiving.context)
            if mailbox is not None and loan.stands:  # if not, a `CANCEL` is coming
                kind = Kind.ACCEPT if refused else Kind.TAKEN
                self.answer(
                    mailbox, receiving.source, Header(kind, 0, mailbox.context, transfer=loan.loan.number)
                )
                if not refused:
                    link.incoming.pop(loan.loan.number, None)
                    self._received(receiving)

    def account_for(self, mailbox: Mailbox, peer: int, tagged: bool, cost: int) -> None:
        """Note that a message was received; report often enough that the sender never runs dry."""
        account = mailbox.accounts[tagged][peer]
        account.owed += cost
        if account.owed >= REPORTED_BYTES:
            flags = TAGGED if tagged else 0
            owed, account.owed = account.owed, 0
            self.answer(mailbox, peer, Header(Kind.CREDIT, flags, mailbox.context, total=owed))

    def answer(self, mailbox: Mailbox, peer: int, header: Header) -> None:
        """Send a frame without payload; a peer that is gone needs none."""
        try:
            link = self.reach(mailbox, peer)
        except PeerLostError:
            self.suspect(mailbox.fabric_ids[peer])
            return
        link.put(header.encode())
        if not self._gathers:
            self._flush(link)

    # Ends


def _may_be_prompt(account: Account, sending: Sending) -> bool:
    """Whether a long message may be sent without asking: half of the credit is for short ones alone."""
    cost = FRAME_COST + sending.nbytes
    return sending.nbytes <= PROMPT_BYTES and account.used + cost <= CREDIT_BYTES // 2


Handler = Callable[[Postal, Link, Mailbox, int, Header, "bytearray | None"], None]
_HANDLERS: dict[Kind, Handler] = {
    Kind.ACCEPT: Postal._on_accept,
    Kind.CREDIT: Postal._on_credit,
    Kind.TAKEN: Postal._on_taken,
    Kind.CANCEL: Postal._on_cancel,
    Kind.LEAVE: Postal._on_leave,
    Kind.MISMATCH: Postal._on_mismatch,
    Kind.REVOKE: Postal._on_revoke,
    Kind.VOTE: Postal._on_letter,
    Kind.DECISION: Postal._on_letter,
    Kind.PROBE: Postal._on_probe,
    Kind.CALLED: Postal._on_called,
}
