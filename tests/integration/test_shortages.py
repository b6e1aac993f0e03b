"""A rank without free descriptors: it is told so, no rank is lost, and it works again once some are free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import caught, hear, run_processes, tell
from support.scarcity import no_descriptors
from support.time_limits import in_time

from dist2 import GroupRevokedError, ProcessGroup, ResourceError

SHORT = 0
"""The rank without descriptors."""


def _message(pg: ProcessGroup) -> str:
    """Send and receive without descriptors for links; then with some."""
    peer = 1 - pg.rank()
    if pg.rank() == SHORT:
        with no_descriptors():
            error, took_s = caught(ResourceError, lambda: pg.send(torch.ones(1), peer))
            in_time(took_s, 1.0)
            assert error.group_usable
            error, took_s = caught(ResourceError, lambda: pg.recv(torch.ones(1), peer))
            in_time(took_s, 1.0)
            tell(pg, "was short")
    got = torch.zeros(1)
    if pg.rank() == SHORT:
        pg.send(torch.full((1,), 7.0), peer)
        pg.recv(got, peer)
        text = str(error)
    else:
        pg.recv(got, peer)  # from before the shortage on
        pg.send(torch.full((1,), 7.0), peer)
        text = ""
    assert got.item() == 7.0
    assert pg.agree().failed == ()
    pg.barrier()
    return text


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_of_a_rank_without_descriptors_lose_nobody(transport: str, tmp_path: Path) -> None:
    text, _ = run_processes(2, _message, tmp_path, transport=transport)
    assert "rank 1 cannot be reached from this process: a connection failed: Too many open files" in text
    assert "ulimit -n" in text


def _agreement(pg: ProcessGroup) -> tuple[int, tuple[int, ...]]:
    """Begin to agree without descriptors; get the answer once there are some."""
    flags = 0b01 if pg.rank() == SHORT else 0b11
    if pg.rank() == SHORT:
        with no_descriptors():
            error, _ = caught(ResourceError, lambda: pg.agree(flags, timeout=0.5))
            assert "Too many open files" in str(error)
    answer = pg.agree(flags)
    return answer.flags, answer.failed


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_agree_once_one_of_them_has_descriptors_again(transport: str, tmp_path: Path) -> None:
    assert run_processes(3, _agreement, tmp_path, transport=transport) == [(1, ())] * 3


def _collective(pg: ProcessGroup) -> str:
    """Fail in a collective: all get an error that says why, and continue together."""
    if pg.rank() == SHORT:
        with no_descriptors():
            error, took_s = caught(ResourceError, lambda: pg.all_reduce(torch.ones(4)))
        in_time(took_s, 1.0)
        assert not error.group_usable
    else:
        hear(pg, "has failed")
        error, took_s = caught(GroupRevokedError, lambda: pg.all_reduce(torch.ones(4)))
        in_time(took_s, 2.0)
        assert error.by == SHORT
    if pg.rank() == SHORT:
        tell(pg, "has failed")
    left = pg.shrink()
    assert left.size() == pg.size()
    total = torch.ones(1)
    left.all_reduce(total)
    assert total.item() == pg.size()
    left.shutdown()
    return str(error)


def test_a_collective_that_lacks_descriptors_fails_on_all_and_loses_nobody(tmp_path: Path) -> None:
    for text in run_processes(3, _collective, tmp_path, transport="tcp"):
        assert "Too many open files" in text
