"""The current group: nested, restored, one stack a thread and asyncio task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from dist2 import (
    Dist2Error,
    GroupAbortedError,
    InvalidUsageError,
    PeerLostError,
    ProcessGroup,
    current_process_group,
    new_group,
    process_group,
)
from dist2.torch_backend import default_group

Enter = Callable[[Any], AbstractContextManager[ProcessGroup]]


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    """Two groups."""
    with (
        new_group("fake", rank=0, world_size=2) as one,
        new_group("fake", rank=0, world_size=2) as two,
    ):
        yield one, two


def test_blocks_nest_and_restore(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    one, two = groups
    assert current_process_group() is None
    with process_group(one) as entered:
        assert entered is one
        with process_group(two):
            assert current_process_group() is two
        assert current_process_group() is one
    assert current_process_group() is None


def test_an_exception_restores_too(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    one, two = groups
    with process_group(one):
        with pytest.raises(KeyError), process_group(two):
            raise KeyError
        assert current_process_group() is one
    assert current_process_group() is None


def test_threads_do_not_see_each_other(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    one, _ = groups
    seen: list[object] = []
    with process_group(one):
        thread = threading.Thread(target=lambda: seen.append(current_process_group()))
        thread.start()
        thread.join(5)
    assert seen == [None]


def test_tasks_do_not_see_each_other(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    async def enter(pg: ProcessGroup, mine: asyncio.Event, other: asyncio.Event) -> list[ProcessGroup | None]:
        with process_group(pg):
            mine.set()
            await other.wait()  # the other task is inside its block, too
            inside = current_process_group()
        return [inside, current_process_group()]

    async def both() -> list[list[ProcessGroup | None]]:
        first, second = asyncio.Event(), asyncio.Event()
        one, two = groups
        return list(await asyncio.gather(enter(one, first, second), enter(two, second, first)))

    assert asyncio.run(both()) == [[groups[0], None], [groups[1], None]]


def test_blocks_that_end_out_of_order_take_out_their_own(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    one, two = groups
    outer, inner = process_group(one), process_group(two)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert current_process_group() is two
    inner.__exit__(None, None, None)
    assert current_process_group() is None


@pytest.mark.parametrize("enter", [process_group, default_group])
@pytest.mark.parametrize("nothing", [None, "training", -100])
def test_what_is_no_group_is_not_entered(nothing: Any, enter: Enter) -> None:
    with pytest.raises(InvalidUsageError, match="pg must be a process group, got"):
        enter(nothing).__enter__()
    assert current_process_group() is None
    assert not torch.distributed.is_initialized()


def test_a_group_of_torchs_own_is_not_entered() -> None:
    pg = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    with pytest.raises(InvalidUsageError, match=r"pg must be a group of dist2's, .* dist2\.register_backend"):
        process_group(pg).__enter__()
    assert current_process_group() is None


@pytest.mark.parametrize(
    ("enter", "part"), [(process_group, "the current group"), (default_group, "torch's default group")]
)
@pytest.mark.parametrize(
    ("close", "how"),
    [(ProcessGroup.shutdown, "was shut down in"), (ProcessGroup.abort, "was aborted in")],
)
def test_a_closed_group_is_not_entered(
    close: Callable[[ProcessGroup], None], how: str, enter: Enter, part: str
) -> None:
    pg = new_group("fake", rank=0, world_size=2, name="gone")
    close(pg)
    told = f"^pg is closed and cannot be {part}: group 'gone' {how} this process$"
    with pytest.raises(GroupAbortedError, match=told) as caught:
        enter(pg).__enter__()
    assert (caught.value.group, caught.value.rank) == ("gone", 0)
    assert current_process_group() is None
    assert not torch.distributed.is_initialized()


def test_a_broken_group_is_entered_until_it_is_closed() -> None:
    pg = new_group("fake", rank=0, world_size=2)
    broken = PeerLostError("rank 1 died", ranks=[1])
    pg._runner.fault = broken
    with process_group(pg):
        assert current_process_group() is pg  # to shrink it
        pg.shutdown()
        assert current_process_group() is pg  # a block lasts until it ends
    told = "^pg is closed and cannot be the current group: rank 1 died$"
    with pytest.raises(PeerLostError, match=told) as caught:
        process_group(pg).__enter__()
    assert caught.value.ranks == (1,)
    assert isinstance(caught.value.__cause__, Dist2Error)
