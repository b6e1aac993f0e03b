# cython: annotation_typing=False
"""`Delivery`: matches arrived messages with receives. Under the fabric's lock; never blocks.

Long messages were announced only: the receiver accepts when it has a buffer, and the payload goes straight
into it.
"""

from __future__ import annotations

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.comparison import Comparison
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.credit import FRAME_COST, REPORTED_BYTES
from dist2.backends.socket.transport.messages.mailbox import Arrived, Mailbox, key_of
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.wire import TAGGED, Header, Kind
from dist2.errors import PeerLostError, WireError
from dist2.runtime.built import check_built

check_built(__name__, __file__)


class Delivery:
    """Matches, delivers and answers messages of all groups.

    Args:
        courier: Sends the answers.
        outcomes: Completes received messages.
        comparison: Decides whether a message matches its receive.
    """

    def __init__(self, courier: Courier, outcomes: Outcomes, comparison: Comparison) -> None:
        self._courier = courier
        self._outcomes = outcomes
        self._comparison = comparison

    # Whole messages

    def place(self, mailbox: Mailbox, arrived: Arrived) -> None:
        """Give a message to its receive, or keep it until there is one."""
        receiving = mailbox.match(arrived.key)
        if receiving is not None:
            self.deliver(mailbox, arrived, receiving)
        else:
            mailbox.keep(arrived)
            # In this order: see `Mailbox.begin`.
            self._comparison.contradiction(mailbox, arrived.peer, arrived.header)

    def deliver(self, mailbox: Mailbox, arrived: Arrived, receiving: Receiving) -> None:
        """Give a message to the receive that takes it."""
        header, peer = arrived.header, arrived.peer
        if peer != mailbox.rank:
            self.account_for(mailbox, peer, receiving.tagged, arrived.cost)
        if not (receiving.fits(header) or self._comparison.agrees(mailbox, receiving, peer, header)):
            return
        receiving.source, receiving.nbytes = peer, header.total
        assert receiving.data is not None  # it was posted
        if arrived.payload is not None:
            if header.total:  # an empty buffer may be read-only
                receiving.data[: header.total] = arrived.payload
            self._outcomes.message_received(receiving)
        elif arrived.local is not None:
            assert arrived.local.data is not None  # it is pending
            receiving.data[: header.total] = arrived.local.data
            del mailbox.sending[arrived.local.number]
            self._outcomes.finish(arrived.local, None)
            self._outcomes.message_received(receiving)
        else:
            assert arrived.link is not None  # it was announced over one
            self._accept(mailbox, receiving, arrived.link, header.transfer)

    def _accept(self, mailbox: Mailbox, receiving: Receiving, link: Link, number: int) -> None:
        """Have the payload of a message sent that was announced over a link under a number."""
        peer = receiving.source
        if link.fileno() < 0:
            gone = PeerLostError(f"{mailbox.names([peer])} is gone", ranks=[peer])
            self._outcomes.finish(receiving, gone)
            return
        receiving.missing = receiving.nbytes
        link.incoming[number] = receiving
        mailbox.accepted.add(receiving)
        self._courier.answer(mailbox, peer, Header(Kind.ACCEPT, context=mailbox.context, transfer=number))

    def account_for(self, mailbox: Mailbox, peer: int, tagged: bool, cost: int) -> None:
        """Note that a message was received; report often enough that the sender never runs dry."""
        account = mailbox.accounts[tagged][peer]
        account.owed += cost
        if account.owed >= REPORTED_BYTES:
            flags = TAGGED if tagged else 0
            owed, account.owed = account.owed, 0
            self._courier.answer(mailbox, peer, Header(Kind.CREDIT, flags, mailbox.context, total=owed))

    # Payloads that go straight to their places

    def begin_eager(self, link: Link, mailbox: Mailbox, peer: int, header: Header) -> memoryview | None:
        """Return the memory of the receive that is posted for a message, if one is."""
        if mailbox.fault is not None:
            return None
        receiving = mailbox.match(key_of(header, peer))
        if receiving is None:
            self._comparison.contradiction(mailbox, peer, header)
            return None
        self.account_for(mailbox, peer, receiving.tagged, FRAME_COST + header.nbytes)
        if not (receiving.fits(header) or self._comparison.agrees(mailbox, receiving, peer, header)):
            return None
        receiving.source, receiving.nbytes = peer, header.nbytes
        link.receiving = receiving
        mailbox.accepted.add(receiving)
        assert receiving.data is not None  # it was posted
        return receiving.data[: header.nbytes]

    def end_eager(self, link: Link) -> None:
        """Take in that the payload of a message is in its place."""
        receiving, link.receiving = link.receiving, None
        if receiving is not None:  # else it was cancelled while its payload came in
            self._outcomes.message_received(receiving)

    def begin_segment(self, link: Link, header: Header) -> memoryview | None:
        """Return where a part of an announced message goes; None if the receive was cancelled meanwhile.

        Raises:
            WireError: It is no part of the message.
        """
        receiving = link.incoming.get(header.transfer)
        if receiving is None or receiving.data is None:
            return None
        if not 0 <= header.tag <= receiving.nbytes - header.nbytes:  # a sum could wrap around
            raise WireError("a segment outside of its message")
        link.receiving = receiving
        return receiving.data[header.tag : header.tag + header.nbytes]

    def end_segment(self, link: Link, header: Header) -> None:
        """Take in that a part of an announced message is in its place."""
        receiving, link.receiving = link.receiving, None
        if receiving is None:
            return
        receiving.missing -= header.nbytes
        if receiving.missing <= 0:
            link.incoming.pop(header.transfer, None)
            self._outcomes.message_received(receiving)

    # Frames in

    def on_cancel(
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
            gave_up = f"{mailbox.names([peer])} gave up sending{mailbox.why([peer])}"
            self._outcomes.finish(receiving, PeerLostError(gave_up, ranks=[peer]))
