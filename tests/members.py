"""Jobs of processes as a launcher starts them: an environment for each, and ranks that meet by it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from processes import DIED, context
from stores import unused_port

import dist2
from dist2 import ProcessGroup
from dist2.security.refusals import refusals

TIMEOUT_S = 30.0
ANSWER_S = 50.0

Variables = dict[str, str]
Body = Callable[[ProcessGroup, Connection], Any]


def _member(
    pipe: Connection, variables: Variables, body: Body, timeout: float, options: dict[str, Any]
) -> None:
    """Be a rank: say what the body returned, or what was raised and after how long."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    start = time.monotonic()
    if "init_method" in options:
        options.update({name.lower(): int(variables[name]) for name in ("RANK", "WORLD_SIZE")})
    try:
        with dist2.new_group("socket", timeout, name="secured", **options) as pg:
            answer = body(pg, pipe)
    except Exception as error:  # noqa: BLE001 - told to the test
        answer = (type(error).__name__, str(error), time.monotonic() - start)
    pipe.send((answer, refusals.counts()))


@contextmanager
def job(
    environments: list[Variables], body: Body, timeout: float = TIMEOUT_S, **options: Any
) -> Iterator[list[Connection]]:
    """Start a process for each environment; yield the pipes to them."""
    pipes, processes = [], []
    for variables in environments:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_member, args=(theirs, variables, body, timeout, options), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


def answers(pipes: list[Connection]) -> list[Any]:
    """Return what each said in the end, and what it refused; `DIED` for those that said nothing."""
    said: dict[Connection, Any] = {}
    deadline = time.monotonic() + ANSWER_S
    while len(said) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in said], max(0.0, deadline - time.monotonic()))
        assert ready, f"stuck: ranks {[rank for rank, pipe in enumerate(pipes) if pipe not in said]}"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                said[pipe] = pipe.recv()
            except EOFError:
                said[pipe] = (DIED, {})
    return [said[pipe] for pipe in pipes]


def launched(world_size: int, **common: str) -> list[Variables]:
    """Return what a launcher sets for each rank."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": str(world_size)}
    return [{**where, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
