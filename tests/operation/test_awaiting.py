"""`await` of a Work and of a batch, in asyncio and trio."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, Tenant, run_ranks

import dist2
from dist2 import InvalidUsageError, MismatchError, ProcessGroup

INPROC = TENANTS[0]
WITHOUT_TRIO = pytest.mark.skipif(importlib.util.find_spec("trio") is None, reason="trio is not installed")


def in_trio(task: Callable[[], Coroutine[Any, Any, None]]) -> None:
    importlib.import_module("trio").run(task)


def in_asyncio(task: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(task())


@pytest.mark.parametrize("start", [in_asyncio, pytest.param(in_trio, marks=WITHOUT_TRIO)])
@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_operations_are_awaited(tenant: Tenant, start: Callable[..., None]) -> None:
    def body(pg: ProcessGroup) -> None:
        async def task() -> None:
            x = torch.full((2,), pg.rank() + 1.0)
            assert await pg.all_reduce(x) == [x]  # complete already
            works = [pg.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
            assert [(await work)[0].item() for work in works] == [2.0] * 5
            other = 1 - pg.rank()
            message = pg.irecv(torch.empty(2), other)
            await pg.isend(x, other)
            assert (await message)[0].tolist() == [3.0, 3.0]
            with pg.coalescing() as batch:
                pg.all_reduce(one := torch.ones(1))
                pg.all_reduce(two := torch.ones(2))
            await batch
            assert [*one.tolist(), *two.tolist()] == [2.0] * 3
            await pg.barrier(async_op=True)

        start(task)

    run_ranks(2, body, tenant)


def test_other_tasks_go_on_and_no_thread_waits() -> None:
    def body(pg: ProcessGroup) -> None:
        async def task() -> None:
            ticks = 0
            if pg.rank() == 1:
                for _ in range(50):  # of other tasks; rank 0 waits meanwhile
                    await asyncio.sleep(0)
                await pg.all_reduce(torch.ones(1), async_op=True)
                for tag in range(20):
                    await pg.isend(torch.ones(1), 0, tag)
                return
            works = [asyncio.ensure_future(waits(pg.all_reduce(torch.ones(1), async_op=True)))]
            before = threading.active_count()
            works += [asyncio.ensure_future(waits(pg.irecv(torch.empty(1), 1, tag))) for tag in range(20)]
            while not works[0].done():
                await asyncio.sleep(0)
                ticks += 1
            assert threading.active_count() < before + 10  # those of groups, of both ranks; not 20
            assert ticks > 0
            await asyncio.gather(*works)

        async def waits(work: dist2.Work) -> None:
            await work

        asyncio.run(task())

    run_ranks(2, body, INPROC)


def test_an_operation_goes_on_when_its_task_is_cancelled() -> None:
    posted = threading.Event()

    def body(pg: ProcessGroup) -> None:
        async def task() -> None:
            x = torch.ones(1)
            if pg.rank() == 1:
                await asyncio.to_thread(posted.wait, 10)
                await pg.all_reduce(x, async_op=True)
            else:
                work = pg.all_reduce(x, async_op=True)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await work
                posted.set()
                assert (await work)[0].item() == 2  # once more
            await pg.barrier(async_op=True)

        asyncio.run(task())

    run_ranks(2, body, INPROC)


def test_errors_are_raised_in_the_task() -> None:
    def body(pg: ProcessGroup) -> None:
        async def task() -> None:
            with pytest.raises(MismatchError):
                await pg.all_reduce(torch.ones(2 + pg.rank()), async_op=True)

        asyncio.run(task())

    run_ranks(2, body, INPROC)


@pytest.mark.parametrize("start", [in_asyncio, pytest.param(in_trio, marks=WITHOUT_TRIO)])
def test_a_group_in_an_async_with_block(start: Callable[..., None]) -> None:
    async def task() -> None:
        async with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:
            await pg.barrier(async_op=True)
        assert pg.is_closed
        with pytest.raises(KeyError):
            async with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:
                raise KeyError
        assert pg.is_closed

    start(task)


def test_without_an_event_loop_the_remedy_is_named() -> None:
    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            work = pg.irecv(torch.empty(1), 1)
            with pytest.raises(InvalidUsageError, match="use wait"):
                work.__await__().send(None)
            pg.barrier()
            work.wait()
        else:
            pg.barrier()
            pg.send(torch.ones(1), 0)

    run_ranks(2, body, INPROC)
