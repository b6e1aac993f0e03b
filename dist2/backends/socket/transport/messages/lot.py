"""`Lot`: messages that are alike but for their payload."""

from __future__ import annotations

import attrs

from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST, PROMPT_CREDIT_BYTES
from dist2.backends.socket.wire import EAGER_BYTES, TAGGED, Header, Kind


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
