"""Payloads over sockets, in C."""

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
