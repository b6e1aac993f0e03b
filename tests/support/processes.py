"""Ranks as processes, forked from a server that has imported everything already."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, spawn, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import dist2
from dist2 import PrefixStore, ProcessGroup
from support.ranks import host_platform
from support.time_limits import Verdict, failure, verdict
from support.warm_interpreter import warm_executable

CASE_S = 40.0
ALL_HAVE_ANSWERED = "all have answered"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [  # what ranks and test modules import
        "dist2.backends.socket.create",
        "dist2.group.public",
        "dist2.legacy",
        "observability.group_status",
        "observability.flight_recorder",
        "observability.metrics",
        "observability.server.app",
        "observability.server.serving",
        "pytest",
        "support.processes",
        "torch._dynamo",  # optimizers do, and it takes as long as all the rest
        "support.ready_to_fork",
    ]
)


class Died:
    """The "result" of a rank that was killed."""

    def __repr__(self) -> str:
        return "died"


DIED = Died()

ENDS_ARE_TOLD = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
"""Whether the kernel reports to all processes how another one ended."""


def start(body: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """Start a process that calls ``body(*arguments)``; it does not outlive this one."""
    _start_server()
    process = context.Process(target=body, args=arguments, daemon=True)
    process.start()
    return process


@functools.cache
def _start_server() -> None:
    """Start the server of forks where it finds the modules of tests: it does not get `sys.path`.

    It is a fork of the warm interpreter, unless this process has options of Python's that it is to have too.
    """
    resource_tracker.ensure_running()
    executable = spawn.get_executable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        try:
            if not util._args_from_interpreter_flags():  # type: ignore[attr-defined]
                spawn.set_executable(warm_executable(for_children=False))
            forkserver.ensure_running()
        finally:
            spawn.set_executable(executable)


@contextmanager
def started(body: Callable[..., object], *each: tuple[Any, ...]) -> Iterator[list[Connection]]:
    """Call ``body(pipe, *arguments)`` in a process for each tuple of arguments; yield the pipes to them.

    They are killed in the end.
    """
    pipes, processes = [], []
    try:
        for arguments in each:
            ours, theirs = context.Pipe()
            pipes.append(ours)
            with theirs:  # so that its end is the process's
                process = start(body, theirs, *arguments)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def answers_of(pipes: list[Connection], limit_s: float = CASE_S) -> list[Any]:
    """Return the first answer of each pipe; `DIED` if its process ended without an answer.

    Raises:
        AssertionError: Some have sent nothing within the limit.
    """
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(answers) < len(pipes):
        missing = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        assert ready, f"stuck: ranks {sorted(missing.values())}; the others said {answers}"
        for pipe, rank in missing.items():
            if pipe in ready:
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = DIED
    return [answers[rank] for rank in range(len(pipes))]


def run_processes(
    world_size: int,
    body: Callable[..., Any],
    directory: Path,
    *arguments: Any,
    timeout: float = 20.0,
    **options: object,
) -> list[Any]:
    """Call ``body(pg, *arguments)`` in ``world_size`` processes, each a rank of one new group.

    A process stays, and its group stays open, until all have answered: a rank that is done first has not left
    the others. One that raised leaves at once, so that the others do not wait for it. The option ``threads``
    is the number of torch's threads in each, 1 by default: more of them take turns on a core, and spin. The
    environment of the ranks is that of the server: variables that a test sets do not reach them.

    Returns:
        The result of each; `DIED` if the process ended without an answer.

    Raises:
        AssertionError: A rank raised (with its traceback), or is stuck; `Late` if one was, and no other
            failed by itself.
    """
    path = directory / "store"
    ranks = [(body, arguments, path, rank, world_size, timeout, options) for rank in range(world_size)]
    with started(_serve_once, *ranks) as pipes:
        return _results(pipes)


def _results(pipes: list[Connection]) -> list[Any]:
    answers: list[tuple[Verdict | None, Any]]
    answers = [(None, DIED) if answer is DIED else answer for answer in answers_of(pipes)]
    for pipe in pipes:
        with suppress(BrokenPipeError):  # it died
            pipe.send(ALL_HAVE_ANSWERED)
    failed = {rank: (judged, text) for rank, (judged, text) in enumerate(answers) if judged is not None}
    if failed:
        told = "\n".join(f"rank {rank}: {text}" for rank, (_, text) in failed.items())
        raise failure(told, *[judged for judged, _ in failed.values()])
    return [result for _, result in answers]


def _serve_once(*arguments: Any) -> None:
    gc.freeze()  # the collector then skips imported objects
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
    torch.set_num_threads(options.pop("threads", 1))
    backend, platform = options.pop("backend", "socket"), ExitStack()
    if backend == "nccl":
        options.setdefault("strict", True)  # as CPU groups: a wrong call raises at once
        options["platform"] = platform.enter_context(host_platform())
    try:
        store = dist2.FileStore(str(path), world_size)
        pg = dist2.new_group(
            backend, timeout, store=store, rank=rank, world_size=world_size, name="test", **options
        )
        answer = (None, body(pg, *arguments))
    except BaseException as error:  # noqa: BLE001 - reported to the test
        answer = (verdict(error), traceback.format_exc())
    pipe.send(answer)
    if pg is not None and answer[0] is not None:
        pg.abort()
    assert pipe.recv() == ALL_HAVE_ANSWERED
    if pg is not None:
        pg.abort()
    platform.close()


def tell(pg: ProcessGroup, event: str) -> None:
    """Say to the other ranks that something has happened, without the group's operations."""
    PrefixStore("events", pg.spec.store).set(event, b"")


def hear(pg: ProcessGroup, *events: str) -> None:
    """Wait for all of these events."""
    PrefixStore("events", pg.spec.store).wait(list(events))


def caught(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object]
) -> tuple[Any, float]:
    """Return the error of a kind that a call must raise, and after how many seconds it did."""
    start = time.monotonic()
    try:
        call()
    except kind as error:
        return error, time.monotonic() - start
    raise AssertionError(f"no {kind} was raised")


class Crew:
    """Processes that run one case after another, each as a rank of a new group: none of them may die.

    Args:
        world_size: How many.
        directory: For the files where groups meet.
    """

    def __init__(self, world_size: int, directory: Path) -> None:
        self._directory = directory
        self._cases = 0
        self._running = ExitStack()
        ranks = [(rank, world_size) for rank in range(world_size)]
        self._pipes = self._running.enter_context(started(_work, *ranks))

    def run(
        self, body: Callable[..., Any], *arguments: Any, timeout: float = 20.0, **options: object
    ) -> list[Any]:
        """Call ``body(pg, *arguments)`` on each rank of a new group; return the result of each.

        Raises:
            AssertionError: A rank raised (with its traceback), or is stuck.
        """
        self._cases += 1
        path = self._directory / f"store-{self._cases}"
        for pipe in self._pipes:
            pipe.send((body, arguments, path, timeout, options))
        return _results(self._pipes)

    def close(self) -> None:
        """End the processes."""
        self._running.close()


def _work(pipe: Connection, rank: int, world_size: int) -> None:
    gc.freeze()  # once: garbage that is frozen, a group of the case before, say, is never collected
    while True:
        try:
            body, arguments, path, timeout, options = pipe.recv()
        except EOFError:
            return
        _serve(pipe, body, arguments, path, rank, world_size, timeout, options)
        gc.collect()  # not during the measurements of the next case
