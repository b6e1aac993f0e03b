"""Many groups at once: they work, and closing them gives everything back."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import torch
from support.processes import run_processes

from dist2 import ProcessGroup

GROUPS = 200


def held() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def memory_in_use(pg: ProcessGroup) -> int:
    """Return the bytes that this process's arena takes of memory."""
    return os.fstat(pg.backend._node._shared._arena.fd).st_blocks * 512  # type: ignore[attr-defined]  # the socket backend's


def use_and_close(pg: ProcessGroup, ranks: list[int]) -> None:
    group = pg.split(ranks)
    assert group is not None
    group.barrier()
    group.shutdown()


def open_many(pg: ProcessGroup) -> tuple[int, int, int]:
    everyone = list(range(pg.size()))
    use_and_close(pg, everyone)
    before, memory = held(), memory_in_use(pg)
    groups = [pg.split(everyone if count % 2 else everyone[::-1]) for count in range(GROUPS)]
    idle = memory_in_use(pg) - memory
    for count, group in enumerate(groups):
        assert group is not None
        tensor = torch.full((3,), float(count))
        group.all_reduce(tensor)
        assert tensor.tolist() == [count * pg.size()] * 3
    assert held() == before  # groups share descriptors, and synchronous calls need no threads
    used = memory_in_use(pg) - memory
    pg.barrier()
    for group in groups:
        assert group is not None
        group.shutdown()
    groups.clear()
    gc.collect()
    assert held() == before
    for _ in range(3):  # memory that other ranks were last to leave is taken back with the next groups
        pg.barrier()
        use_and_close(pg, everyone)
    return idle // GROUPS, used // GROUPS, memory_in_use(pg) - memory


def outlive(pg: ProcessGroup) -> bool:
    """Use and close a group; return whether it or its backend still exists without references."""
    gc.disable()
    try:
        group = pg.split(list(range(pg.size())))
        assert group is not None
        group.all_reduce(torch.ones(2))
        group.all_reduce(torch.ones(1 << 18))  # exposes memory
        group.broadcast(torch.ones(2), 0, async_op=True).wait()
        group.barrier()
        group.shutdown()
        left = weakref.ref(group), weakref.ref(group.backend)
        del group
        return any(each() is not None for each in left)
    finally:
        gc.enable()
        pg.barrier()


def test_a_closed_group_goes_without_the_garbage_collector(tmp_path: Path) -> None:
    assert run_processes(2, outlive, tmp_path) == [False, False]


def test_many_groups_work_and_give_everything_back(tmp_path: Path) -> None:
    for idle, used, left in run_processes(3, open_many, tmp_path):
        assert idle <= 4096
        assert used <= 4 * 4096
        # A page for every stretch of the directory, and the last few groups until others have left them too.
        assert left <= (64 + 8 * 4) * 4096
