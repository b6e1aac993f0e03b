"""Steps of programs on shared memory in C."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dist2.backends.socket.transport.doorbell import Doorbell, PeerDoorbell
from dist2.operation.signature import Operation

STOP: int
"""``(STOP,)``: Python does this step."""
COPY: int
"""``(COPY, dst, src, nbytes, backwards)``: copy from place to place in this process; backwards: a long one is
made block by block from its end on, and then they may not overlap."""
OWN: int
"""``(OWN, dst, src, nbytes, backwards)``: a COPY that concerns no other member: it is made at the FENCE
behind it, once this member has come there, while others may be on their way. A long one
goes past the caches."""
BESIDE: int
"""``(BESIDE, dst, src, nbytes, way)``: a COPY out of a slot, made in turn, line by line, with the COPY or
BOTH behind it."""
FENCE: int
"""``(FENCE, check, whom)``: come to a fence. ``check(operation)``, unless it is None, is called if a member
has given up an operation in which it lent memory."""
FOLD: int
"""``(FOLD, name, divisor, dst, srcs, nbytes)``: fold places into one; ``name`` is one of `FOLDS`."""
READ: int
"""``(READ, rank, pid, pidfd, dst, src, nbytes, backwards)``: copy from a member's process; stop if that has
ended by then, as its descriptor tells."""
SAME: int
"""``(SAME, address, expected)``: stop unless these bytes are at an address."""
AT: int
"""``(AT, place, address)``: stop unless a place lies at an address."""
STORE: int
"""``(STORE, address, stored)``: put these bytes at an address, once all have come to the last fence."""
NOTE: int
"""``(NOTE, number)``: tell the other members a number with the next fence, once all are at the last."""
NOTED: int
"""``(NOTED, number)``: stop unless all other members noted a number for the last fence."""
CLAIM: int
"""``(CLAIM, kind)``: leave word of the call, and claim the next piece of one kind."""

SEND: int
"""``(SEND, rail, header, address, nbytes, number)``: send a message over a `Rail` as soon as that can be. The
header is complete but for the number of the operation."""
RECEIVE: int
"""``(RECEIVE, rail, header, address, nbytes, number)``: receive the message of this header; stop if nothing
comes for a millisecond, or another does."""
SENT: int
"""``(SENT, rail, number)``: wait until the kernel has the messages up to a number; stop as RECEIVE does."""

FOLDS: tuple[str, ...]
"""Names of the folds: left to right, and averages divide the sum in the end."""

SWEEPS: tuple[str, ...]
"""By what long copies can pass memory through or past the caches here; the last is in use, and "none" is
`memcpy`."""

def sweep_by(name: str, /) -> None:
    """Choose one of `SWEEPS`, for tests: they are to mean the same.

    Raises:
        ValueError: It is none, or not of this processor.
    """

def read_tensors(type: type, exchange_api: object, /) -> None:
    """Say by what tensors of exactly one type are read: the capsule that torch publishes with it.

    Raises:
        ValueError: Its functions are not those of DLPack 1.
    """

def take_parts(taker: Callable[[Operation, int, list[tuple[str, int, int]]], object] | None, /) -> None:
    """Have each run of a script told: `dist2.operation.parts.PartsLog.take`; None: nobody is told."""

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
    """What scripts send to one member on another host, and receive of it: see `messages.rails`.

    Args:
        credit: The header of a frame that reports credit, but for how much.
        limit: How much credit messages may use.
        reported: What is received before the sender is told.
        cost: What a message costs besides its payload.

    Attributes:
        kept: How many messages Python has that come before what the socket has: a receive stops the script.
        stalled: It stopped a script, which may go on: nothing came, or it is time to look around.
        moved: How many bytes it has moved so far.
        received: How many messages came since it was opened.

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
        """Begin to use sockets, by descriptors of its own.

        Args:
            out: What is sent goes here,
            into: and what is received comes from here: it may be the same.
            seq: Number of the operation.
            used: Credit that is used,
            owed: and what was received and not reported.
            kept: See above.

        Raises:
            OSError: A descriptor is none.
            RuntimeError: It is open.
        """
    def took(self, cost: int, /) -> None:
        """Note that Python has received one of those that it had.

        Args:
            cost: Of its credit.

        Raises:
            RuntimeError: It had none.
        """
    def go_on(self) -> None:
        """Let a script go on that was stalled."""
    def close(self) -> tuple[int, int, list[tuple[int, int]], bytes, bytes, int]:
        """Stop using the sockets.

        Returns:
            Used and owed credit; the messages that are not out, and how many bytes of each are; the rest of a
            frame that has begun to report credit; the header that has come, as far as it has, and how much of
            the payload behind it.
        """

class Arrivals:
    """By which a member comes to fences: `dist2.backends.socket.transport.boards.arrivals.AnyArrivals`."""

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
    outputs; ``(-1, address)``; or ``(-2, address)``, to which is added where the piece begins that was
    claimed last. If a third number follows, the address counts from where the region of that rank begins.

    Args:
        arrivals: By which its fences are come to.
        steps: Tuples that begin with what kind of step they are.
        wait: ``wait(operation)`` is called if those that are waited for have not come in time.
        log_call: ``log_call(operation)`` is called to leave word of a call that does not come from the same
            place as the last one.
        inputs: How many tensors a call reads.
        outputs: How many it writes.

    Raises:
        TypeError, ValueError, IndexError: A step is none.
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
    """A program that is run as one of two or four scripts, or by Python where there is none.

    Args:
        arrivals: By which the fences of the scripts are come to.
        first: Called with the same arguments where there is no script.
        stopped: Called where a script stops before its end: with the arguments, which of them it is, the
            number of the step that stopped it, and the number of the first fence of the call.
        failed: Called with the number of the first fence of the call and with what a script raised, which is
            raised again.
        by_parity: The script is that for the parity of the number of the next fence. Otherwise it is the one
            for the half of the slots whose turn it is, which is over then.
    """

    scripts: tuple[Script | None, ...]
    """Two; or four, of which one call takes one of the latter two, and the next call one of the first two."""
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
