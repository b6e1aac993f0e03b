"""`MessageBatch`: messages that are started together, as one group of NCCL's calls for each direction.

In a group of calls no send waits for a receive behind it. Tickets are given out at once; where they are on
the stream is known when the batch is launched.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from dist2.backends.base import Tensors
from dist2.backends.nccl.operations import Steps
from dist2.backends.nccl.ticket import Ticket


@attrs.frozen(eq=False)
class Message:
    """One message of a batch.

    Attributes:
        steps: Adds it to a launch.
        inputs: The tensors that it reads.
        outputs: The tensors that it writes.
        ticket: Its ticket.
    """

    steps: Steps
    inputs: Tensors
    outputs: Tensors
    ticket: Ticket


Launch = Callable[[str, list[Message]], None]
"""Launches messages of one direction."""


class MessageBatch:
    """Collects the messages of one thread."""

    def __init__(self) -> None:
        self._by_lane: dict[str, list[Message]] = {}

    def add(self, lane: str, message: Message) -> None:
        """Keep a message until the batch is launched."""
        self._by_lane.setdefault(lane, []).append(message)

    def launch(self, launch: Launch) -> None:
        """Launch all messages, those of each direction together."""
        for lane, messages in self._by_lane.items():
            launch(lane, messages)
