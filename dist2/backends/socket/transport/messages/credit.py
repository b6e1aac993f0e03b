# cython: annotation_typing=False
"""Credit: a bound on the bytes that a member may have sent and that were not received yet."""

from __future__ import annotations

from collections import deque

from dist2.backends.socket.transport.messages.transfer import Sending
from dist2.backends.socket.wire import EAGER_BYTES, PROMPT_BYTES
from dist2.runtime.built import check_built

check_built(__name__, __file__)

CREDIT_BYTES = 4 << 20
"""Bound on unreceived bytes of a peer: more waits at the sender."""
PROMPT_CREDIT_BYTES = 3 * PROMPT_BYTES + EAGER_BYTES
"""The part of it for long messages that are sent without an announcement: three of the longest, and some
short ones. Then one is in flight while another is received and the report of a third comes back."""
REPORTED_BYTES = CREDIT_BYTES // 4
"""Received bytes after which the sender is notified."""
FRAME_COST = 128
"""Cost of a message besides its payload, so that empty ones are bounded as well."""


def cost_of(sending: Sending) -> int:
    """Return the credit that a message takes: an announced one is not held by the receiver."""
    return FRAME_COST + (sending.nbytes if sending.unasked else 0)


class Account:
    """Credit between this rank and one peer, in one group; collectives and point-to-point have one each.

    Attributes:
        used: Cost of messages sent and not reported as received.
        owed: Cost of messages received and not yet reported.
        held: Cost of messages that wait for their receive.
        waiting: Sends that wait for credit, in order.
    """

    used: int
    owed: int
    held: int
    waiting: deque[Sending]

    def __init__(self) -> None:
        self.used = self.owed = self.held = 0
        self.waiting = deque()
