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

from time import monotonic_ns

import attrs

from dist2.backends.socket.transport.base import ANY_SOURCE
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.ring import RingReader
from dist2.backends.socket.transport.messages.credit import (
    CREDIT_BYTES,
    FRAME_COST,
    PROMPT_CREDIT_BYTES,
    REPORTED_BYTES,
)
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.spinning import AWAKE_NS
from dist2.backends.socket.wire import LEND_BYTES, LOAN_BYTES, TAGGED, WHOLE_BYTES, Header, Kind
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
        whole: Never lent, however long: its sender does not wait.
    """

    peer: int
    tag: int
    fingerprint: int
    nbytes: int
    tagged: bool = True
    whole: bool = False

    @property
    def is_long(self) -> bool:
        """Whether they are lent."""
        return self.nbytes > LEND_BYTES and not self.whole

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
        return PROMPT_CREDIT_BYTES if self.whole else CREDIT_BYTES

    @property
    def whole_lot(self) -> Lot | None:
        """The same where their sender does not wait; None if that makes no difference."""
        return attrs.evolve(self, whole=True) if self.is_long and self.nbytes <= WHOLE_BYTES else None


class Watch:
    """Looks into a ring; its caller has the role of the poller.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        spins: How often to look before yielding the core.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, spins: int) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._spins = spins

    def sees(self, rx: RingReader, deadline_ns: int) -> bool:
        """Look for a few microseconds, then yield the core for a while: True once something is here."""
        if rx.look(self._spins):
            return True
        fabric, mailbox = self._fabric, self._mailbox
        crowd, now = fabric.poller.crowd, monotonic_ns()
        end = min(now + AWAKE_NS, deadline_ns)
        while now < end and mailbox.aborted is None and mailbox.fault is None:
            if crowd.is_here(now) or fabric.poller.is_wanted(rx):
                break
            now = crowd.give_way()
            if rx.has_bytes:
                return True
        return False


def express_of(fabric: Fabric, mailbox: Mailbox, lot: Lot, spins: int, lone_spins: int) -> messages.Express:
    """Return the short path of a lot, out and in."""
    whole = lot.whole_lot
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
        whole=None if whole is None else express_of(fabric, mailbox, whole, spins, lone_spins),
    )
