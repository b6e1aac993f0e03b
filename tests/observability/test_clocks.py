"""Ranks whose clocks differ: real processes in a time namespace of their own, as on two hosts."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import answers_of, started

import dist2
import observability
from observability.clocks import Offset
from observability.group_stragglers import clocks_of

AHEAD_S = 5_000
"""The clocks of rank 1 are ahead by so much: the monotonic one in the kernel,"""
WALL_AHEAD_S = 7_200
"""and that of the date, of which a kernel has one only, in its Python."""
STEPS = 8
LATE_S = 0.05
WITHIN_S = 1.0
"""No request of this machine takes twice as long."""

_CLONE_NEWTIME, _CLONE_NEWPID = 0x80, 0x20000000
_PR_SET_PDEATHSIG = 1


def enter_another_host() -> None:
    """Go on in a child process with another monotonic clock, and with process numbers of its own.

    Raises:
        OSError: The machine does not let this user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWTIME | _CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {AHEAD_S} 0\n")
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    now_ns = time.time_ns
    time.time_ns = lambda: now_ns() + WALL_AHEAD_S * 10**9


def be_rank(pipe: Connection, rank: int, path: Path) -> None:
    """Call some collectives, rank 1 late, and stay to be asked."""
    if rank == 1:
        try:
            enter_another_host()
        except OSError as error:
            pipe.send(error)
            return
        pipe.send(None)
    store = dist2.FileStore(str(path), 2)
    with (
        dist2.new_group("socket", 30, store=store, rank=rank, world_size=2, name="training") as pg,
        observability.start(pg, announce=False) as server,
    ):
        for _ in range(STEPS):
            time.sleep(rank * LATE_S)
            pg.all_reduce(torch.ones(1000))
        by_group = clocks_of(pg)[1].at(time.monotonic_ns())
        pipe.send((server.url, server.token, by_group))
        pipe.recv()


def ask(plane: tuple[str, str, Offset], path: str) -> Any:
    return json.loads(observability.fetch(plane[0] + path, plane[1], timeout_s=20))


def reductions(trace: Any, rank: int) -> list[tuple[float, float]]:
    """Return begin and end of the collectives of a rank in seconds."""
    return [
        (each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
        for each in trace["traceEvents"]
        if each["ph"] == "X" and each["pid"] == rank and each["name"] == "all_reduce"
    ]


def test_offsets_are_told_and_corrected_between_ranks_whose_clocks_differ(tmp_path: Path) -> None:
    with started(be_rank, *[(rank, tmp_path / "store") for rank in range(2)]) as pipes:
        refused = pipes[1].recv()
        if refused is not None:
            pytest.skip(f"time namespaces cannot be made here: {refused}")
        planes = answers_of(pipes)
        jobs = [ask(plane, "/job")["ranks"] for plane in planes]
        trace = ask(planes[0], "/trace?seconds=60")
        clocks = ask(planes[0], "/stragglers")["clocks"]
    # /job tells the offset of the clock of the date: by which logs are compared, and its own at_s.
    for asked, rows in enumerate(jobs):
        own, other = rows[asked], rows[1 - asked]
        assert (own["clock_offset_s"], own["clock_error_s"]) == (0, 0)
        assert 0 < other["clock_error_s"] < WITHIN_S
        ahead_s = WALL_AHEAD_S if asked == 0 else -WALL_AHEAD_S
        assert abs(other["clock_offset_s"] - ahead_s) <= other["clock_error_s"] + 1e-3
    # Traces and stragglers need that of the monotonic clock.
    corrections = {each["rank"]: each for each in trace["otherData"]["ranks"]}
    error_s = corrections[1]["clock_error_ns"] / 1e9
    assert 0 < error_s < WITHIN_S
    assert abs(corrections[1]["clock_offset_ns"] / 1e9 + AHEAD_S) <= error_s
    assert abs(clocks["1"]["offset_s"] + AHEAD_S) <= clocks["1"]["error_s"]
    by_group = planes[0][2]
    assert 0 < by_group.error_ns < WITHIN_S * 1e9
    assert abs(by_group.offset_ns / 1e9 + AHEAD_S) <= by_group.error_ns / 1e9
    assert planes[1][2] == Offset(0, 0), "its own"
    early, late = reductions(trace, 0), reductions(trace, 1)
    assert len(early) == len(late) == STEPS
    later_s = [late_begun_s - begun_s for (begun_s, _), (late_begun_s, _) in zip(early, late, strict=True)]
    assert statistics.median(later_s) > LATE_S / 2 - error_s  # in a single one rank 0 may have lost the core
    for (begun_s, ended_s), (late_begun_s, late_ended_s) in zip(early, late, strict=True):
        assert late_begun_s - error_s < ended_s, "no rank leaves before all have entered"
        assert begun_s - error_s < late_ended_s
