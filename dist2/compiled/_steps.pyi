"""Steps of programs on shared memory in C."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dist2.backends.socket.transport.doorbell import Doorbell, PeerDoorbell
from dist2.operation.signature import Operation

STOP: int
"""``(STOP,)``: Python does this step."""
COPY: int
"""``(COPY, dst, src, nbytes, backwards)``: copy from place to place in this process; backwards: a long copy
goes block by block from its end, and the places may not overlap."""
OWN: int
"""``(OWN, dst, src, nbytes, backwards)``: a COPY of memory that no other member uses: made at the FENCE
behind it, after this member's arrival and while others arrive. A long one goes past the caches."""
BESIDE: int
"""``(BESIDE, dst, src, nbytes, way)``: a COPY out of a slot, alternating, line by line, with the COPY or BOTH
behind it."""
FENCE: int
"""``(FENCE, check, whom)``: come to a fence. ``check(operation)``, unless it is None, is called if a member
has given up an operation in which it exposed memory."""
FOLD: int
"""``(FOLD, name, divisor, dst, srcs, nbytes)``: fold places into one; ``name`` is one of `FOLDS`."""
READ: int
"""``(READ, rank, pid, pidfd, dst, src, nbytes, backwards)``: copy from a member's process; stop if the
descriptor shows that it has ended."""
SAME: int
"""``(SAME, address, expected)``: stop unless these bytes are at an address."""
AT: int
"""``(AT, place, address)``: stop unless a place lies at an address."""
STORE: int
"""``(STORE, address, stored)``: put these bytes at an address, once all have come to the last fence."""
NOTE: int
"""``(NOTE, number)``: publish a number with the next fence, once all members are at the last one."""
NOTED: int
"""``(NOTED, number)``: stop unless all other members published a number for the last fence."""
CLAIM: int
"""``(CLAIM, kind)``: log the call, and claim the next piece of one kind."""

SEND: int
"""``(SEND, rail, header, address, nbytes, number)``: send a message over a `Rail` as soon as possible. The
header is complete except for the number of the operation."""
RECEIVE: int
"""``(RECEIVE, rail, header, address, nbytes, number)``: receive the message of this header; stop if nothing
comes for a millisecond, or another message comes."""
SENT: int
"""``(SENT, rail, number)``: wait until the kernel has the messages up to a number; stop as RECEIVE does."""

FOLDS: tuple[str, ...]
"""Names of the folds: left to right, and averages divide the sum in the end."""

SWEEPS: tuple[str, ...]
"""The vector instructions for long copies that this processor has; the last one is in use, and "none" is
`memcpy`."""

def sweep_by(name: str, /) -> None:
    """Choose one of `SWEEPS`, for tests: all must have the same effect.

    Raises:
        ValueError: It is none, or not of this processor.
    """

def read_tensors(type: type, exchange_api: object, /) -> None:
    """Set the functions that read tensors of exactly one type: the capsule that torch publishes with it.

    Raises:
        ValueError: Its functions are not those of DLPack 1.
    """

def take_parts(taker: Callable[[Operation, int, list[tuple[str, int, int]]], object] | None, /) -> None:
    """Report each run of a script to a callable: `dist2.operation.parts.PartsLog.take`; None: to none."""

def read_whole(fd: int, address: int, nbytes: int, writes: bool, /) -> int:
    """Read a known number of bytes from a socket, as `express_socket_long.read_whole` does."""

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
    """Move an announced message, as `segments.move_message` does."""

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

class Arrivals:
    """A member's arrivals at fences: `dist2.backends.socket.transport.boards.arrivals.AnyArrivals`."""

    stopped: bool
    sleepy: int
    nap: int
    turn: int
    spreads: bool
    called: int
    texts: int
    naps: int
    @property
    def moves(self) -> int: ...
    @property
    def waited_ns(self) -> int: ...
    @property
    def phase(self) -> int: ...
    @property
    def sought(self) -> int: ...
    @property
    def whom(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def at(self) -> Operation | None: ...
    @property
    def before(self) -> Operation | None: ...
    def __init__(
        self,
        rank: int,
        own: memoryview,
        doorbell: Doorbell,
        spins: int,
        yields: int,
        slow_ns: int,
        tiny: tuple[int, int, int],
        pieces: tuple[int, int, int],
    ) -> None: ...
    def add(self, rank: int, words: memoryview, doorbell: PeerDoorbell, /) -> None: ...
    def cross(
        self,
        operation: Operation,
        wait: Callable[[Operation], object],
        whom: int = -1,
        attend: Callable[[], object] | None = None,
        /,
    ) -> None: ...
    def reach(self, operation: Operation, wait: Callable[[Operation], object], phase: int, /) -> None: ...
    def claim(self, operation: Operation, wait: Callable[[Operation], object], kind: int, /) -> None: ...
    def order(self) -> None: ...

class Script:
    """Steps with their addresses bound: `dist2.backends.socket.script.Script`.

    A place is ``(tensor, offset)``: so many bytes into a tensor of the call, the inputs counted before the
    outputs; ``(-1, address)``; or ``(-2, address)``, plus the start of the piece that was claimed last. If a
    third number follows, the address counts from the start of that rank's region.

    Args:
        arrivals: For its fences.
        steps: Tuples that begin with the kind of the step.
        wait: ``wait(operation)`` is called if awaited members have not come in time.
        log_call: ``log_call(operation)`` logs a call from another place than the last one.
        inputs: Number of tensors that a call reads.
        outputs: Number of tensors that it writes.

    Raises:
        TypeError, ValueError, IndexError: A step is invalid.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        steps: tuple[tuple[object, ...], ...],
        wait: Callable[[Operation], object],
        log_call: Callable[[Operation], object],
        inputs: int = 0,
        outputs: int = 0,
    ) -> None: ...
    def run(
        self,
        operation: Operation,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        shift: int,
        first: int,
        /,
    ) -> int: ...

class Program:
    """A program that runs one of two or four scripts, or Python if there is none.

    Args:
        arrivals: For the fences of the scripts.
        first: Called with the same arguments if there is no script.
        stopped: Called if a script stops before its end: with the arguments, the script's index, the number
            of the step that stopped it, and the number of the first fence of the call.
        failed: Called with the number of the first fence of the call and with a script's exception, which is
            raised again.
        by_parity: Select by the parity of the next fence's number. Otherwise by the half of the slots that is
            next, whose turn then ends.
    """

    scripts: tuple[Script | None, ...]
    """Two, or four: then calls alternate between the first two and the last two."""
    def __init__(
        self,
        arrivals: Arrivals,
        first: Callable[[Operation, Sequence[Tensor], Sequence[Tensor]], None],
        stopped: Callable[[Operation, Sequence[Tensor], Sequence[Tensor], int, int, int], None],
        failed: Callable[[int, BaseException], None] | None = None,
        by_parity: bool = False,
    ) -> None: ...
    def __call__(
        self, operation: Operation, inputs: Sequence[Tensor], outputs: Sequence[Tensor], /
    ) -> None: ...
