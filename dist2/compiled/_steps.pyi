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
BOTH: int
"""``(BOTH, slot, passed, src, nbytes, way)``: a COPY of a block to two places, longer than the caches."""
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
SHARED: int
"""``(SHARED, place, shared)``: stop unless a tensor of the call is, or is not, of `dist2.shared_empty`."""
LENT: int
"""``(LENT, address, expected, first, count, shift)``: stop unless a member lends as expected; its parts
become places."""
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

def share(address: int, nbytes: int, /) -> None:
    """Note where the shared tensors of this process lie."""

def take_parts(taker: Callable[[Operation, int, list[tuple[str, int, int]]], object] | None, /) -> None:
    """Report each run of a script to a callable: `dist2.operation.parts.PartsLog.take`; None: to none."""

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

class Arrivals:
    """The arrivals of one member of a board at its fences.

    Attributes:
        phase: Number of the fence that this member came to last.
        sought: The fence that `wait` has to wait for,
        whom: and the awaited members: a rank, `ALL`, or `NOBODY` to check the health of all.
        slot: Offset in the region of each member of the piece that was claimed last.
        sleepy: The number of further fences at which it sleeps at once.
        naps: The number of sleeps of this member.
        waited_ns: The time that it has waited for others, after the first look.
        called: Word of the operation, to be published with the next fence.
        texts: How many texts were written for such words: see `call_log`.
        at: The operation with which this member came to its last fence.
        before: The operation before that.
        stopped: Whether waiting is over, even if members are absent; set from any thread.
        turn: Which half of the slots the next block uses: 0 or 1.
        nap: The number of fences that it sleeps at once next time.
    """

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
    @property
    def waited_ns(self) -> int: ...

    nap: int
    sleepy: int
    called: int
    texts: int
    naps: int
    stopped: bool
    turn: int

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
    def add(self, rank: int, words: memoryview, doorbell: PeerDoorbell, /) -> None:
        """Add another member: its words, and its doorbell."""

    def cross(
        self,
        operation: Operation,
        wait: Callable[[Operation], object],
        whom: int = -1,
        attend: Callable[[], object] | None = None,
        /,
    ) -> None:
        """Arrive at the next fence, and wait for all, for one other member, or for none.

        It polls, then it yields the core, then it sleeps for a moment.

        Args:
            operation: The call of this member.
            wait: Sleeps until ``whom`` has come to fence ``sought``, or raises.
            whom: A rank, `ALL` or `NOBODY`.
            attend: Called between two yields.

        Raises:
            Dist2Error: Raised by ``wait``.
        """

    def reach(self, operation: Operation, wait: Callable[[Operation], object], phase: int, /) -> None:
        """Wait until all have arrived at a fence that this member has reached before."""

    def claim(self, operation: Operation, wait: Callable[[Operation], object], kind: int, /) -> None:
        """Claim the next piece of one kind, once no member uses its content; `slot` has its position."""

    def order(self) -> None:
        """Order earlier writes before later reads for all members: a full memory fence."""

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
        lent: Number of parts that others lend, in which steps have places.

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
        lent: int = 0,
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
