"""`ExpressLent`: who waits for a long message that was posted helps with whatever the receiver reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist2.backends.socket.transport.base import Transfer
from dist2.backends.socket.transport.fabric import Fabric
from dist2.ctrl_c import ctrl_c

if TYPE_CHECKING:
    from dist2.compiled._messages import Express


class ExpressLent:
    """Waits for long messages to one member, which it reads where they lie.

    The receiver alone would copy with one core, while this side has another that waits. So this one writes a
    part of each message that is being read, be it the one that is waited for or another of the group's.

    Args:
        fabric: Of this process.
        express: The short way of such messages in C.
    """

    __slots__ = ("_express", "_fabric")

    def __init__(self, fabric: Fabric, express: Express) -> None:
        self._fabric = fabric
        self._express = express

    def wait_posted(self, sending: Transfer, address: int, deadline_ns: int) -> bool:
        """Help until a message is done; False if nothing is read for a moment: that is a longer wait.

        Args:
            sending: The message.
            address: Where it lies.
            deadline_ns: When to give up.
        """
        while not sending.done:
            if ctrl_c.pending or not self._express.help(deadline_ns):
                return False
            self._fabric.poller.attend()
        return True
