"""Processes that are started with wrong arguments: all get an error at once that names rank and argument."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.processes import DIED, answers_of, started
from support.stores import unused_port

import dist2
import dist2.legacy as dist

LIMIT_S = 60.0
SOON_S = 20.0
"""Time within which all must have their errors: a few seconds, beside other tests."""


@attrs.frozen
class Told:
    """How a process ended that was to build a group.

    Attributes:
        pid: Its number.
        kind: Name of the error's type; empty if the group was built.
        message: The error's.
        elapsed_s: How long it took.
    """

    pid: int
    kind: str
    message: str
    elapsed_s: float


def objects(backend: str, meets: dict[str, Any]) -> None:
    path = meets.pop("path", None)
    if path is not None:
        meets["store"] = dist2.FileStore(path, -1)
    dist2.new_group(backend, LIMIT_S, **meets).shutdown()


def legacy(backend: str, meets: dict[str, Any]) -> None:
    os.environ.update(meets["variables"])
    dist.init_process_group(backend)
    dist.destroy_process_group()


def _build(pipe: Connection, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    start = time.monotonic()
    kind = message = ""
    try:
        body(*arguments)
    except dist2.Dist2Error as error:
        kind, message = type(error).__name__, str(error)
    pipe.send(Told(os.getpid(), kind, message, time.monotonic() - start))
    pipe.recv()  # stays until the others have their error: its exit must not tell them


def all_told(body: Callable[..., None], *each: tuple[Any, ...]) -> list[Told]:
    """Call ``body`` in a process for each tuple of arguments, and return how they ended."""
    with started(_build, *((body, arguments) for arguments in each)) as pipes:
        told = answers_of(pipes)
    assert DIED not in told, told
    return told


def check(told: list[Told], kind: str, words: str) -> None:
    """Check that all got the same error, in time."""
    for each in told:
        assert each.kind == kind, told
        assert words in each.message
        assert each.elapsed_s < SOON_S


def check_out_of_range(told: list[Told], kind: str, words: str) -> None:
    """Check that all got the error about the last rank, and the others its process."""
    check(told, kind, words)
    *others, last = told
    for each in others:
        assert f"process {last.pid} on host" in each.message


@pytest.fixture(params=["tcp", "file", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int, int], tuple[Any, ...]]:
    """The arguments by which a process comes as this rank of so many."""
    port = unused_port()

    def of(rank: int, world_size: int) -> tuple[Any, ...]:
        given: dict[str, Any] = {"rank": rank, "world_size": world_size}
        if request.param == "tcp":
            given["init_method"] = f"tcp://127.0.0.1:{port}"
        elif request.param == "file":
            given["init_method"] = f"file://{tmp_path / 'store'}"
        else:
            given["path"] = str(tmp_path / "store")
        return "socket", given

    return of


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 0), (0, 1, 1)], ids=str)
def test_a_rank_that_is_started_twice_is_told_to_all(
    place: Callable[[int, int], tuple[Any, ...]], ranks: tuple[int, ...]
) -> None:
    size = len(ranks)
    told = all_told(objects, *(place(rank, size) for rank in ranks))
    doubled = next(rank for rank in ranks if ranks.count(rank) > 1)
    check(told, "RendezvousError", f"rank {doubled} was started twice: as process")
    for each in told:
        for rank, other in zip(ranks, told, strict=True):
            assert rank != doubled or f"process {other.pid} on host" in each.message, told


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)], ids=str)
def test_world_sizes_that_differ_are_told_to_all(
    place: Callable[[int, int], tuple[Any, ...]], sizes: tuple[int, int]
) -> None:
    told = all_told(objects, place(0, sizes[0]), place(1, sizes[1]))
    for each in told:
        assert each.kind in ("RendezvousError", "InvalidUsageError"), told
        assert "world size of" in each.message or "world_size is" in each.message
        for size in sizes:
            assert str(size) in each.message
        assert each.elapsed_s < SOON_S


def variables(rank: int, size: int, port: int) -> dict[str, Any]:
    names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"variables": {name: str(value) for name, value in names.items()}}


def test_a_rank_out_of_range_is_told_to_all() -> None:
    port = unused_port()
    told = all_told(legacy, *(("socket", variables(rank, 3, port)) for rank in (0, 1, 3)))
    check_out_of_range(told, "RendezvousError", "RANK must be from 0 to 2, got 3")


def test_a_rank_out_of_range_is_told_to_all_that_come_to_a_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    told = all_told(
        objects, *(("socket", {"path": path, "rank": rank, "world_size": 3}) for rank in (0, 1, 3))
    )
    check_out_of_range(told, "InvalidUsageError", "rank must be a group rank between 0 and 2, got 3")


def met_before(variables: dict[str, str], arguments: dict[str, Any]) -> None:
    """Make a group, fail to make a second one, and make a third; then raise the error again."""
    os.environ.update(variables)
    with dist2.new_group("socket", LIMIT_S):
        try:
            dist2.new_group("socket", LIMIT_S, **arguments)
        except dist2.Dist2Error as error:
            with dist2.new_group("socket", LIMIT_S, name="third") as pg:
                assert pg.size() == 3
            raise error from None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(0, "rank 0 was started twice: as process"), (7, "argument rank must be from 0 to 2, got 7")],
)
def test_a_wrong_rank_is_told_to_all_that_have_met_before(wrong: int, words: str) -> None:
    port = unused_port()
    asked: list[dict[str, Any]] = [{}, {"rank": wrong}, {}]
    given = [(variables(rank, 3, port)["variables"], each) for rank, each in enumerate(asked)]
    told = all_told(met_before, *given)
    check([told[1]], "RendezvousError", words)
    others = [told[0], told[2]]
    check(others, "InvalidUsageError", words)
    assert all(f"process {told[1].pid} on host" in each.message for each in others), told


def test_backends_that_differ_are_told_to_all() -> None:
    port = unused_port()
    told = all_told(
        legacy, *((name, variables(rank, 2, port)) for rank, name in enumerate(["socket", "gloo"]))
    )
    check(told, "InvalidUsageError", "backend is 'socket' on rank 0 and 'gloo' on rank 1")


@pytest.mark.parametrize("backend", ["socket", "gloo"])
def test_a_rank_that_cannot_build_its_group_is_named_to_all(tmp_path: Path, backend: str) -> None:
    def given(rank: int, **options: Any) -> tuple[Any, ...]:
        return backend, {"path": str(tmp_path / "store"), "rank": rank, "world_size": 3, **options}

    told = all_told(objects, given(0), given(1, no_such="option"), given(2))
    assert told[1].kind == "UnknownOptionError", told
    others = [told[0], told[2]]
    check(others, "PeerLostError", "rank 1 gave up (UnknownOptionError: ")
    assert all("no_such" in each.message for each in others)


def test_a_port_that_somebody_else_has_is_named() -> None:
    port = unused_port()
    holder = dist2.TCPStore("127.0.0.1", port, is_master=True)
    check(all_told(legacy, ("socket", variables(0, 2, port))), "RendezvousError", "EADDRINUSE")
    holder.close()
