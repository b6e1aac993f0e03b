"""Messages inside a host in C: rings, and the short path through them as one call."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dist2.backends.base import Helped
from dist2.backends.socket.messenger import Messenger
from dist2.backends.socket.transport.base import Transfer
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.mailbox import Key, Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.operation.record import Operation

class End:
    """One end's own counters of a ring: the base of `links.ring.Ring`, which `Express` uses as well."""

    _count: int
    _base: int
    _pidfd: int
    def __init__(self, memory: memoryview) -> None: ...

class Express:
    """Sends and receives of the messages of a lot, as one call: see `messages.express`.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        rank: Group rank of the other side.
        fingerprint: The operation's fingerprint.
        header: The header of the frames.
        key: The mailbox's key of the messages,
        key_of_any: and of receives from any source.
        nbytes: Length of the payload.
        cost: Credit that a message costs the sender,
        credit: of this total,
        reported: and the received bytes after which a report is sent.
        spins: How often to look before yielding the core,
        lone_spins: and if that is 0, while no other process needs the core.
        taken: Header of the frames that report the read of a long message,
        received: and of those that report received bytes.
        whole: The short path of the same messages sent whole, not lent, though long.

    Attributes:
        partings: How often it slept to get a core other than the awaited process's.
        unused_yields: Consecutive yields, up to a limit, in which no other thread ran.

    Raises:
        TypeError, ValueError, AttributeError: An argument is invalid.
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
    def send(self, address: int, /) -> bool:
        """Send memory by its address; False, with nothing done, if it must be queued or announced."""
    def take(self, address: int, /) -> bool:
        """Receive to an address if the message is here; False, with nothing done, if not."""
    def wait(self, address: int, deadline_ns: int, /) -> bool:
        """Receive to an address; False, with nothing done, if no message arrives soon."""
    def wait_posted(self, receiving: Transfer, address: int, deadline_ns: int, /) -> bool:
        """Wait for the message of a receive that is posted, and end that; False, with nothing done, if not.

        Then it does not come in a moment, or it would go to another receive.
        """
    def fetch_posted(
        self, receiving: Transfer, adopt: Callable[[Receiving, Link, bytes], None], deadline_ns: int, /
    ) -> None: ...

class Carrier:
    """Runs the sends or the receives of one signature, with plain tensors.

    Args:
        messenger: The group's messenger.
        express: The short path of the messages.
        sends: Whether it sends them.
        otherwise: The long path.
        numbers: For long messages: makes their numbers.
        adopt: Likewise: takes over a message that was offered and not taken in a moment.
        cancel: Likewise: cancels one.
        resume: Likewise: goes on where the short path of a message has stopped.
    """

    def __init__(
        self,
        messenger: Messenger,
        express: Express,
        sends: bool,
        otherwise: Callable[[Operation, Tensor], Helped | None],
        numbers: Callable[[], int] | None = None,
        adopt: Callable[..., object] | None = None,
        cancel: Callable[..., object] | None = None,
        resume: Callable[..., object] | None = None,
    ) -> None: ...
    def __call__(
        self, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], /
    ) -> Helped | None: ...
