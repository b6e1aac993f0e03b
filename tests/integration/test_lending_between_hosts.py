"""Two hosts whose ranks reach into each other's tensors: anywhere, and when one is killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from support.processes import DIED, caught, run_processes
from support.time_limits import in_time

import dist2
from dist2 import PeerLostError, ProcessGroup
from dist2.backends.socket import crossing
from dist2.backends.socket.borrowing import Borrowed, Borrowing
from dist2.backends.socket.bound_steps import Bound
from dist2.backends.socket.journey import Local
from dist2.backends.socket.passing import Passing
from dist2.backends.socket.transport.boards import recall
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.backends.socket.transport.messages.ways import ShortWays
from dist2.backends.socket.transport.node import Node
from dist2.runtime.config import Config

NUMEL = 3_000_000
"""Elements of a vector that is lent, and goes in several messages."""
EXCHANGED = 1_600_000
"""Elements of one whose parts go in several messages each."""
NEW = 200_000
"""Elements of tensors of which each call has others."""
BESIDE = 2
WITHIN_S = 2.0


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


def come_late() -> None:
    """Have this process begin its next script when another of its host has given up, and look for the reason.

    As long as its script has the links for itself, it would look in vain.
    """
    recall.HEAR_S = 3 * WITHIN_S
    borrow, opening = Borrowing.borrow, Rails.open
    gave_up: list[Callable[[], list[int]]] = []

    def noting(self: Borrowing, wanted: Sequence[tuple[int, int]]) -> list[Borrowed]:
        gave_up[:] = [self.recall.gave_up]
        return borrow(self, wanted)

    def late(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        opened = opening(self, seq, early)
        while opened and not gave_up[0]():
            time.sleep(0.001)
        return opened

    Borrowing.borrow, Rails.open = noting, late  # type: ignore[method-assign]  # in place of the method


PHASES = {
    "lent": (Borrowing, "borrow", 1),
    "in a script": (Rails, "open", 1),
    "before one of them looks": (Rails, "open", 1),
    "folding": (crossing.Work, "run", 2),
    "sending": (Passing, "start", 2),
}
IN_SCRIPTS = ("in a script", "before one of them looks")
BY_STAGES = ("folding", "sending")
"""Those of programs that run stage by stage."""


def on_hosts(pg: ProcessGroup, store: dist2.FileStore) -> tuple[Node, ProcessGroup]:
    """Return a group of the same ranks on hosts of two each, and the node that it is on."""
    rank = pg.rank()
    node = Node(config=attrs.evolve(Config.from_environment(), host_id=f"host{rank // BESIDE}"))
    return node, dist2.new_group("socket", 20, store=store, rank=rank, world_size=pg.size(), node=node)


def call_on_new_tensors(pg: ProcessGroup, path: str) -> list[int]:
    """Call operations on tensors that no call had; return how often local work was worked out each time."""
    torch.set_num_threads(1)  # with more of them torch folds, by addresses
    steps, worked_out, found = crossing.Binder._steps, [0], []

    def counting(self: crossing.Binder, work: Local) -> Sequence[Bound]:
        worked_out[0] += 1
        return steps(self, work)

    crossing.Binder._steps = counting  # type: ignore[method-assign]  # in place of the method
    node, hosts = on_hosts(pg, dist2.FileStore(path, pg.size()))
    me, ranks = pg.rank(), range(pg.size())
    kept: list[torch.Tensor] = []  # so that nothing lies where something else did
    try:
        for turn in range(2 * crossing.MAX_KEPT):
            before, shared = worked_out[0], turn % 4 > 1
            for numel in (NEW, 3 * NEW):
                everyone = [torch.arange(numel, dtype=torch.int32) + 7 * rank + turn for rank in ranks]
                mine, parts = new(everyone[me], shared), new(torch.zeros(numel, dtype=torch.int32), shared)
                hosts.all_to_all_single(parts, mine)
                assert torch.equal(parts, torch.cat([each.tensor_split(len(ranks))[me] for each in everyone]))
                hosts.all_reduce(mine)
                assert torch.equal(mine, sum(everyone))
                kept += [mine, parts]
            found.append(worked_out[0] - before)
            halves = new(everyone[me].remainder(16).bfloat16(), shared)  # Python has them folded
            hosts.all_reduce(halves)
            assert torch.equal(halves, sum(each.remainder(16).bfloat16() for each in everyone))
            kept.append(halves)
        return found
    finally:
        hosts.abort()
        node.close()


def new(values: torch.Tensor, shared: bool) -> torch.Tensor:
    return dist2.shared_empty(values.numel(), dtype=values.dtype).copy_(values) if shared else values.clone()


def test_what_to_do_is_worked_out_once_for_tensors_anywhere(tmp_path: Path) -> None:
    for found in run_processes(4, call_on_new_tensors, tmp_path, str(tmp_path / "hosts")):
        assert found[0]
        assert not any(found[-8:])


def lose_one(pg: ProcessGroup, path: str, dies: int, phase: str, exchanges: bool) -> tuple[int, ...]:
    """Sum or exchange on two hosts of two ranks each, and be killed or return the lost ranks."""
    rank = pg.rank()
    if phase in BY_STAGES:
        ShortWays.rails = lambda self, fingerprint: None  # type: ignore[method-assign, assignment, return-value]  # as without C
    store = dist2.FileStore(path, pg.size())
    node, hosts = on_hosts(pg, store)
    try:
        numel = EXCHANGED if exchanges else NUMEL
        mine, given = torch.ones(numel), torch.full((numel,), float(pg.size()))

        def call() -> object:
            return hosts.all_to_all_single(mine, given) if exchanges else hosts.all_reduce(mine)

        call()
        assert mine.eq(pg.size()).all()
        if rank == dies:
            die_at(*PHASES[phase])
        elif rank == 0 and phase == "before one of them looks":
            come_late()
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


@pytest.mark.parametrize(
    ("dies", "phase"),
    [
        (0, "lent"),
        (3, "folding"),
        (0, "sending"),
        (2, "in a script"),
        (2, "before one of them looks"),
    ],
)
def test_who_is_killed_while_it_lends_is_named_on_both_hosts(dies: int, phase: str, tmp_path: Path) -> None:
    found = run_processes(4, lose_one, tmp_path, str(tmp_path / "hosts"), dies, phase, False)
    assert found == [DIED if rank == dies else (dies,) for rank in range(4)]


@pytest.mark.parametrize(("dies", "phase"), [(0, "lent"), (3, "sending"), (2, "in a script")])
def test_who_is_killed_in_an_exchange_is_named_on_both_hosts(dies: int, phase: str, tmp_path: Path) -> None:
    found = run_processes(4, lose_one, tmp_path, str(tmp_path / "hosts"), dies, phase, True)
    assert found == [DIED if rank == dies else (dies,) for rank in range(4)]
