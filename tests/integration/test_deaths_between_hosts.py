"""Two hosts of two ranks each: a rank that is killed in an operation is named on both."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from support.processes import DIED, caught, run_processes
from support.time_limits import in_time

import dist2
from dist2 import PeerLostError, ProcessGroup
from dist2.backends.socket.traffic import Receive, Send
from dist2.backends.socket.transport.node import Node
from dist2.runtime.config import Config

NUMEL = 3_000_000
"""Elements of a vector that goes in several messages."""
BESIDE = 2
WITHIN_S = 2.0
PHASES = {
    "before a fence": (Receive, "do", 1),
    "as it starts messages": (Send, "do", 1),
}


def die_at(owner: object, name: str, turn: int) -> None:
    """Have this process killed when it has called something so many times."""
    original: Callable[..., object] = getattr(owner, name)
    left = turn

    def fatal(*arguments: object) -> object:
        nonlocal left
        left -= 1
        found = original(*arguments)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, fatal)


def on_hosts(pg: ProcessGroup, store: dist2.FileStore) -> tuple[Node, ProcessGroup]:
    """Return a group of the same ranks on hosts of two each, and the node that it is on."""
    rank = pg.rank()
    node = Node(config=attrs.evolve(Config.from_environment(), host_id=f"host{rank // BESIDE}"))
    return node, dist2.new_group("socket", 20, store=store, rank=rank, world_size=pg.size(), node=node)


def lose_one(pg: ProcessGroup, path: str, dies: int, phase: str, exchanges: bool) -> tuple[int, ...]:
    """Sum or exchange on two hosts of two ranks each, and be killed or return the lost ranks."""
    rank = pg.rank()
    store = dist2.FileStore(path, pg.size())
    node, hosts = on_hosts(pg, store)
    try:
        mine, given = torch.ones(NUMEL), torch.full((NUMEL,), float(pg.size()))

        def call() -> object:
            return hosts.all_to_all_single(mine, given) if exchanges else hosts.all_reduce(mine)

        call()
        assert mine.eq(pg.size()).all()
        if rank == dies:
            die_at(*PHASES[phase])
        error, took_s = caught(PeerLostError, call)
        mine.zero_()
        # A rank that aborts before all have the error of the death would be named in place of the dead one.
        store.set(f"told {rank}", "yes")
        store.wait([f"told {each}" for each in range(pg.size()) if each != dies])
        assert not mine.any(), "written to after the call had failed"
        in_time(took_s, WITHIN_S)
        return error.ranks
    finally:
        hosts.abort()
        node.close()


@pytest.mark.parametrize(("dies", "phase"), [(0, "before a fence"), (3, "as it starts messages")])
def test_who_is_killed_in_a_sum_is_named_on_both_hosts(dies: int, phase: str, tmp_path: Path) -> None:
    found = run_processes(4, lose_one, tmp_path, str(tmp_path / "hosts"), dies, phase, False)
    assert found == [DIED if rank == dies else (dies,) for rank in range(4)]


@pytest.mark.parametrize(("dies", "phase"), [(0, "as it starts messages")])
def test_who_is_killed_in_an_exchange_is_named_on_both_hosts(dies: int, phase: str, tmp_path: Path) -> None:
    found = run_processes(4, lose_one, tmp_path, str(tmp_path / "hosts"), dies, phase, True)
    assert found == [DIED if rank == dies else (dies,) for rank in range(4)]
