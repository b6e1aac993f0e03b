"""The tensors of the other ranks of this host that one operation between hosts accesses.

The ranks of a host expose memory between the first and the last fence of an operation. It is mapped in this
process, or the kernel moves it. Whether that works on all hosts is determined once for a group (`Accord`), so
that all ranks run the same algorithm. Scripts look up the addresses at each call (`Borrowing.looks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.backends.socket.bound_steps import Bound, copying, expecting, finding, reading, script_of
from dist2.backends.socket.host import Host, Script
from dist2.backends.socket.lowering import MAPPED
from dist2.backends.socket.lowering import Place as AnyPlace
from dist2.backends.socket.memory import copy_bytes
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.lending import Lending, Lent, Tables
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.errors import PeerLostError
from dist2.operation.record import Operation

Kinds = tuple[int, Tables]
"""The properties that scripts depend on: the parity of the fence, and the access to each member's memory."""
Looks = list[Bound]
"""Steps by which a script finds the others' memory."""


@attrs.frozen
class Place:
    """The begin of a span in this process.

    Attributes:
        address: Where it lies.
        any_call: The same for a script.
    """

    address: int
    any_call: AnyPlace


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
        number: Which of the places it is that a script finds.
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
        places = into.any_call, (MAPPED, self.number, start)
        if not self.pid:
            copy = copying(lambda operation: copy_bytes(to, there, nbytes), *places, nbytes)
            return [copy, self._lent()]
        read = self._reaching(cross_memory.bound_read(self.pid, to, there, nbytes))
        return [reading(read, self.pid, self.pidfd, *places, nbytes), self._lent()]

    def _lent(self) -> Bound:
        """Return a callable that raises if the memory is no longer lent."""
        return expecting(self._check, self.owner)

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
        self._known: Tables = ()
        self._host = Host(board, lending)
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
        kinds = self._lending.kinds(parity)
        if kinds != self._known:  # scripts find it in the way that was known last
            for rank in self._pidfds:
                self._lending.find(rank)
            self._known = kinds
        return parity, kinds

    def borrow(self, wanted: Sequence[tuple[int, int]]) -> list[Borrowed]:
        """Return the memory that others expose since the last fence.

        Args:
            wanted: Which part of which member's memory.

        Raises:
            PeerLostError: A member is gone.
        """
        lent, found = self._lent(), []
        for owner, part in wanted:
            theirs = lent[owner]
            address, number = theirs.addresses[part], theirs.first + part
            found.append(
                Borrowed(self._board, self.recall, owner, theirs.pid, self._pidfds[owner], address, number)
            )
        return found

    def looks(self) -> Looks:
        """Return steps by which a script finds the memory exposed since the last fence; see `borrow`."""
        wanted = [
            (rank, part) for rank, theirs in self._lent().items() for part in range(len(theirs.addresses))
        ]
        return [finding(wanted, self._board.phase & 1)]

    def _lent(self) -> dict[int, Lent]:
        lent = self._lending.reached(self._lending.tables(self._board.phase & 1))
        assert lent is not None  # all members have agreed that they can
        return lent

    def script_of(self, steps: Sequence[Bound], tensors: int) -> Script | None:
        """Return steps in a script of the core, where they can be.

        Args:
            steps: With places in the tensors of a call, and in exposed memory of others.
            tensors: How many a call has.
        """
        return script_of(self._board, self._host, steps, tensors)

    def check(self, operation: Operation) -> None:
        """Raise if a member has given up: the bytes read from it may not be those that it exposed."""
        self.recall.check(operation)

    def give_up(self, error: BaseException) -> None:
        """Withdraw the memory that this member exposed; return when no other member uses it any more."""
        self.recall.give_up(self._first, error)


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
