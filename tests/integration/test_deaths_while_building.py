"""Ranks that are killed while groups are built: the others' errors name rank and group at once."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
import torch.distributed as torch_dist
from support.processes import DIED, ENDS_ARE_TOLD, answers_of, started
from support.stores import torch_server, unused_port
from support.time_limits import in_time

import dist2
from dist2.store import Store

LIMIT_S = 60.0
TOLD_S = 2.0
VICTIM, RANKS = 1, 3
LATE_S = 1.0
KILLED = "was killed by SIGKILL"

Stage = tuple[str, str]
"""A method of stores, and a word in a key: the victim is killed when it calls the method with such a key."""


@attrs.frozen
class End:
    """The end of a rank.

    Attributes:
        pid: Its process.
        at_s: The time.
        kind: Name of the error's type; empty without an error.
        message: The error's text.
        ranks: The lost ranks in the error.
    """

    pid: int
    at_s: float
    kind: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()


def die_at(stage: Stage, pipe: Connection) -> None:
    """Have this process killed as soon as it comes to a stage."""
    method, word = stage
    ordinary = getattr(Store, method)

    def called(self: Store, keys: Any, *arguments: Any) -> Any:
        if word in str(keys):
            pipe.send(End(os.getpid(), time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return ordinary(self, keys, *arguments)

    setattr(Store, method, called)


def take_part(
    pipe: Connection, body: Callable[..., object], place: Any, rank: int, stage: Stage | None
) -> None:
    """Be one rank; say how it ended, and stay."""
    if stage is not None:
        die_at(stage, pipe)
    try:
        kept = body(place, rank)
        end = End(os.getpid(), time.monotonic(), message=repr(kept))
    except (dist2.Dist2Error, RuntimeError) as error:
        at_s = time.monotonic()
        end = End(os.getpid(), at_s, type(error).__name__, str(error), tuple(getattr(error, "ranks", ())))
    pipe.send(end)
    pipe.recv()  # the first rank with an error stays until the others have theirs


def ends(body: Callable[..., object], place: Any, stage: Stage, victim: int = VICTIM) -> list[End]:
    """Call a body as ranks, of which one is killed; return how they ended."""
    each = [(body, place, rank, stage if rank == victim else None) for rank in range(RANKS)]
    with started(take_part, *each) as pipes:
        ended = answers_of(pipes)
    assert DIED not in ended, ended
    return ended


def check(ended: list[End], what: str, how: str = "") -> None:
    """Check that the survivors got an error for the victim's death, in time."""
    victim = ended.pop(VICTIM)
    for each in ended:
        assert (
            f"{what} cannot be built: rank 1 (host {socket.gethostname()}, pid {victim.pid})" in each.message
        ), each
        assert each.message.endswith(how), each
        assert (each.kind, each.ranks) == ("PeerLostError", (VICTIM,)), each
        in_time(each.at_s - victim.at_s, TOLD_S, each)


def build(place: tuple[str, Callable[[], Any]], rank: int) -> object:
    backend, given = place
    pg = dist2.new_group(backend, LIMIT_S, name="model", rank=rank, world_size=RANKS, store=given())
    return pg.shutdown()


def build_parts(place: tuple[str, Callable[[], Any]], rank: int) -> object:
    backend, given = place
    pg = dist2.new_group(backend, LIMIT_S, rank=rank, world_size=RANKS, store=given())
    return pg.split([2, 1, 0], name="part")


@attrs.frozen
class Opens:
    """Opens a store of some kind in a rank."""

    kind: str
    where: Any

    def __call__(self) -> Any:
        match self.kind:
            case "file":
                return dist2.FileStore(self.where, -1)
            case "torch's file":
                return torch_dist.FileStore(self.where, -1)
            case "tcp":
                return dist2.TCPStore("127.0.0.1", self.where, wait_for_workers=False)
            case _:
                return torch_dist.TCPStore("127.0.0.1", self.where, wait_for_workers=False)


@pytest.fixture(params=["file", "torch's file", "tcp", "torch's tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    kind = request.param
    if kind == "tcp":
        server = dist2.TCPStore("127.0.0.1", unused_port(), is_master=True, wait_for_workers=False)
        yield Opens(kind, server.port)
        server.close()
    elif kind == "torch's tcp":
        native = torch_server()
        yield Opens(kind, native.port)
        del native
    else:
        yield Opens(kind, str(tmp_path / "store"))


@pytest.mark.parametrize("word", ["first", "agreed", "go", "card", "built"])
def test_a_death_in_new_group_is_told(store: Opens, word: str) -> None:
    method = {"first": "compare_set", "agreed": "add", "go": "get"}.get(word, "set")
    check(ends(build, ("socket", store), (method, word)), "group 'model'")


def test_a_death_while_gloo_connects_is_told(store: Opens) -> None:
    check(ends(build, ("gloo", store), ("set", "0/1")), "group 'model'")


@pytest.mark.parametrize("word", ["rank/1", "0/1"], ids=["before it registers", "while it connects"])
def test_a_death_while_a_group_of_gloo_is_split_is_told(store: Opens, word: str) -> None:
    check(ends(build_parts, ("gloo", store), ("set", f"#0/building/{word}")), "group 'part'")


def meet(place: str, rank: int) -> object:
    if rank != RANKS - 1:
        return join(place, rank)
    # A server ends with its meeting, unless a client is connected.
    parts = urlsplit(place)
    store = dist2.TCPStore("127.0.0.1", parts.port, wait_for_workers=False) if parts.port else None
    time.sleep(LATE_S)
    return join(place, rank), store


@pytest.fixture(params=["tcp", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"tcp://127.0.0.1:{unused_port()}" if request.param == "tcp" else f"file://{tmp_path / 'store'}"


def test_a_death_while_ranks_meet_is_told(url: str) -> None:
    """One rank registers and dies, while another has yet to come."""
    ended = ends(meet, url, ("wait", "/go"))
    victim = ended.pop(VICTIM)
    for each in ended:
        assert each.kind == "RendezvousError", each
        assert f"{url.split('://')[1]}" in each.message
        assert f"rank 1 (host {socket.gethostname()}, pid {victim.pid})" in each.message, each
        assert "; rank 2 did not arrive" in each.message, "it may have given up waiting for that one"
        in_time(each.at_s - victim.at_s, TOLD_S + LATE_S, each)


def join(place: str, rank: int) -> object:
    return dist2.new_group("socket", LIMIT_S, init_method=place, name="model", rank=rank, world_size=RANKS)


@pytest.mark.parametrize("stage", [("set", "rank/1"), ("add", "agreed"), ("set", "card"), ("set", "built")])
def test_a_death_after_ranks_have_met_is_told(url: str, stage: Stage) -> None:
    """Also the death of a rank that has not registered its process again."""
    check(ends(join, url, stage), "group 'model'", KILLED if ENDS_ARE_TOLD else "")


@pytest.mark.parametrize(
    "stage", [("compare_set", "/go"), ("set", "/1/rank/0"), ("add", "agreed"), ("set", "built")]
)
def test_the_death_of_rank_0_is_told(url: str, stage: Stage) -> None:
    """Its store does not answer any more, if it serves one."""
    ended = ends(join, url, stage, victim=0)
    victim = ended.pop(0)
    for each in ended:
        assert f"rank 0 (host {socket.gethostname()}, pid {victim.pid})" in each.message, each
        assert url.split("/")[-1] in each.message or "group 'model' cannot be built" in each.message, each
        in_time(each.at_s - victim.at_s, TOLD_S, each)
