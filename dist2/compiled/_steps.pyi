"""Payloads over sockets, and the messages of plans, in C."""

def read_whole(fd: int, address: int, nbytes: int, writes: bool, /) -> int:
    """Read a known number of bytes from a socket, until about two milliseconds without data.

    Args:
        fd: A stream socket that does not block.
        address: Where the bytes belong.
        nbytes: How many.
        writes: Return as soon as there is room to write.

    Returns:
        How many came; ``~count`` where the stream has ended or failed behind them.
    """

def move_message(
    sends: bool,
    fd: int,
    back: int,
    announcement: bytes,
    consent: bytes,
    header: bytes,
    address: int,
    nbytes: int,
    longest: int,
    number: int,
    done: int,
    asked: int,
    agreed: bool,
    staged: int,
    filled: int,
    writes: bool,
    /,
) -> tuple[int, int, int, bool, int, bool]:
    """Announce a message, await its acceptance and write it; or await its announcement, accept and read it.

    Until nothing has moved for about two milliseconds, as many have passed, or something else can be done.

    Args:
        sends: Write it; else read it.
        fd: A non-blocking stream socket that carries it.
        back: Carries the receiver's answer.
        announcement: The frame that announces it, without its number.
        consent: The frame that accepts it, without its number.
        header: A segment's header, without its number, its beginning and its length.
        address: Where the payload lies.
        nbytes: Its length.
        longest: How long segments are.
        number: The message's number; its receiver knows it once it is announced.
        done: Moved bytes of its segments, headers included.
        asked: Sent bytes of the announcement, or of the acceptance.
        agreed: Whether it was accepted; on the receiver, whether it was announced.
        staged: Address of a place for headers that come.
        filled: How much of one is there.
        writes: Return as soon as there is room to write, while there is nothing to be written.

    Returns:
        Number, ``done``, ``asked``, ``agreed`` and ``filled``, as they are now (all of a header is there only
        if it is not the one that was expected); and whether a stream has ended or failed.
    """

class Rail:
    """Messages of scripts to and from one member on another host: see `messages.rails`.

    Args:
        credit: The header of a frame that reports credit, without the amount.
        limit: Credit that messages may use.
        reported: Received bytes after which a report is sent.
        cost: Credit that a message costs besides its payload.

    Attributes:
        kept: Messages that Python has, which come before those in the socket: a receive stops the script.
        stalled: It stopped a script that can continue: nothing came, or Python's checks are due.
        moved: Bytes that it has moved.
        received: Messages that came since it was opened.

    Raises:
        ValueError: ``credit`` is no header.
    """

    @property
    def kept(self) -> int: ...
    @property
    def stalled(self) -> bool: ...
    @property
    def moved(self) -> int: ...
    @property
    def received(self) -> int: ...
    def __init__(self, credit: bytes, limit: int, reported: int, cost: int) -> None: ...
    def open(self, out: int, into: int, seq: int, used: int, owed: int, kept: int = 0, /) -> None:
        """Begin to use sockets, by its own descriptors.

        Args:
            out: Descriptor for sends,
            into: and for receives: possibly the same.
            seq: Number of the operation.
            used: Used credit,
            owed: and received bytes that were not reported.
            kept: See above.

        Raises:
            OSError: A descriptor is none.
            RuntimeError: It is open.
        """
    def took(self, cost: int, /) -> None:
        """Note that Python has received one of its kept messages.

        Args:
            cost: Its credit.

        Raises:
            RuntimeError: It had none.
        """
    def go_on(self) -> None:
        """Let a stalled script continue."""
    def close(self) -> tuple[int, int, list[tuple[int, int]], bytes, bytes, int]:
        """Stop using the sockets.

        Returns:
            Used and owed credit; the unsent messages, and the sent bytes of each; the rest of a partly sent
            credit report; the received part of a header, and the received bytes of the payload behind it.
        """

class Mover:
    """Moves a message of a plan: see `dist2.operation.engine.Plan.outside`."""

    @property
    def outside(self) -> int: ...

class Movers:
    """The messages of one plan: a wait for one of them continues the writes on the rails of all."""

    def send(self, rail: Rail, header: bytes, /) -> Mover:
        """Return a mover that sends a message with this header."""

    def receive(self, rail: Rail, header: bytes, /) -> Mover:
        """Return a mover that receives a message with this header."""

    def sent(self, rail: Rail, /) -> Mover:
        """Return a mover that waits until the messages over a rail are sent, up to one."""

class Reader:
    """Reads the memory of another process of this host; see `dist2.operation.engine.Plan.read`.

    Args:
        pid: The process.
        pidfd: A descriptor that is readable once it has ended; -1: it is this one.
    """

    @property
    def outside(self) -> int: ...
    def __init__(self, pid: int, pidfd: int, /) -> None: ...
