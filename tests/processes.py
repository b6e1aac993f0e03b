"""Ranks as processes, forked from a server that has imported everything already."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from promises import Verdict, failure, verdict

import dist2
from dist2 import PrefixStore, ProcessGroup

CASE_S = 40.0
ALL_HAVE_ANSWERED = "all have answered"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    # What ranks and test modules import, but for modules of tests: the server does not find those.
    [
        "dist2.backends.socket.create",
        "observability.board",
        "observability.flight_recorder",
        "observability.metrics",
        "pytest",
    ]
)


class Died:
    """What a rank "returned" that was killed."""

    def __repr__(self) -> str:
        return "died"


DIED = Died()


def run_processes(
    world_size: int,
    body: Callable[..., Any],
    directory: Path,
    *arguments: Any,
    timeout: float = 20.0,
    **options: object,
) -> list[Any]:
    """Call ``body(pg, *arguments)`` in ``world_size`` processes, each a rank of one new group.

    A process stays, and its group stays open, until all have answered: who is done first is not gone for the
    others. One that raised leaves at once, so that the others do not wait for it.

    Returns:
        What each returned; `DIED` where the process ended without an answer.

    Raises:
        AssertionError: A rank raised (with its traceback), or is stuck; `Late` if one was, and no other
            failed by itself.
    """
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve_once,
            args=(theirs, body, arguments, directory / "store", rank, world_size, timeout, options),
            daemon=True,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _answers(pipes: list[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + CASE_S
    while len(answers) < len(pipes):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        assert ready, f"stuck: ranks {sorted(missing.values())}"
        for pipe, rank in missing.items():
            if pipe in ready:
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (None, DIED)
    for pipe in pipes:
        with suppress(BrokenPipeError):  # it died
            pipe.send(ALL_HAVE_ANSWERED)
    failed = {rank: answer for rank, answer in sorted(answers.items()) if answer[0] is not None}
    if failed:
        told = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items())
        raise failure(told, *[judged for judged, _ in failed.values()])
    return [answers[rank][1] for rank in range(len(pipes))]


def _serve_once(*arguments: Any) -> None:
    gc.freeze()  # what was imported is not looked through again and again
    _serve(*arguments)


def _serve(
    pipe: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    path: Path,
    rank: int,
    world_size: int,
    timeout: float,
    options: dict[str, Any],
) -> None:
    pg = None
    answer: tuple[Verdict | None, Any]
    try:
        store = dist2.FileStore(str(path), world_size)
        pg = dist2.new_group(
            "socket", timeout, store=store, rank=rank, world_size=world_size, name="test", **options
        )
        answer = (None, body(pg, *arguments))
    except BaseException as error:  # noqa: BLE001 - told to the test
        answer = (verdict(error), traceback.format_exc())
    pipe.send(answer)
    if pg is not None and answer[0] is not None:
        pg.abort()
    assert pipe.recv() == ALL_HAVE_ANSWERED
    if pg is not None:
        pg.abort()


def tell(pg: ProcessGroup, event: str) -> None:
    """Say to the other ranks that something has happened, without the group's operations."""
    PrefixStore("events", pg.spec.store).set(event, b"")


def hear(pg: ProcessGroup, *events: str) -> None:
    """Wait until all of these have been told."""
    PrefixStore("events", pg.spec.store).wait(list(events))


def caught(kind: type[BaseException], call: Callable[[], object]) -> tuple[Any, float]:
    """Return the error of one kind that a call must raise, and after how many seconds it did."""
    start = time.monotonic()
    try:
        call()
    except kind as error:
        return error, time.monotonic() - start
    raise AssertionError(f"no {kind.__name__} was raised")


class Crew:
    """Processes that run one case after another, each as a rank of a new group: none of them may die.

    Args:
        world_size: How many.
        directory: For the files where groups meet.
    """

    def __init__(self, world_size: int, directory: Path) -> None:
        self._directory = directory
        self._cases = 0
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, world_size), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, body: Callable[..., Any], *arguments: Any, timeout: float = 20.0, **options: object
    ) -> list[Any]:
        """Call ``body(pg, *arguments)`` on each rank of a new group; return what each returned.

        Raises:
            AssertionError: A rank raised (with its traceback), or is stuck.
        """
        self._cases += 1
        path = self._directory / f"store-{self._cases}"
        for pipe in self._pipes:
            pipe.send((body, arguments, path, timeout, options))
        return _answers(self._pipes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def _work(pipe: Connection, rank: int, world_size: int) -> None:
    gc.freeze()  # once: garbage that is frozen, a group of the case before, say, is never collected
    while True:
        try:
            body, arguments, path, timeout, options = pipe.recv()
        except EOFError:
            return
        _serve(pipe, body, arguments, path, rank, world_size, timeout, options)
        gc.collect()  # not in the midst of what the next case measures
