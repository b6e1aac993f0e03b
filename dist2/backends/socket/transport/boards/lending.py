"""`Lending`: callers' memory that the members of a board expose to each other for one operation.

Before a fence each member writes the addresses of its exposed memory into its control page, and how they can
be accessed: through a file that others can map, or by the kernel (`cross_memory`). After the fence all read
the tables of all, and so all decide alike whether every member can access all memory.
"""

from __future__ import annotations

import os
import struct
from functools import cached_property

import attrs

from dist2.backends.shared_tensors import IS_MAPPED, header_of, locator_of
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.control_words import TABLE_AT, TABLE_BYTES
from dist2.backends.socket.transport.boards.roster import Member
from dist2.operation.record import Operation
from dist2.runtime.cache import keep
from dist2.runtime.shared_memory import ArenaLocator, Mapping, attach

_HEADER = struct.Struct("<7Q")  # flags, addresses, descriptor, size, address and token of the file
HEADER_BYTES = _HEADER.size
"""The part of a table before the addresses: how they can be accessed."""
MAX_LENT = (TABLE_BYTES - _HEADER.size) // 8
MAX_DESCRIBED = 256
"""Sets of addresses whose tables are kept."""
_REACHES_ALL, _IS_MAPPED, _TOO_MANY = 1, IS_MAPPED, 4

Tables = tuple[bytes, ...]
"""The exposed memory of each member, by rank."""


@attrs.frozen
class Lent:
    """One member's exposed memory.

    Attributes:
        pid: Its process: 0 if the addresses are valid in this process.
        addresses: The address of each part.
        first: Number of its first part among those of all members, by rank.
        shift: Added to the addresses in its table.
    """

    pid: int
    addresses: tuple[int, ...]
    first: int
    shift: int = 0


@attrs.frozen
class _Table:
    """The table in a member's page."""

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
        self._regions = board.regions
        self._wanted = cross_memory
        self._reaches_all: bool | None = None
        self._mapped: dict[tuple[int, int], Mapping] = {}
        self._described: dict[tuple[int, ...], bytes] = {}
        self._views: tuple[list[memoryview], ...] | None = None

    @cached_property
    def _pids(self) -> dict[int, int]:
        """The process of each member, by rank."""
        return {each.rank: each.neighbour.pid for each in self._board.members} | {
            self._board.rank: os.getpid()
        }

    @cached_property
    def _used(self) -> int:
        """How many bytes of a table are in use: both ends of a part for each member at most."""
        return min(TABLE_BYTES, _HEADER.size + 2 * 8 * len(self._pids))

    @property
    def reaches_all(self) -> bool:
        """Whether the kernel moves memory between this process and all other members."""
        if self._reaches_all is None:
            self._reaches_all = self._wanted and all(map(_can_reach, self._board.members))
        return self._reaches_all

    def offer(self, addresses: tuple[int, ...], operation: Operation) -> None:
        """Expose memory from the next fence until a later fence that the members agree on.

        Raises:
            Dist2Error: As `Board.fence`: a member may still have to read the previous offer.
        """
        self._board.prepare(operation)
        at = _table_at((self._board.phase + 1) & 1)
        table = self.table(addresses)
        self._regions.control_page(self._board.rank)[at : at + len(table)] = table

    def table(self, addresses: tuple[int, ...]) -> bytes:
        """Return the table that publishes this member's exposed memory."""
        table = self._described.get(addresses)
        if table is None:
            table = keep(self._described, addresses, self._describe(addresses), MAX_DESCRIBED)
        return table

    def _describe(self, addresses: tuple[int, ...]) -> bytes:
        locator = locator_of(addresses) if addresses else None
        flags = _REACHES_ALL * self.reaches_all
        if locator is None:
            locator = ArenaLocator(os.getpid(), 0, 0, "00" * 16)
        else:
            flags |= _IS_MAPPED
        if len(addresses) > MAX_LENT:
            flags, addresses = flags | _TOO_MANY, ()
        words = header_of(locator, flags)
        words[1] = len(addresses)
        table = _HEADER.pack(*words) + struct.pack(f"<{len(addresses)}Q", *addresses)
        return table.ljust(self._used, b"\0")  # an old entry must not be read

    def find(self, rank: int) -> None:
        """Have plans find the memory that a member exposes since the last fence.

        Raises:
            PeerLostError: The member is gone.
        """
        at = _table_at(self._board.phase & 1)
        table = bytes(self._regions.control_page(rank)[at : at + TABLE_BYTES])
        shift = self._reached(_read_table(table, self._pids[rank]), 0).shift
        self._board.arrivals.know(rank, _HEADER.unpack_from(table), shift % (1 << 64))

    def tables(self, parity: int) -> Tables:
        """Return the tables of all members at the last fence of a parity: equal on all of them."""
        views = self._views
        if views is None:
            pages = [self._regions.control_page(rank) for rank in sorted(self._pids)]
            views = self._views = tuple(
                [page[_table_at(parity) : _table_at(parity) + self._used] for page in pages]
                for parity in (0, 1)
            )
        return tuple([bytes(view) for view in views[parity]])

    def kinds(self, parity: int) -> Tables:
        """Return the kinds of access to the memory of all members in `tables`, without addresses."""
        return tuple([table[:HEADER_BYTES] for table in self.tables(parity)])

    def reached(self, tables: Tables) -> dict[int, Lent] | None:
        """Return the exposed memory of each other member; None unless all members can access all of it.

        Args:
            tables: The result of `tables`.

        Raises:
            PeerLostError: A member is gone.
        """
        read = {
            rank: _read_table(table, self._pids[rank])
            for rank, table in zip(sorted(self._pids), tables, strict=True)
        }
        by_kernel = all(table.flags & _REACHES_ALL for table in read.values())
        for table in read.values():
            reachable = by_kernel or table.flags & _IS_MAPPED or not table.addresses
            if table.flags & _TOO_MANY or not reachable:
                return None
        lent: dict[int, Lent] = {}
        parts = 0
        for rank, table in read.items():
            if rank != self._board.rank:
                lent[rank] = self._reached(table, parts)
                parts += len(table.addresses)
        return lent

    def _reached(self, table: _Table, first: int) -> Lent:
        locator = table.locator
        if locator.pid == os.getpid() or not table.addresses:
            return Lent(0, table.addresses, first)
        if not table.flags & _IS_MAPPED:
            return Lent(locator.pid, table.addresses, first)
        key = (locator.pid, locator.fd)
        mapping = self._mapped.get(key)
        if mapping is None:
            mapping = self._mapped[key] = attach(locator)
        shift = mapping.address - locator.address
        return Lent(0, tuple(address + shift for address in table.addresses), first, shift)


def _table_at(parity: int) -> int:
    return TABLE_AT + parity * TABLE_BYTES


def _read_table(table: bytes, pid: int) -> _Table:
    flags, count, fd, nbytes, address, low, high = _HEADER.unpack_from(table)
    token = low.to_bytes(8, "little") + high.to_bytes(8, "little")
    addresses = struct.unpack_from(f"<{count}Q", table, _HEADER.size)
    return _Table(flags, ArenaLocator(pid, fd, nbytes, token.hex(), address), addresses)


def _can_reach(member: Member) -> bool:
    return cross_memory.can_reach(member.neighbour.locator)
