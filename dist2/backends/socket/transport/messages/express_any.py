"""`ExpressAny`: direct receives of short messages from any member; see ``express.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.spinning import AWAKE_NS
from dist2.runtime.signals import ctrl_c

Take = Callable[[int], bool]
"""`Express.take` of the messages of one member."""

_LOOKS = 20


class ExpressAny:
    """Receives messages of a tag from any member's ring.

    It looks into all rings, without the role of the poller, and takes the next message of one of them by that
    member's short path. Messages that came before their receives are in the mailbox, which hands them out in
    the order in which they came.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox; all other members share memory with this one.
        tag: The messages' tag.
        takes: The short path of each other member's messages, by its group rank.
        spins: How often to look before yielding the core.
    """

    def __init__(
        self, fabric: Fabric, mailbox: Mailbox, tag: int, takes: Sequence[tuple[int, Take]], spins: int
    ) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._tag = tag
        self._takes = takes
        self._rings = fabric.linkage.rings
        self._looks = _LOOKS if spins else 1

    def take(self, address: int) -> int | None:
        """Receive to an address if a message is here; return its sender, or None, with nothing done."""
        if self._mailbox.holds_any(self._tag):
            return None
        takes = self._takes
        for each, (peer, take) in enumerate(takes):
            if take(address):
                self._takes = [*takes[:each], *takes[each + 1 :], takes[each]]  # it comes last the next time
                return peer
        return None

    def wait(self, address: int, deadline_ns: int) -> int | None:
        """Receive to an address; as `take` if nothing arrives soon."""
        poller, mailbox, rings, looks = self._fabric.poller, self._mailbox, self._rings, self._looks
        crowd, end_ns, now = poller.crowd, 0, 0
        while not rings.have_bytes(looks):
            if not end_ns:
                poller.glance()
                now = monotonic_ns()
                end_ns = min(now + AWAKE_NS, deadline_ns)
            if now >= end_ns or crowd.is_here(now) or poller.is_wanted() or ctrl_c.pending:
                break
            if mailbox.aborted is not None or mailbox.fault is not None or mailbox.holds_any(self._tag):
                break
            now = crowd.give_way()
        return self.take(address)
