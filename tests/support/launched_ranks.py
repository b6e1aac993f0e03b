"""Jobs of processes as a launcher starts them: an environment for each, and ranks that meet by it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import dist2
from dist2 import ProcessGroup
from dist2.security.refusals import refusals
from support.processes import DIED, answers_of, started
from support.stores import unused_port

TIMEOUT_S = 30.0
ANSWER_S = 50.0

Variables = dict[str, str]
Body = Callable[[ProcessGroup, Connection], Any]


def _member(
    pipe: Connection, variables: Variables, body: Body, timeout: float, options: dict[str, Any]
) -> None:
    """Be a rank: send the body's result, or its exception and when it was raised."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    start = time.monotonic()
    if "init_method" in options:
        options.update({name.lower(): int(variables[name]) for name in ("RANK", "WORLD_SIZE")})
    try:
        with dist2.new_group("socket", timeout, name="secured", **options) as pg:
            answer = body(pg, pipe)
    except Exception as error:  # noqa: BLE001 - reported to the test
        answer = (type(error).__name__, str(error), time.monotonic() - start)
    pipe.send((answer, refusals.counts()))


@contextmanager
def job(
    environments: list[Variables], body: Body, timeout: float = TIMEOUT_S, **options: Any
) -> Iterator[list[Connection]]:
    """Start a process for each environment; yield the pipes to them."""
    members = [(variables, body, timeout, options) for variables in environments]
    with started(_member, *members) as pipes:
        yield pipes


def answers(pipes: list[Connection]) -> list[Any]:
    """Return the last answer of each rank, and its refusals; `DIED` for those that sent none."""
    return [(DIED, {}) if said is DIED else said for said in answers_of(pipes, ANSWER_S)]


def launched(world_size: int, **common: str) -> list[Variables]:
    """Return the variables that a launcher sets for each rank."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": str(world_size)}
    return [{**where, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
