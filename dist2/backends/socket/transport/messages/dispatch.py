# cython: annotation_typing=False
"""`Dispatch`: posts and sends messages. Under the fabric's lock; never blocks.

Short messages travel at once (`EAGER`), within a credit that bounds the memory of the receiver.
Long ones are announced.
"""

from __future__ import annotations

from collections.abc import Iterable

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.messages.comparison import Comparison
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.credit import (
    CREDIT_BYTES,
    FRAME_COST,
    PROMPT_CREDIT_BYTES,
    Account,
    cost_of,
)
from dist2.backends.socket.transport.messages.delivery import Delivery
from dist2.backends.socket.transport.messages.departures import gone_error, left_error
from dist2.backends.socket.transport.messages.explaining import overdue
from dist2.backends.socket.transport.messages.mailbox import Arrived, Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Receiving, Sending, Transfer
from dist2.backends.socket.wire import EAGER_BYTES, PROMPT_BYTES, TAGGED, Header, Kind
from dist2.errors import Dist2Error, PeerLostError, ResourceError
from dist2.runtime.built import check_built
from dist2.runtime.deadline import extended, monotonic_ns

check_built(__name__, __file__)


class Dispatch:
    """Posts and sends messages of all groups, and withdraws cancelled ones.

    Args:
        linkage: The links.
        presence: Notes unreachable processes.
        courier: Finds the links to members.
        outcomes: Completes or fails sends.
        comparison: Sends members the calls behind fingerprints.
        delivery: Delivers messages to this rank itself, and those that arrived before their receive.
    """

    def __init__(
        self,
        linkage: Linkage,
        presence: Presence,
        courier: Courier,
        outcomes: Outcomes,
        comparison: Comparison,
        delivery: Delivery,
    ) -> None:
        self._linkage = linkage
        self._presence = presence
        self._courier = courier
        self._outcomes = outcomes
        self._comparison = comparison
        self._delivery = delivery

    def post_send(self, mailbox: Mailbox, sending: Sending) -> None:
        """Send as far as credit and the receiver allow."""
        sending.unasked = sending.nbytes <= EAGER_BYTES
        refusal = self._refusal(mailbox, sending.peer)
        if refusal is None and sending.tagged and mailbox.aborters:  # its receiver may never come
            refusal = gone_error(mailbox, sorted(mailbox.aborters))
        if refusal is not None:
            self._outcomes.finish(sending, refusal)
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
            self._delivery.deliver(mailbox, arrived, receiving)
            return
        peer, refusal = receiving.peer, self._refusal(mailbox, receiving.peer)
        if refusal is None and peer not in (ANY_SOURCE, mailbox.rank):
            try:
                self._courier.reach(mailbox, peer)  # its end is noticed then
            except PeerLostError as error:
                # Its earlier messages may still arrive; if not, the receive fails in a moment.
                self._presence.suspect(mailbox.fabric_ids[peer], str(error))
            except ResourceError as error:
                refusal = _lacking(mailbox.names([peer]), error, receiving.tagged)
        if refusal is not None:
            mailbox.forget(receiving)
            self._outcomes.finish(receiving, refusal)

    def _refusal(self, mailbox: Mailbox, peer: int) -> Dist2Error | None:
        """Return why a message with a member cannot be, or None."""
        if mailbox.fault is not None:
            return mailbox.fault
        if peer in mailbox.aborters:
            return gone_error(mailbox, sorted(mailbox.aborters))
        if peer in mailbox.left:
            return left_error(mailbox, [peer])
        if peer == ANY_SOURCE and len(mailbox.left | {mailbox.rank}) == len(mailbox.cards) > 1:
            return left_error(mailbox, sorted(mailbox.left))
        return None

    def _send(self, mailbox: Mailbox, sending: Sending) -> None:
        try:
            link = self._courier.reach(mailbox, sending.peer)
        except PeerLostError as error:
            self._presence.cut_off(mailbox.fabric_ids[sending.peer], str(error))
            self._outcomes.finish(sending, mailbox.fault or self._unreached(mailbox, sending.peer, error))
            return
        except ResourceError as error:
            self._outcomes.finish(sending, _lacking(mailbox.names([sending.peer]), error, sending.tagged))
            return
        if sending.fingerprint not in mailbox.calls.told[sending.peer]:
            seq = None if sending.tagged else sending.seq
            self._comparison.introduce(mailbox, link, sending.peer, sending.fingerprint, seq, sending.number)
        account = mailbox.accounts[sending.tagged][sending.peer]
        if not sending.unasked:
            sending.unasked = link.is_clear() and _may_be_prompt(account, sending)
        account.used += cost_of(sending)
        if not sending.unasked:
            mailbox.sending[sending.number] = sending
            link.put(sending.header(Kind.ANNOUNCE, 0, sending.number).encode())
        else:
            try:
                sent = link.send(sending.header(Kind.EAGER, sending.nbytes, 0).encode(), sending)
            except OSError:
                link.give_up_writing()  # its reader finds whether the peer died, left or refuses
                sent = False
            if sent:
                self._outcomes.finish(sending, None)
            else:
                mailbox.sending[sending.number] = sending
        self._linkage.flush(link)  # which also wakes a sleeper at the other end of a ring

    def cancel(self, mailbox: Mailbox, message: Transfer, error: BaseException) -> None:
        """Make a pending message fail: from now on nothing touches its memory."""
        self._outcomes.cancel(mailbox, message, error)
        if isinstance(message, Sending):  # a shorter one behind it may go
            self._send_waiting(mailbox, mailbox.accounts[message.tagged][message.peer])

    def fail_overdue(self, mailboxes: Iterable[Mailbox]) -> None:
        """Fail the asynchronous messages whose deadline has passed, and those of aborted groups."""
        now = monotonic_ns()
        for mailbox in mailboxes:
            if mailbox.aborted is not None:
                self._outcomes.fail(mailbox, mailbox.aborted)
            for message in mailbox.pending():
                if extended(message.deadline_ns) < now:
                    missing = [message.source] if message.source >= 0 else []
                    error = overdue(mailbox, missing, False, self._linkage.shortage())
                    mailbox.note_reason(error)
                    self.cancel(mailbox, message, error)

    def _unreached(self, mailbox: Mailbox, peer: int, why: object) -> PeerLostError:
        """Return the error of a message to a member that cannot be reached."""
        if self._presence.has_parted(mailbox.fabric_ids[peer]):
            return left_error(mailbox, [peer])
        return PeerLostError(f"{mailbox.names([peer])} cannot be reached: {why}", ranks=[peer])

    def _send_to_self(self, mailbox: Mailbox, sending: Sending) -> None:
        header = sending.header(Kind.ANNOUNCE, 0, sending.number)
        arrived = Arrived(header, mailbox.rank, local=sending)
        held = mailbox.accounts[sending.tagged][mailbox.rank].held
        if sending.nbytes <= EAGER_BYTES and held + cost_of(sending) <= CREDIT_BYTES:
            assert sending.data is not None  # it is pending
            arrived.payload, arrived.local = bytearray(sending.data), None
            self._outcomes.finish(sending, None)
        else:
            mailbox.sending[sending.number] = sending
        self._delivery.place(mailbox, arrived)

    def _send_waiting(self, mailbox: Mailbox, account: Account) -> None:
        while account.waiting and account.used + cost_of(account.waiting[0]) <= CREDIT_BYTES:
            self._send(mailbox, account.waiting.popleft())

    # Frames in

    def on_accept(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        sending = mailbox.sending.get(header.transfer)
        out = self._linkage.outgoing.get(mailbox.fabric_ids[peer])  # if it is gone, so is the announcement
        if sending is None or out is None or sending.peer != peer or sending.unasked:
            return
        if not sending.accepted:
            sending.accepted = True
            out.stream(sending)
            if not self._linkage.gathers:
                self._linkage.flush(out)

    def on_credit(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        account = mailbox.accounts[bool(header.flags & TAGGED)][peer]
        account.used = max(0, account.used - header.total)
        self._send_waiting(mailbox, account)


def _lacking(receiver: str, shortage: ResourceError, tagged: bool) -> ResourceError:
    """Return the error of a message whose link lacks a resource of this process; nothing was sent.

    Other ranks take part in a collective, and wait for this one: the group cannot go on then.
    """
    text = f"{receiver} cannot be reached from this process: {shortage}"
    return ResourceError(text, group_usable=tagged)


def _may_be_prompt(account: Account, sending: Sending) -> bool:
    """Whether a long message may be sent without asking: the rest of the credit is for short ones alone."""
    cost = FRAME_COST + sending.nbytes
    return sending.nbytes <= PROMPT_BYTES and account.used + cost <= PROMPT_CREDIT_BYTES
