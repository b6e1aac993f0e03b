"""`GivenUp`: tells ranks that run ahead of one that has given up. Under the fabric's lock; never blocks.

A rank that only sends, such as the root of a `broadcast`, waits for nobody. So it would go on until its
credit is used up, and then name its receivers, although they have timed out because it was late.
"""

from __future__ import annotations

import json

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.wire import TAGGED, Header, Kind
from dist2.errors import Dist2Error, OperationTimeoutError, PeerLostError, WireError


class GivenUp:
    """Answers messages that nothing will receive, once for each sender and group.

    Args:
        courier: Sends the answers.
        outcomes: Fails the groups of senders.
    """

    def __init__(self, courier: Courier, outcomes: Outcomes) -> None:
        self._courier = courier
        self._outcomes = outcomes

    @staticmethod
    def note(mailbox: Mailbox, error: BaseException) -> None:
        """Keep the error that broke the group on this rank, unless it is reported to all members."""
        if isinstance(error, OperationTimeoutError):
            mailbox.gave_up = error
        elif isinstance(error, PeerLostError) and error.ranks:
            left = mailbox.left.difference(mailbox.aborters)
            mailbox.gave_up = error if left.issuperset(error.ranks) else None

    def answer(self, mailbox: Mailbox, peer: int, header: Header) -> None:
        """Tell the sender of a message that this rank has given up, and why.

        Not a sender that calls the operation which failed here: it finds the missing ranks itself.
        """
        ahead = header.flags & TAGGED or header.seq > mailbox.calls.latest
        if mailbox.gave_up is None or not ahead or peer in mailbox.answered:
            return
        mailbox.answered.add(peer)
        payload = _encoded(mailbox.gave_up) + b"\n" + mailbox.reason
        frame = Header(Kind.GAVE_UP, context=mailbox.context, nbytes=len(payload)).encode() + payload
        self._courier.tell(mailbox, peer, frame)

    def on_gave_up(
        self, link: Link, mailbox: Mailbox, peer: int, header: Header, payload: bytearray | None
    ) -> None:
        fields, _, text = bytes(payload or b"").partition(b"\n")
        mailbox.take_reason(peer, bytearray(text))
        words = f"{mailbox.names([peer])} has given up{mailbox.why([peer])}"
        error = _decoded(fields, words, len(mailbox.cards))
        if mailbox.fault is None:
            self._outcomes.fail(mailbox, error)


def _encoded(error: Dist2Error) -> bytes:
    """Return the fields of an error that the sender's has too: the ranks, and the limit that passed."""
    if isinstance(error, OperationTimeoutError):
        return json.dumps([error.missing, error.timeout_s or 0.0, error.elapsed_s or 0.0]).encode()
    assert isinstance(error, PeerLostError)
    return json.dumps([error.ranks]).encode()


def _decoded(fields: bytes, words: str, size: int) -> Dist2Error:
    """Return the error of the sender.

    Raises:
        WireError: The fields are not those of `_encoded`.
    """
    try:
        ranks, *limits = json.loads(fields)
        ranks = [rank for rank in ranks if type(rank) is int and 0 <= rank < size]
        if not limits:
            return PeerLostError(words, ranks=ranks)
        timeout_s, elapsed_s = map(float, limits)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise WireError("a malformed report of a rank that has given up") from error
    return OperationTimeoutError(words, missing=ranks, timeout_s=timeout_s, elapsed_s=elapsed_s)
