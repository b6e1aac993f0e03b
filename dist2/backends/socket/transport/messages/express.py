"""`Express`: direct sends of short messages inside a host.

All messages between two processes go through the same ring. A direct send has the effect of the queued path
(`Intake`, `Mailbox`) for a message that can be sent at once, but keeps no record of it. A send with credit
and room writes its frame. A receive whose message could match no other receive looks for exactly that frame,
and copies the payload out of the ring. In every other case they refuse without side effects, and the queued
path takes the call. So order, credit, mismatches and failures are decided in one place. The type is in C
(``compiled/source/messages/express.c``).

The frame of a short message is the same for every call of a signature: it is made once, and compared as
bytes.
"""

from __future__ import annotations

import attrs

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.credit import (
    CREDIT_BYTES,
    FRAME_COST,
    PROMPT_CREDIT_BYTES,
    REPORTED_BYTES,
)
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.wire import EAGER_BYTES, LOAN_BYTES, RING_MESSAGE_BYTES, TAGGED, Header, Kind
from dist2.compiled import messages


@attrs.frozen
class Lot:
    """Messages that are alike but for their payload.

    Attributes:
        peer: Group rank of the other side.
        tag: Their tag.
        fingerprint: The operation's fingerprint.
        nbytes: Length of the payload.
        tagged: Point-to-point, or part of a collective: the tag is the step of its schedule then.
    """

    peer: int
    tag: int
    fingerprint: int
    nbytes: int
    tagged: bool = True

    @property
    def is_long(self) -> bool:
        """Whether they are lent."""
        return self.nbytes > RING_MESSAGE_BYTES

    def header(self, context: int) -> bytes:
        """Return the header of the frames that they, or their announcements, are in."""
        kind, payload = (Kind.OFFER, LOAN_BYTES) if self.is_long else (Kind.EAGER, self.nbytes)
        return Header(
            kind, TAGGED, context, 0, self.tag, self.fingerprint, payload, total=self.nbytes
        ).encode()

    @property
    def cost(self) -> int:
        """The credit that one message takes."""
        return FRAME_COST if self.is_long else FRAME_COST + self.nbytes

    @property
    def credit(self) -> int:
        """How much of it they may take in all: the last part is for short ones alone."""
        return CREDIT_BYTES if self.is_long or self.nbytes <= EAGER_BYTES else PROMPT_CREDIT_BYTES


def express_of(fabric: Fabric, mailbox: Mailbox, lot: Lot, spins: int, lone_spins: int) -> messages.Express:
    """Return the short path of a lot, out and in."""
    return messages.Express(
        fabric=fabric,
        mailbox=mailbox,
        rank=lot.peer,
        fingerprint=lot.fingerprint,
        header=lot.header(mailbox.context),
        key=(True, lot.peer, 0, lot.tag),
        key_of_any=(True, ANY_SOURCE, 0, lot.tag),
        nbytes=lot.nbytes,
        cost=lot.cost,
        credit=lot.credit,
        reported=REPORTED_BYTES,
        spins=spins,
        lone_spins=lone_spins,
        taken=Header(Kind.TAKEN, 0, mailbox.context).encode(),
        received=Header(Kind.CREDIT, TAGGED, mailbox.context).encode(),
    )
