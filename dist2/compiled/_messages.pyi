"""Messages inside a host in C: rings, and the short way through them as one call."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dist2.backends.base import Helped
from dist2.backends.socket.messenger import Messenger
from dist2.backends.socket.transport.base import Transfer
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.ring import PythonEnd
from dist2.backends.socket.transport.messages.mailbox import Key, Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.operation.signature import Operation

class End(PythonEnd):
    """The counterpart of `links.ring.PythonEnd`: what `Express` knows of a ring."""

class Express:
    """The counterpart of `ExpressSend` and `ExpressReceive`, for the messages of a lot.

    Args:
        fabric: Of this process.
        mailbox: Of the group.
        rank: Of the other side, in the group.
        fingerprint: Of the operation.
        header: Of the frames.
        key: By which the mailbox knows the messages,
        key_of_any: and receives that take them from any.
        nbytes: Length of the payload.
        cost: What a message takes of the sender's credit,
        credit: which is this in all,
        reported: and what is received before the sender is told.
        spins: How often to look before yielding the core,
        lone_spins: and if that is 0, once nobody else was found to want the core.
        taken: Header of the frames that say that a long message was read,
        received: and of those that say how much was received.
        whole: The short way of the same messages where they are not lent, though long.

    Attributes:
        partings: How often it slept so as to come to a core that whom it waits for is not on.
        unused_yields: How many of its yields in a row, up to some, gave nobody else the core.

    Raises:
        TypeError, ValueError, AttributeError: An argument is not what it is to be.
    """

    partings: int
    unused_yields: int

    def __init__(
        self,
        fabric: Fabric,
        mailbox: Mailbox,
        rank: int,
        fingerprint: int,
        header: bytes,
        key: Key,
        key_of_any: Key,
        nbytes: int,
        cost: int,
        credit: int,
        reported: int,
        spins: int,
        lone_spins: int,
        taken: bytes,
        received: bytes,
        whole: Express | None = None,
    ) -> None: ...
    def send(self, address: int, /) -> bool: ...
    def take(self, address: int, /) -> bool: ...
    def wait(self, address: int, deadline_ns: int, /) -> bool: ...
    def wait_posted(self, receiving: Transfer, address: int, deadline_ns: int, /) -> bool: ...
    def fetch_posted(
        self, receiving: Transfer, adopt: Callable[[Receiving, Link, bytes], None], deadline_ns: int, /
    ) -> None: ...

class Carrier:
    """Runs the sends or the receives of one signature, whose tensors are plain.

    Args:
        messenger: Of the group.
        express: The short way of the messages.
        sends: Whether it sends them.
        otherwise: The long way.
    """

    def __init__(
        self,
        messenger: Messenger,
        express: Express,
        sends: bool,
        otherwise: Callable[[Operation, Tensor], Helped | None],
    ) -> None: ...
    def __call__(
        self, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], /
    ) -> Helped | None: ...
