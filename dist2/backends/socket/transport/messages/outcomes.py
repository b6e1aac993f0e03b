# cython: annotation_typing=False
"""`Outcomes`: completes messages, once each. Under the fabric's lock; never blocks."""

from __future__ import annotations

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving, Sending, Transfer
from dist2.errors import Dist2Error, PeerLostError
from dist2.runtime.built import check_built

check_built(__name__, __file__)


class Outcomes:
    """Completes, withdraws and fails messages of all groups.

    Args:
        linkage: Links that may use their memory.
        mailboxes: The mailboxes of the open groups, by context.

    Attributes:
        finished: Messages with callbacks still to be called; see `collect`.
    """

    def __init__(self, linkage: Linkage, mailboxes: dict[int, Mailbox]) -> None:
        self.finished: list[Transfer] = []
        self._linkage = linkage
        self._mailboxes = mailboxes

    def collect(self) -> list[Transfer]:
        """Return the messages that were finished since it was called last."""
        finished, self.finished = self.finished, []
        return finished

    def finish(self, message: Transfer, error: BaseException | None) -> None:
        """End a message, if it has not ended."""
        if not message.done:
            message.error = error
            message.data = None
            message.done = True
            self.finished.append(message)

    def message_sent(self, sending: Sending) -> None:
        """The last byte of a message is with the kernel."""
        mailbox: Mailbox | None = self._mailboxes.get(sending.context)
        if mailbox is not None:
            mailbox.sending.pop(sending.number, None)
        self.finish(sending, None)

    def message_received(self, receiving: Receiving) -> None:
        """The last byte of a message is in its place."""
        mailbox: Mailbox | None = self._mailboxes.get(receiving.context)
        if mailbox is not None:
            mailbox.accepted.discard(receiving)
        self.finish(receiving, None)

    def fail(self, mailbox: Mailbox, error: Dist2Error) -> None:
        """Make every pending and later message of a group fail."""
        if mailbox.fault is None:
            mailbox.fault = error
        for message in mailbox.pending():
            if isinstance(message, Receiving) or message.number in mailbox.sending:  # others wait for credit
                self._release(mailbox, message)
            self.finish(message, mailbox.fault)
        mailbox.clear()

    def cancel(self, mailbox: Mailbox, message: Transfer, error: BaseException) -> None:
        """Make a pending message fail: from now on nothing touches its memory."""
        if self._take_back(mailbox, message):
            self._release(mailbox, message)
        self.finish(message, error)

    def _take_back(self, mailbox: Mailbox, message: Transfer) -> bool:
        """Have a group forget a message; whether links may be using its memory."""
        if isinstance(message, Receiving):
            mailbox.forget(message)
            mailbox.accepted.discard(message)
        elif isinstance(message, Sending):
            account = mailbox.accounts[message.tagged][message.peer]
            if message in account.waiting:
                account.waiting.remove(message)
                return False
            mailbox.sending.pop(message.number, None)
            if message.peer == mailbox.rank:
                mailbox.drop_announced(mailbox.rank, message.number)
                return False
        return True

    def _release(self, mailbox: Mailbox, message: Transfer) -> None:
        """Take a message's memory away from the links."""
        if isinstance(message, Sending):
            out = self._linkage.outgoing.get(mailbox.fabric_ids[message.peer])
            if out is not None and not message.is_copied:
                out.withdraw(message, mailbox.reason)
                self._linkage.flush(out)
            return
        for link in list(self._linkage.links.values()):
            if link.receiving is message:
                link.reader.divert()
                link.receiving = None
            for number, receiving in list(link.incoming.items()):
                if receiving is message:
                    del link.incoming[number]

    def link_is_gone(self, link: Link) -> None:
        """Fail the messages that were arriving over a closed link."""
        coming = list(link.incoming.values())
        if link.receiving is not None and link.receiving not in coming:  # a short message, half here
            coming.append(link.receiving)
        link.receiving = None
        for receiving in coming:
            mailbox = self._mailboxes.get(receiving.context)
            to = ""
            if mailbox is not None:
                mailbox.accepted.discard(receiving)
                to = f" to {mailbox.names([receiving.source])}"
            self.finish(receiving, PeerLostError(f"the connection{to} was closed", ranks=[receiving.source]))
        link.incoming.clear()
