"""`Lending`: what the members of a board lend each other of their callers' memory, for one operation.

Before a fence each member writes into its control page which addresses it lends, and how they can be
reached: through a file that others can map, or by the kernel (`cross_memory`). After the fence all read
all of it, and so all come to the same conclusion: everything can be reached by everybody, or not.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import attrs

from dist2.arena import ArenaLocator, Mapping, attach
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.board import LENDING_AT, LENDING_BYTES, Board, Member
from dist2.shared_tensors import locator_of

_HEADER = struct.Struct("<7Q")  # flags, addresses, descriptor, size, address and token of the file
_TABLE_BYTES = LENDING_BYTES // 2  # two, by parity of the fence
MAX_LENT = (_TABLE_BYTES - _HEADER.size) // 8
_REACHES_ALL, _IS_MAPPED, _TOO_MANY = 1, 2, 4


@attrs.frozen
class Lent:
    """One member's lent memory.

    Attributes:
        pid: Where it is: 0 if the addresses are valid in this process.
        addresses: Of each part.
    """

    pid: int
    addresses: tuple[int, ...]


@attrs.frozen
class _Table:
    """What a member wrote into its page."""

    flags: int
    locator: ArenaLocator
    addresses: tuple[int, ...]


class Lending:
    """The lending of one board.

    Args:
        board: Where the members meet.
        cross_memory: Whether the kernel may be asked to move memory between processes.
    """

    def __init__(self, board: Board, cross_memory: bool) -> None:
        self._board = board
        self._wanted = cross_memory
        self._reaches_all: bool | None = None
        self._mapped: dict[tuple[int, int], Mapping] = {}

    def offer(self, addresses: Sequence[int]) -> None:
        """Lend memory from the next fence to whenever the members agree: by another fence."""
        if self._reaches_all is None:
            self._reaches_all = self._wanted and all(map(_can_reach, self._board.members))
        locator = locator_of(addresses) if addresses else None
        flags = _REACHES_ALL * self._reaches_all
        if locator is None:
            locator = ArenaLocator(os.getpid(), 0, 0, "00" * 16)
        else:
            flags |= _IS_MAPPED
        if len(addresses) > MAX_LENT:
            flags, addresses = flags | _TOO_MANY, ()
        token = bytes.fromhex(locator.token)
        low, high = int.from_bytes(token[:8], "little"), int.from_bytes(token[8:], "little")
        page = self._board.control_page(self._board.rank)
        at = self._table_at(self._board.phase + 1)
        _HEADER.pack_into(
            page, at, flags, len(addresses), locator.fd, locator.nbytes, locator.address, low, high
        )
        struct.pack_into(f"<{len(addresses)}Q", page, at + _HEADER.size, *addresses)

    def taken(self, by_kernel: bool = True) -> dict[int, Lent] | None:
        """Return what each other member lends since the last fence; None unless all can reach all of it.

        Args:
            by_kernel: Whether the kernel may move what is not mapped; equal on all ranks.

        Raises:
            PeerLostError: A member is gone.
        """
        board = self._board
        own = self._table(board.rank, os.getpid())
        tables = {each.rank: self._table(each.rank, each.neighbour.pid) for each in board.members}
        everyone = [own, *tables.values()]
        by_kernel = by_kernel and all(table.flags & _REACHES_ALL for table in everyone)
        for table in everyone:
            reachable = by_kernel or table.flags & _IS_MAPPED or not table.addresses
            if table.flags & _TOO_MANY or not reachable:
                return None
        return {rank: self._reached(table) for rank, table in tables.items()}

    @staticmethod
    def _table_at(phase: int) -> int:
        return LENDING_AT + (phase & 1) * _TABLE_BYTES

    def _table(self, rank: int, pid: int) -> _Table:
        page, at = self._board.control_page(rank), self._table_at(self._board.phase)
        flags, count, fd, nbytes, address, low, high = _HEADER.unpack_from(page, at)
        token = low.to_bytes(8, "little") + high.to_bytes(8, "little")
        addresses = struct.unpack_from(f"<{min(count, MAX_LENT)}Q", page, at + _HEADER.size)
        return _Table(flags, ArenaLocator(pid, fd, nbytes, token.hex(), address), addresses)

    def _reached(self, table: _Table) -> Lent:
        locator = table.locator
        if locator.pid == os.getpid() or not table.addresses:
            return Lent(0, table.addresses)
        if not table.flags & _IS_MAPPED:
            return Lent(locator.pid, table.addresses)
        key = (locator.pid, locator.fd)
        mapping = self._mapped.get(key)
        if mapping is None:
            mapping = self._mapped[key] = attach(locator)
        shift = mapping.address - locator.address
        return Lent(0, tuple(address + shift for address in table.addresses))


def _can_reach(member: Member) -> bool:
    return cross_memory.can_reach(member.neighbour.locator)
