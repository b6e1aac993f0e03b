"""Reading and writing memory of other processes: whether the kernel allows it is found out without harm."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import attrs
import pytest
from processes import started

from dist2.arena import TOKEN_BYTES, Arena, ArenaLocator
from dist2.backends.socket.transport import cross_memory

RENAMED = bytes(range(TOKEN_BYTES))


@attrs.frozen
class Other:
    """Another process, with an arena.

    Attributes:
        pipe: To it.
        locator: Of its arena.
    """

    pipe: Connection
    locator: ArenaLocator

    def rename(self) -> None:
        """Have it put something else where the name of its arena is, as if another arena were there."""
        self.pipe.send(RENAMED)
        assert self.pipe.poll(20)
        self.pipe.recv()

    def name(self) -> bytes:
        """Return what is there."""
        self.pipe.send(None)
        assert self.pipe.poll(20)
        name = self.pipe.recv()
        assert isinstance(name, bytes)
        return name


def _have_an_arena(pipe: Connection) -> None:
    arena = Arena(1 << 20)
    pipe.send(str(arena.locator))
    while True:
        told = pipe.recv()
        if told is not None:
            arena.view[:TOKEN_BYTES] = told
        pipe.send(bytes(arena.view[:TOKEN_BYTES]))


@pytest.fixture
def other() -> Iterator[Other]:
    with started(_have_an_arena, ()) as (pipe,):
        assert pipe.poll(20)
        yield Other(pipe, ArenaLocator.parse(pipe.recv()))


def test_to_ask_writes_nothing_into_what_may_be_something_else_by_then(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_read = cross_memory.read

    def read(pid: int, dst: int, src: int, nbytes: int) -> None:
        really_read(pid, dst, src, nbytes)
        other.rename()

    monkeypatch.setattr(cross_memory, "read", read)
    cross_memory.can_reach(other.locator)
    assert other.name() == RENAMED


def test_another_process_is_reached_unless_it_may_be_read_only(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = cross_memory.can_reach(other.locator)
    assert reached == _may_read(other.locator)

    def refuse(pid: int, dst: int, src: int, nbytes: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(cross_memory, "write", refuse)
    assert not cross_memory.can_reach(other.locator)


def test_an_arena_of_another_name_is_not_reached(other: Other) -> None:
    other.rename()
    assert not cross_memory.can_reach(other.locator)


def _may_read(locator: ArenaLocator) -> bool:
    """Whether this machine's kernel allows it at all."""
    found = bytearray(TOKEN_BYTES)
    here = ctypes.addressof(ctypes.c_char.from_buffer(found))
    try:
        cross_memory.read(locator.pid, here, locator.address, TOKEN_BYTES)
    except OSError:
        return False
    return True
