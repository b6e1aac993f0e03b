"""`Outbound`: how messages are posted and sent. Under the fabric's lock; never blocks.

Short messages travel at once (`EAGER`), within a credit that bounds what a receiver may have to hold.
Long ones are announced, or offered.
"""

from __future__ import annotations

from abc import abstractmethod

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.delivery import Delivery
from dist2.backends.socket.transport.messages.loans import Lent
from dist2.backends.socket.transport.messages.mailbox import (
    CREDIT_BYTES,
    FRAME_COST,
    PROMPT_CREDIT_BYTES,
    Account,
    Arrived,
    Mailbox,
    cost_of,
)
from dist2.backends.socket.transport.messages.outcomes import aborted_error
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending
from dist2.errors import Dist2Error, PeerLostError
from dist2.wire import EAGER_BYTES, LOAN_BYTES, PROMPT_BYTES, TAGGED, Header, Kind


class Outbound(Delivery):
    """Posts and sends messages of all groups of a fabric."""

    @abstractmethod
    def hear_why(self, link: Link) -> None:
        """Learn why a connection that takes nothing any more was refused, if it was; no frame is read."""

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
        self.flush(link)

    def send_rest(self, mailbox: Mailbox, link: Link, header: bytes, sending: Sending, count: int) -> None:
        """Send the rest of a message, of which the kernel took some bytes."""
        mailbox.sending[sending.number] = sending
        link.go_on(header, sending, count)
        self.flush(link)

    def _offer(self, mailbox: Mailbox, link: Link, sending: Sending) -> bool:
        """Announce a long message that the receiver may read where it lies; False if it may not."""
        data = sending.data
        assert data is not None  # it is pending
        if link.tx is None or data.readonly:  # a process that cannot even write it has no address of it
            return False
        lent = Lent.enter(link.tx, sending.number)
        if lent is None:
            return False
        sending.lend(lent)
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
        self.flush(link)
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

    def _send_waiting(self, mailbox: Mailbox, account: Account) -> None:
        while account.waiting and account.used + cost_of(account.waiting[0]) <= CREDIT_BYTES:
            self._send(mailbox, account.waiting.popleft())


def _may_be_prompt(account: Account, sending: Sending) -> bool:
    """Whether a long message may be sent without asking: the rest of the credit is for short ones alone."""
    cost = FRAME_COST + sending.nbytes
    return sending.nbytes <= PROMPT_BYTES and account.used + cost <= PROMPT_CREDIT_BYTES
