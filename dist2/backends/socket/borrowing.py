"""The tensors of the other ranks of this host that one operation between hosts accesses.

The ranks of a host expose memory between the first and the last fence of an operation. It is mapped in this
process, or the kernel moves it. Whether that works on all hosts is determined once for a group (`Accord`), so
that all ranks run the same algorithm. Scripts look up the addresses at each call (`Borrowing.looks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.backends.socket.bound_steps import Bound, copying, expecting, finding, reading
from dist2.backends.socket.memory import copy_bytes
from dist2.backends.socket.reaching import Place
from dist2.backends.socket.script import Script, script_of
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import GAVE_UP
from dist2.backends.socket.transport.boards.lending import Lending, Lent, Tables
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.errors import PeerLostError
from dist2.operation.signature import Operation

Kinds = tuple[int, Tables]
"""The properties that scripts depend on: the parity of the fence, and the access to each member's memory."""
Looks = tuple[list[Bound], int]
"""Steps by which a script finds the others' memory, and the number of its parts."""

WORD_BYTES = 8
"""The size of each word in a member's page."""


@attrs.frozen
class Borrowed:
    """One part that another rank exposes, with a prepared access to it.

    Attributes:
        board: Where the ranks of the host meet.
        recall: That board's recall.
        owner: The member whose memory it is.
        pid: In which process; 0: it is mapped in this one.
        pidfd: Readable once that process has ended.
        address: Where its first byte lies.
        number: Which tensor of a call it is in scripts.
    """

    board: Board
    recall: Recall
    owner: int
    pid: int
    pidfd: int
    address: int
    number: int

    @property
    def place(self) -> tuple[int, int]:
        """Where it is."""
        return self.pid, self.address

    def fetch(self, start: int, into: Place, nbytes: int) -> list[Bound]:
        """Return a callable that copies bytes from ``start`` on to an address in this process.

        It raises unless the owner exposes these bytes: data that are forwarded to other hosts are not checked
        again.
        """
        there, to = self.address + start, into.address
        places = into.any_call, (self.number, start)
        if not self.pid:
            copy = copying(lambda operation: copy_bytes(to, there, nbytes), *places, nbytes)
            return [copy, self._lent()]
        read = self._reaching(cross_memory.bound_read(self.pid, to, there, nbytes))
        return [reading(read, self.owner, self.pid, self.pidfd, *places, nbytes), self._lent()]

    def _lent(self) -> Bound:
        """Return a callable that raises if the memory is no longer lent."""
        flag = self.board.regions.page_address(self.owner) + WORD_BYTES * GAVE_UP
        return expecting(self._check, flag, bytes(WORD_BYTES))

    def _check(self, operation: Operation) -> None:
        if self.owner in self.recall.gave_up():
            self.recall.check(operation)

    def _reaching(self, move: Callable[[], None]) -> Callable[[Operation], None]:
        def reach(operation: Operation) -> None:
            try:
                move()
                cross_memory.check_alive(self.pidfd)
            except OSError as error:
                self.recall.hear(operation, self.owner)
                message = f"memory of {self.board.names([self.owner])} cannot be reached: {error}"
                raise PeerLostError(message, ranks=[self.owner]) from error

        return reach


class Borrowing:
    """Exposes memory and accesses that of others for one member, one operation at a time.

    Args:
        board: Where the ranks of this host meet.
        lending: That board's lending.

    Attributes:
        recall: That board's recall.
    """

    def __init__(self, board: Board, lending: Lending) -> None:
        self._board = board
        self._lending = lending
        self.recall = Recall(board)
        self._first = 0
        self._pidfds = {each.rank: each.neighbour.fileno() for each in board.members}

    @property
    def reaches_all(self) -> bool:
        """Whether the kernel moves memory between this process and the others of its host."""
        return self._lending.reaches_all

    def offer(self, addresses: Sequence[int], operation: Operation) -> None:
        """Lend memory from the next fence on."""
        self._board.meet(operation)
        self._first = self._board.phase + 1
        self._lending.offer(tuple(addresses), operation)

    def kinds(self) -> Kinds:
        """Return the kind of access to the memory exposed since the last fence, not its addresses."""
        parity = self._board.phase & 1
        return parity, self._lending.kinds(parity)

    def borrow(self, wanted: Sequence[tuple[int, int]], tensors: int) -> list[Borrowed]:
        """Return the memory that others expose since the last fence.

        Args:
            wanted: Which part of which member's memory.
            tensors: How many a call has.

        Raises:
            PeerLostError: A member is gone.
        """
        lent, found = self._lent(tensors), []
        for owner, part in wanted:
            theirs = lent[owner]
            address, number = theirs.addresses[part], theirs.first + part
            found.append(
                Borrowed(self._board, self.recall, owner, theirs.pid, self._pidfds[owner], address, number)
            )
        return found

    def looks(self, tensors: int) -> Looks:
        """Return steps by which a script finds the memory exposed since the last fence; see `borrow`."""
        board, (parity, kinds) = self._board, self.kinds()
        how = dict(zip(sorted([board.rank, *(each.rank for each in board.members)]), kinds, strict=True))
        looks, parts = [], 0
        for rank, theirs in self._lent(tensors).items():
            place, count = self._lending.place(rank, parity), len(theirs.addresses)
            looks.append(finding(_never, place, how[rank], theirs.first, count, theirs.shift))
            parts += count
        return looks, parts

    def _lent(self, tensors: int) -> dict[int, Lent]:
        lent = self._lending.reached(self._lending.tables(self._board.phase & 1), tensors=tensors)
        assert lent is not None  # all members have agreed that they can
        return lent

    def script_of(self, steps: Sequence[Bound], tensors: int, parts: int) -> Script | None:
        """Return steps in C, where they can be.

        Args:
            steps: With places in the tensors of a call, and in exposed memory of others.
            tensors: How many a call has.
            parts: How many parts others lend: see `looks`.
        """
        return script_of(self._board, steps, tensors, 0, parts)

    def check(self, operation: Operation) -> None:
        """Raise if a member has given up: the bytes read from it may not be those that it exposed."""
        self.recall.check(operation)

    def give_up(self, error: BaseException) -> None:
        """Withdraw the memory that this member exposed; return when no other member uses it any more."""
        self.recall.give_up(self._first, error)


def _never(operation: Operation) -> None:
    raise AssertionError("exposed memory does not change before the last fence")


class Accord:
    """Whether the ranks of each host can access each other's memory: determined once, by all.

    Args:
        borrowing: How this rank borrows; None where it is alone on its host.
        vote: Makes a tensor the largest that any rank brings: a collective, as a part of an operation.
    """

    def __init__(self, borrowing: Borrowing | None, vote: Callable[[Operation, torch.Tensor], None]) -> None:
        self._borrowing = borrowing
        self._vote = vote
        self._known: bool | None = None

    def __call__(self, operation: Operation) -> bool:
        """Return it, asking the other ranks if it is not known."""
        if self._known is None:
            refused = self._borrowing is not None and not self._borrowing.reaches_all
            refusals = torch.tensor([refused], dtype=torch.uint8)
            self._vote(operation, refusals)
            self._known = not refusals.item()
        return self._known
