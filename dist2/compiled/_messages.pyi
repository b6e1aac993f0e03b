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
    """One end of a ring; ``rings.c`` has its theory of operation.

    Args:
        memory: A page of words, then a number of bytes that is a power of two.
        writes: Whether it is the writing end.

    Attributes:
        has_bytes: Whether there is something to read.
        has_room: Whether there is room to write.
        other_sleeps: Whether the other end wants to be woken.
    """

    _pidfd: int
    @property
    def has_bytes(self) -> bool: ...
    @property
    def has_room(self) -> bool: ...
    @property
    def other_sleeps(self) -> bool: ...
    def __init__(self, memory: memoryview, writes: bool) -> None: ...
    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Write as much as there is room for.

        Raises:
            BlockingIOError: There is none.
            ConnectionError: The reader's counter is invalid: it was overwritten.
        """
    def recv_into(self, buffer: memoryview, /) -> int:
        """Read available bytes, up to the length of ``buffer``.

        Raises:
            BlockingIOError: Nothing is.
            ConnectionError: The writer's counter is invalid.
        """
    def doze(self, sleeping: bool, /) -> None:
        """Set whether this end sleeps until the other one wakes it: look once more afterwards."""

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
