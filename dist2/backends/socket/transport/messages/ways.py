"""`ShortWays`: the direct paths of messages inside a host, for each `Lot` of messages that are alike."""

from __future__ import annotations

import attrs

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, PROMPT_CREDIT_BYTES
from dist2.backends.socket.transport.messages.express import Express
from dist2.backends.socket.transport.messages.express_any import ExpressAny
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.wire import EAGER_BYTES, RING_MESSAGE_BYTES, TAGGED, Header, Kind


@attrs.frozen
class Lot:
    """Messages that are alike but for their payload.

    Attributes:
        peer: Group rank of the other side.
        tag: Their tag.
        fingerprint: The operation's fingerprint.
        nbytes: Length of the payload.
    """

    peer: int
    tag: int
    fingerprint: int
    nbytes: int

    def header(self, context: int) -> bytes:
        """Return the header of their frames."""
        nbytes = self.nbytes
        return Header(
            Kind.EAGER, TAGGED, context, 0, self.tag, self.fingerprint, nbytes, total=nbytes
        ).encode()

    @property
    def cost(self) -> int:
        """The credit that one message takes."""
        return FRAME_COST + self.nbytes

    @property
    def credit(self) -> int:
        """How much of it they may take in all: the last part is for short ones alone."""
        return CREDIT_BYTES if self.nbytes <= EAGER_BYTES else PROMPT_CREDIT_BYTES


class ShortWays:
    """The direct paths of the messages with each member.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        spins: How often to look for a message in shared memory before yielding the core.
        lone_spins: The same if ``spins`` is 0 and no other process needs the core.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, spins: int, lone_spins: int) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._spins = spins
        self._lone_spins = lone_spins

    def has_express(self, lot: Lot) -> bool:
        """Whether messages with a member may take the short path through shared memory."""
        return lot.peer in self._mailbox.beside and lot.nbytes <= RING_MESSAGE_BYTES

    def has_express_any(self, nbytes: int) -> bool:
        """Whether messages of a length may take the short path from any member."""
        others = set(range(len(self._mailbox.cards))) - {self._mailbox.rank}
        return bool(others) and others <= self._mailbox.beside and nbytes <= RING_MESSAGE_BYTES

    def express_any(self, lot: Lot) -> ExpressAny:
        """Return the short path of messages from any member; the peer of the lot is `ANY_SOURCE`."""
        takes = []
        for peer in sorted(self._mailbox.beside - {self._mailbox.rank}):
            of_peer = attrs.evolve(lot, peer=peer)
            takes.append((peer, self.express(of_peer).take))
        return ExpressAny(self._fabric, self._mailbox, lot.tag, takes, self._spins)

    def express(self, lot: Lot) -> Express:
        """Return the short path, out and in, for messages with a member that has one."""
        return Express(self._fabric, self._mailbox, lot, self._spins, self._lone_spins)
