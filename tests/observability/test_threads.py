"""Calls that wait, off the event loop of the control plane."""

from __future__ import annotations

import asyncio
import threading

import pytest

from observability.server.threads import Together, on_thread


def test_a_call_runs_on_a_thread_that_the_end_of_the_program_ends() -> None:
    async def body() -> None:
        assert await on_thread(lambda: threading.current_thread().daemon)
        with pytest.raises(ZeroDivisionError):
            await on_thread(lambda: 1 // 0)

    asyncio.run(body())


def test_those_that_ask_while_a_call_runs_get_its_answer() -> None:
    calls: list[int] = []
    gate = threading.Event()

    def call(number: int) -> int:
        calls.append(number)
        gate.wait(10)
        return number

    async def body() -> None:
        together = Together(call)
        asking = [asyncio.ensure_future(together(number)) for number in (1, 1, 1, 2)]
        await asyncio.sleep(0)
        asking[0].cancel()  # a client has left: the others get their answer
        gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [1, 1, 2]
        assert await together(1) == 1

    asyncio.run(body())
    assert sorted(calls) == [1, 1, 2]
