"""The global API where ranks are threads of one process: a world for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import pytest
import torch
from support.oracle import extremes
from support.threads import together

import dist2.legacy as dist
from dist2 import HashStore, InvalidUsageError, new_group, process_group
from dist2.group.open_groups import open_groups

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()
    assert not dist.world.worlds._worlds


def run(world_size: int, body: Callable[[int], object], **options: object) -> list[object]:
    """Call ``body(rank)`` in threads, each between `init_process_group` and `destroy_process_group`."""
    store = HashStore()

    def rank_main(rank: int) -> object:
        dist.init_process_group("socket", rank=rank, world_size=world_size, store=store, pg_options=options)
        try:
            return body(rank)
        finally:
            dist.destroy_process_group()

    return together(*[lambda rank=rank: rank_main(rank) for rank in range(world_size)])


@pytest.mark.parametrize("transport", ["auto", "tcp", "inproc"])
@pytest.mark.parametrize("world_size", [2, 8])
def test_each_thread_is_its_rank(world_size: int, transport: str) -> None:
    def body(rank: int) -> None:
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        large = torch.full((1 << 18,), rank + 1.0)
        dist.all_reduce(large)
        assert extremes(large) == {world_size * (world_size + 1) / 2}
        split = dist.new_group([0, 1])
        opened = dist.new_group([1, 0], backend="socket", pg_options={"transport": "tcp"})
        assert dist.get_pg_count() == 3
        if rank < 2:
            for pg in (split, opened):
                mine = torch.ones(3)
                dist.all_reduce(mine, group=pg)
                assert mine.tolist() == [2.0] * 3
                assert dist.get_process_group_ranks(pg) == [0, 1]
            message = torch.full((1 << 18,), 7.0 * (1 - rank))
            dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
            assert extremes(message) == {7.0}
        said: list[object] = [None] * world_size
        dist.all_gather_object(said, {"rank": rank})
        assert said == [{"rank": each} for each in range(world_size)]
        dist.barrier()

    for _ in range(3):
        run(world_size, body, transport=transport)


def test_a_group_that_shrinks_stays_its_threads_default() -> None:
    def body(rank: int) -> int | None:
        if rank == 0:
            return None
        dist.shrink_group([0], shrink_flags=dist.SHRINK_ABORT)
        mine = torch.ones(1)
        dist.all_reduce(mine)
        assert mine.item() == 2.0
        part = dist.group.WORLD.split([1])
        if part is not None:  # a thread that is no rank counts in the group's own default group as well
            with part:
                assert together(lambda: dist.get_process_group_ranks(part)) == [[1]]
        return dist.get_rank()

    assert run(3, body) == [None, 0, 1]


def test_groups_made_in_a_block_are_counted_by_its_group() -> None:
    """Ranks outside the block do not make them, and agree with the others on all that follow."""
    limit = timedelta(seconds=10)

    def body(rank: int) -> tuple[str, ...]:
        dist.new_group([0, 1], limit, "socket")
        pair = dist.new_group([1, 2])
        names = []
        if rank > 0:
            with process_group(pair):
                for backend in (None, "socket"):  # rank 1 has made a group of ranks 0 and 1, rank 2 has not
                    inner = dist.new_group([0, 1], limit, backend)
                    dist.barrier(inner)
                    names.append(inner.group_name)
        whole = dist.new_group(None, limit, "socket")
        dist.barrier(whole)
        return (whole.group_name, *names)

    ((outside,), first, second) = cast("list[tuple[str, ...]]", run(3, body))
    assert first == second
    assert first[0] == outside


def test_a_default_group_that_comes_back_goes_on_counting() -> None:
    """The groups that were made of it are still open, and have names."""

    def body(rank: int) -> int:
        whole = dist.group.WORLD
        for backend in (None, "socket"):
            dist.new_group([1, 0], backend=backend)
        before = [each for each in open_groups() if each.info.rank == rank and each is not whole]
        dist.group.WORLD = None
        dist.group.WORLD = whole
        assert dist.get_pg_count() == 1
        for backend in (None, "socket"):
            dist.barrier(dist.new_group([1, 0], timedelta(seconds=10), backend))
        for pg in before:
            pg.shutdown()
        return dist.get_pg_count()

    assert run(2, body) == [3, 3]


def test_a_thread_that_is_no_rank_must_say_which_group() -> None:
    """In a process of one rank, all threads are that rank."""

    def helper() -> None:
        assert not dist.is_initialized()
        with pytest.raises(InvalidUsageError, match="this thread is none of them: give `group`"):
            dist.get_rank()

    def body(rank: int) -> None:
        ready.wait(LIMIT_S)
        mine = dist.group.WORLD
        together(helper, lambda: in_group(rank, mine))
        ready.wait(LIMIT_S)

    def in_group(rank: int, mine: object) -> None:
        assert dist.get_rank(mine) == rank
        with process_group(mine):
            assert dist.get_rank() == rank

    ready = threading.Barrier(2)
    run(2, body)
    assert run(1, lambda rank: together(dist.get_rank, dist.is_initialized)) == [[0, True]]


def test_a_thread_that_has_ended_its_rank_is_no_other() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            dist.destroy_process_group()
            assert not dist.is_initialized()
            together(helper)
        ready.wait(LIMIT_S)
        if rank == 0:  # once more, for `run` to end
            dist.init_process_group("socket", rank=0, world_size=1, store=HashStore())

    def helper() -> None:
        assert not dist.is_initialized()

    ready = threading.Barrier(2)
    run(2, body)


def test_twice_is_refused() -> None:
    def again(**given: object) -> None:
        with pytest.raises(InvalidUsageError, match=r"twice! Another thread .* each with its rank="):
            dist.init_process_group("socket", **given)

    def body(rank: int) -> None:
        with pytest.raises(InvalidUsageError, match=r"twice!$"):
            dist.init_process_group("socket", rank=1, world_size=2, store=HashStore())
        together(again)
        together(lambda: again(rank=0, world_size=2, store=HashStore()))
        together(lambda: again(init_method="tcp://127.0.0.1:1?rank=0", world_size=2))

    run(1, body)


def test_one_that_failed_may_try_again() -> None:
    def rank_main() -> None:
        with pytest.raises(InvalidUsageError, match="rank must be non-negative"):
            dist.init_process_group("socket", rank=-1, world_size=2, store=HashStore())

    together(rank_main)
    assert run(1, lambda rank: dist.get_world_size()) == [1]


def test_groups_made_from_a_current_group() -> None:
    """Without `init_process_group` each thread counts as its own rank."""
    store = HashStore()

    def rank_main(rank: int) -> None:
        with new_group("socket", LIMIT_S, store=store, rank=rank, world_size=2) as pg, process_group(pg):
            for _ in range(2):
                made = dist.new_group([1, 0], backend="socket", sort_ranks=False)
                mine = torch.full((2,), rank + 1.0)
                dist.all_reduce(mine, group=made)
                assert mine.tolist() == [3.0] * 2
                assert dist.get_rank(made) == 1 - rank
                dist.destroy_process_group(made)

    together(lambda: rank_main(0), lambda: rank_main(1))
