"""Reading memory of other processes: whether the kernel allows it is found out without harm."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import pytest
from support.processes import started

import dist2
from dist2.backends.socket.transport.cross_memory import can_reach, read
from dist2.runtime.shared_memory import TOKEN_BYTES, Arena, ArenaLocator

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


def _have_an_arena(pipe: Connection) -> None:
    arena = Arena(1 << 20)
    pipe.send(str(arena.locator))
    while True:
        arena.view[:TOKEN_BYTES] = pipe.recv()
        pipe.send(None)


@pytest.fixture
def other() -> Iterator[Other]:
    with started(_have_an_arena, ()) as (pipe,):
        assert pipe.poll(20)
        yield Other(pipe, ArenaLocator.parse(pipe.recv()))


def test_another_process_is_reached_where_the_kernel_allows_it(other: Other) -> None:
    assert can_reach(other.locator) == _may_read(other.locator)


def test_nothing_in_the_library_writes_another_process() -> None:
    """A process may be stopped before it writes, until the call of the memory's owner has raised."""
    sources = [each for each in Path(dist2.__file__).parent.rglob("*") if each.suffix in (".py", ".c", ".h")]
    assert any("process_vm_readv" in each.read_text() for each in sources)
    assert not [each for each in sources if "process_vm_writev" in each.read_text()]


def test_an_arena_of_another_name_is_not_reached(other: Other) -> None:
    other.rename()
    assert not can_reach(other.locator)


def _may_read(locator: ArenaLocator) -> bool:
    """Whether this machine's kernel allows it at all."""
    found = bytearray(TOKEN_BYTES)
    here = ctypes.addressof(ctypes.c_char.from_buffer(found))
    try:
        read(locator.pid, here, locator.address, TOKEN_BYTES)
    except OSError:
        return False
    return True
