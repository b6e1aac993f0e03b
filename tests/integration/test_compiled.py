"""Groups in which some ranks run the parts in C and others their counterparts in Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import run_processes

import dist2
from dist2 import MismatchError, ProcessGroup, compiled
from dist2.operation.kinds import AVG, MAX

pytestmark = pytest.mark.skipif(compiled.steps is None, reason="dist2 was built without its parts in C")

LENGTHS = (3, 3 * 4096, 3 * (1 << 18))
"""Elements: in slots; lent to others, by way of the kernel; lent by many system calls."""


def mixed(pg: ProcessGroup) -> ProcessGroup:
    """Return a group of the same ranks in which the odd ones have nothing in C."""
    kept = compiled.steps
    if pg.rank() % 2:
        compiled.steps = None
    try:
        group = pg.split(range(pg.size()))
        assert group is not None
        for numel in LENGTHS:  # programs are made at the first call
            every_collective(group, numel)
    finally:
        compiled.steps = kept
    return group


def every_collective(pg: ProcessGroup, numel: int) -> None:
    """Run all collectives on vectors of one length, and check each result."""
    rank, size = pg.rank(), pg.size()
    part = numel // size
    for reduction, expected in ((dist2.operation.kinds.SUM, 6.0), (MAX, 3.0), (AVG, 2.0)):
        vector = torch.full((numel,), rank + 1.0)
        pg.all_reduce(vector, reduction)
        assert bool((vector == expected).all()), (reduction, numel)
        vector = torch.full((numel,), rank + 1.0)
        pg.reduce(vector, 1, reduction)
        assert rank != 1 or bool((vector == expected).all()), (reduction, numel)
        piece = torch.empty(part)
        pg.reduce_scatter_single(piece, torch.full((numel,), rank + 1.0), reduction)
        assert bool((piece == expected).all()), (reduction, numel)
    vector = torch.full((numel,), float(rank))
    pg.broadcast(vector, 2)
    assert bool((vector == 2).all())
    ramp = torch.arange(size).repeat_interleave(part).float()
    whole = torch.empty(size * part)
    pg.all_gather_single(whole, torch.full((part,), float(rank)))
    assert torch.equal(whole, ramp)
    pg.all_to_all_single(whole, torch.full((size * part,), float(rank)))
    assert torch.equal(whole, ramp)
    pg.scatter(piece, list(ramp.split(part)) if rank == 0 else None, 0)
    assert bool((piece == rank).all())
    gathered = [torch.empty(part) for _ in range(size)] if rank == 0 else []
    pg.gather(gathered, torch.full((part,), float(rank)), root=0)
    assert rank != 0 or torch.equal(torch.cat(gathered), ramp)
    pg.barrier()


def work_together(pg: ProcessGroup) -> str:
    torch.set_num_threads(1)
    group = mixed(pg)
    for _ in range(20):
        for numel in LENGTHS[:2]:
            every_collective(group, numel)
    try:
        group.all_reduce(torch.ones(2 + pg.rank() // 2))
    except MismatchError as error:
        return str(error)
    return "no mismatch"


def test_ranks_with_and_without_c_work_together(tmp_path: Path) -> None:
    for told in run_processes(3, work_together, tmp_path):
        assert "float32[2]" in told, told
        assert "float32[3]" in told, told
