"""`Crew`: real processes that play ranks, kept from cell to cell; killed ones are replaced."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

import attrs
import torch
from support.processes import context, start
from support.time_limits import Verdict, verdict

STACKS_S = 2.0

Note = Callable[[str], None]
"""Reports the current step of a rank, for the text of a failure."""


class Task(Protocol):
    """The task of the members of a crew; pickled."""

    def perform(self, role: int, note: Note) -> object:
        """Play one role; its result is reported."""


@attrs.define
class Told:
    """The outcome of one role.

    Attributes:
        outcome: ``done``, ``died``, ``failed`` or ``stuck``.
        notes: Its reports on the way.
        text: The reason of its failure, or its stack if it is stuck.
        verdict: The judgement of that failure.
        answer: Its return value.
    """

    outcome: str = "stuck"
    notes: list[str] = attrs.field(factory=list)
    text: str = ""
    verdict: Verdict = Verdict.FOLLOWS
    answer: object = None

    def __str__(self) -> str:
        return "\n".join([self.outcome, *(f"    {note}" for note in self.notes), self.text])


class Crew:
    """Processes that wait for something to do.

    Args:
        directory: For files of its own.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._members: list[_Member] = []
        self._started = 0

    def run(self, task: Task, roles: int, limit_s: float) -> list[Told]:
        """Have a task performed by as many members as it has roles; return the outcome of each."""
        self._fill(roles)
        cast = self._members[:roles]
        for role, member in enumerate(cast):
            member.pipe.send((task, role))
        told = [Told() for _ in cast]
        _listen({member.pipe: told[role] for role, member in enumerate(cast)}, time.monotonic() + limit_s)
        for member, each in zip(cast, told, strict=True):
            if each.outcome == "stuck":
                each.text = member.stacks()
        for member, each in zip(cast, told, strict=True):
            if each.outcome != "done":
                member.end()
                self._members.remove(member)
        return told

    def end(self) -> None:
        """Stop all of them."""
        for member in self._members:
            member.end()
        self._members.clear()

    def _fill(self, size: int) -> None:
        fresh = []
        while len(self._members) < size:
            fresh.append(_Member(self._directory / f"stacks-{self._started}"))
            self._members.append(fresh[-1])
            self._started += 1
        for member in fresh:
            assert member.pipe.recv() == "ready"


def _listen(pipes: dict[Connection, Told], deadline: float) -> None:
    """Record reports until all roles have ended or the time has passed."""
    while pipes:
        ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            told = pipes[pipe]
            try:
                kind, text = pipe.recv()
            except (EOFError, ConnectionResetError):
                told.verdict = Verdict.WRONG
                kind, text = "died", ""
            if kind == "note":
                told.notes.append(text)
            elif kind == "answer":
                told.answer = text
            elif kind == "verdict":
                told.verdict = text
            else:
                told.outcome, told.text = kind, text
                del pipes[pipe]


class _Member:
    """One process of a crew."""

    def __init__(self, stacks: Path) -> None:
        self._stacks = stacks
        self.pipe, theirs = context.Pipe()
        self._process = start(_serve, theirs, stacks)
        theirs.close()

    def stacks(self) -> str:
        """Return where its threads are."""
        pid = self._process.pid
        assert pid is not None  # it was started
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            text = self._stacks.read_text()
            if "most recent call first" in text:
                return text
            time.sleep(0.02)
        return "it does not answer: stopped, or inside a system call"

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()
        self._stacks.unlink(missing_ok=True)


def _serve(pipe: Connection, stacks: Path) -> None:
    """Perform tasks until the other end is closed or this process dies."""
    torch.set_num_threads(1)
    gc.freeze()  # the collector then skips imported objects after each task
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        pipe.send("ready")
        while True:
            try:
                task, role = pipe.recv()
            except EOFError:
                return
            pipe.send(_performed(pipe, task, role))


def _performed(pipe: Connection, task: Task, role: int) -> tuple[str, str]:
    start = time.monotonic()
    try:
        answer = task.perform(
            role, lambda text: pipe.send(("note", f"{time.monotonic() - start:6.3f} s  {text}"))
        )
        pipe.send(("answer", answer))
    except BaseException as error:  # noqa: BLE001 - reported to the test
        pipe.send(("verdict", verdict(error)))
        return "failed", traceback.format_exc()
    return "done", ""
