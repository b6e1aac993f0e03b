"""What one operation between hosts borrows of the other ranks of this host: their callers' tensors.

The ranks of a host lend between the first and the last fence of an operation. What is lent may be mapped in
this process, or the kernel moves it; whether it does on all hosts is found out once a group (`Accord`), so
that all ranks run the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dist2.backends.socket.memory import copy_bytes
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.board import Board
from dist2.backends.socket.transport.lending import Lending, Lent
from dist2.backends.socket.transport.recall import Recall
from dist2.errors import PeerLostError
from dist2.operation import Operation


class Borrowed:
    """One part of what another rank lends.

    Args:
        board: Where the ranks of the host meet.
        recall: Of that board.
        owner: Whose memory it is.
        pid: In which process; 0: it is mapped in this one.
        address: Of its first byte.
    """

    __slots__ = ("_board", "_owner", "_pid", "_recall", "address")

    def __init__(self, board: Board, recall: Recall, owner: int, pid: int, address: int) -> None:
        self._board = board
        self._recall = recall
        self._owner = owner
        self._pid = pid
        self.address = address

    def fetch(self, start: int, into: int, nbytes: int, operation: Operation) -> None:
        """Copy bytes from ``start`` on to an address of this process: what the owner has lent, or it raises.

        Raises:
            PeerLostError: The owner is gone, or has given up.
        """
        if self._pid:
            self._move(cross_memory.read, into, self.address + start, nbytes, operation)
        else:
            copy_bytes(into, self.address + start, nbytes)
        self._check(operation)  # now: what is sent on to other hosts is not looked at again

    def put(self, start: int, source: int, nbytes: int, operation: Operation) -> None:
        """Copy bytes from an address of this process to ``start``, while it is lent; raises as `fetch`."""
        self._check(operation)
        if self._pid:
            self._move(cross_memory.write, self.address + start, source, nbytes, operation)
        else:
            copy_bytes(self.address + start, source, nbytes)

    def _check(self, operation: Operation) -> None:
        """Raise if the memory is no longer lent."""
        if self._owner in self._board.gave_up():
            self._recall.check(operation)

    def _move(
        self,
        move: Callable[[int, int, int, int], None],
        dst: int,
        src: int,
        nbytes: int,
        operation: Operation,
    ) -> None:
        try:
            move(self._pid, dst, src, nbytes)
        except OSError as error:
            self._board.check(operation, self._owner)  # it died, left or aborted: that is the better answer
            message = f"memory of rank {self._owner} cannot be reached: {error}"
            raise PeerLostError(message, ranks=[self._owner]) from error


class Borrowing:
    """Lends and borrows for one member of a group, one operation at a time.

    Args:
        board: Where the ranks of this host meet.
        lending: Of that board.
    """

    def __init__(self, board: Board, lending: Lending) -> None:
        self._board = board
        self._lending = lending
        self._recall = Recall(board)
        self._first = 0

    @property
    def reaches_all(self) -> bool:
        """Whether the kernel moves memory between this process and the others of its host."""
        return self._lending.reaches_all

    def offer(self, addresses: Sequence[int]) -> None:
        """Lend memory from the next fence on."""
        self._first = self._board.phase + 1
        self._lending.offer(tuple(addresses))

    def borrow(self, wanted: Sequence[tuple[int, int]]) -> list[Borrowed]:
        """Return what others lend since the last fence: for each rank and part.

        Raises:
            PeerLostError: A member is gone.
        """
        lent = self._lending.reached(self._lending.tables())
        assert lent is not None  # all members have agreed that they can
        return [self._borrowed(owner, lent[owner], part) for owner, part in wanted]

    def _borrowed(self, owner: int, lent: Lent, part: int) -> Borrowed:
        return Borrowed(self._board, self._recall, owner, lent.pid, lent.addresses[part])

    def check(self, operation: Operation) -> None:
        """Raise if a member has given up: what was read of it may not be what it had lent."""
        self._recall.check(operation)

    def give_up(self, error: BaseException) -> None:
        """Take back what this member lent, and return when no other uses it any more."""
        self._recall.give_up(self._first, error)


class Accord:
    """Whether the ranks of each host can reach each other's memory: found out once, by all.

    Args:
        borrowing: Of this rank; None where it is alone on its host.
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
