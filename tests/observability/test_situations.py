"""Situations in which a job hangs, injected into three processes: any healthy rank names the culprit in
seconds, and the incident names it once all processes have ended.

`support.hangs` has the situations. The ranks do not know that they are observed: the tests query them from
outside, as an operator does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from click.testing import CliRunner
from support.hangs import (
    SITUATIONS,
    WORLD,
    Situation,
    different_branch,
    idle,
    late_start,
    main_thread_ended,
    new_group_without_one,
    store_gone,
    store_stopped,
)
from support.processes import started
from support.programs import ROOT, run
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

import dist2
import observability
from dist2.cli.app import cli
from dist2.errors import Dist2Error

AFTER_S = 0.3
WITHIN_S = 5.0
"""The promise: how long after the hang begins a culprit may stay unnamed, on a quiet machine."""
PATIENCE_S = 25.0
LIVE_ONLY = (store_gone, store_stopped, late_start)
"""The launcher serves the store, and starts the control planes."""
ENDED_ONLY = (main_thread_ended,)
"""A process of multiprocessing ends with its main thread."""
IN_BRIEF = (different_branch, new_group_without_one)
"""Situations that the default tests look at after the end; `test_incidents.py` has a sleep and an error."""


def run_rank(pipe: Connection, situation: Situation, rank: int, port: int, folder: Path) -> None:
    """Be a rank of a situation: build the group, send the address of the control plane, hang."""
    if port:
        store: Any = dist2.TCPStore("127.0.0.1", port, is_master=False)
    else:
        store = dist2.FileStore(str(folder / "store"), WORLD)
    pg = dist2.new_group(situation.backend, 60, store=store, rank=rank, world_size=WORLD, name="training")
    if situation.part is late_start and rank == 2:
        pipe.send(None)
        idle()
    server = observability.start(pg, waiting_after_s=AFTER_S)
    pipe.send((server.url, server.token))
    assert pipe.recv() == "all are there"
    if situation.part is not late_start:
        pg.barrier()
    with suppress(Dist2Error):  # a rank that fails can still be asked
        situation.part(pg, folder)
    idle()


def serve_store(pipe: Connection) -> None:
    """Serve the store of a job, until killed."""
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("pid", str(os.getpid()))
    pipe.send(store.port)
    idle()


def ask(url: str, token: str, path: str) -> Any:
    try:
        return json.loads(observability.fetch(url + path, token, timeout_s=20))
    except HTTPError as error:
        with error:
            return json.loads(error.read())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a situation; then let children go on that wait to open a pipe in it."""
    yield tmp_path
    with suppress(FileNotFoundError):
        os.close(os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("situation", [each for each in SITUATIONS if each.part not in ENDED_ONLY], ids=str)
def test_the_culprit_is_named(situation: Situation, folder: Path) -> None:
    with started(serve_store, *([()] if situation.part in (store_gone, store_stopped) else [])) as stores:
        port = stores[0].recv() if stores else 0
        ranks = [(situation, rank, port, folder) for rank in range(WORLD)]
        with started(run_rank, *ranks) as pipes:
            planes = [pipe.recv() for pipe in pipes]
            url, token = planes[situation.asked]
            _let_all_register(url, token, sum(plane is not None for plane in planes))
            if stores:
                _end_the_store(port, signal.SIGKILL if situation.part is store_gone else signal.SIGSTOP)
            for pipe, plane in zip(pipes, planes, strict=True):
                if plane is not None:
                    pipe.send("all are there")
            found = _found(situation, url, token)
            verdict = "\n".join(found["verdict"])
            assert found["culprits"] == list(situation.culprits), verdict
            assert found["took_s"] < WITHIN_S
            assert situation.without not in verdict
            said = CliRunner().invoke(
                cli,
                ["why", url, "--after", "0.2", "--limit", "0.5"],  # the token is that of a job of this user
            )
            assert said.exit_code == 1, said.output
            assert all(words in said.output for words in situation.words), said.output


def _let_all_register(url: str, token: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while ask(url, token, "/job")["answered"] < count:
        assert time.monotonic() < deadline, ask(url, token, "/job")
        time.sleep(0.02)


def _end_the_store(port: int, by: signal.Signals) -> None:
    """Have the server of the store end, as if its host had gone, or stop: it listens and never answers."""
    client = dist2.TCPStore("127.0.0.1", port, is_master=False)
    os.kill(int(client.get("pid")), by)
    if by is signal.SIGSTOP:
        return
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            continue
        return


def _found(situation: Situation, url: str, token: str) -> Any:
    """Return the first diagnosis that is as expected, or the last one after a while."""
    began = time.monotonic()
    while True:
        found = ask(url, token, "/desync?after_ms=200&limit_ms=500")
        took_s = time.monotonic() - began
        said = "\n".join(found["verdict"])
        if all(words in said for words in situation.words) or took_s > PATIENCE_S:
            return found
        time.sleep(0.05)


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(each, marks=[] if each.part in IN_BRIEF else [pytest.mark.exhaustive])
        for each in SITUATIONS
        if each.part not in LIVE_ONLY
    ],
    ids=str,
)
def test_the_culprit_is_named_after_the_end(situation: Situation, folder: Path) -> None:
    """By the incident, once all processes have ended, and the exit code tells a hang from a failure."""
    warm_executable()
    variables = {
        "DIST2_INCIDENTS": str(folder / "incidents"),
        "DIST2_ON_HANG": "exit",
        "DIST2_WAITING": "0.5",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    command = [*warm_python(), CHILDREN, "-m", "dist2.run", "-n", str(WORLD), "-m", "support.hangs"]
    ended = run([*command, str(situation), folder], variables=variables)
    assert ended.code == situation.code, ended
    (incident,) = (folder / "incidents").glob("2*")
    said = CliRunner().invoke(cli, ["why", str(incident)])
    assert said.exit_code == 1, said.output
    found = json.loads(CliRunner().invoke(cli, ["why", str(incident), "--json"]).output)
    assert found["culprits"] == list(situation.culprits), said.output
    assert all(words in said.output for words in situation.words), said.output
    assert situation.without not in said.output
