"""Operations in profiles of torch's profiler, without a line for it in the program."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captured_logs import logged
from support.fake_groups import FakeGroup, info_of
from support.ranks import Tenant, run_ranks
from torch.profiler import ProfilerActivity, profile, record_function

from dist2 import ProcessGroup
from dist2.operation.instruments import dispatch
from dist2.operation.profiling import ProfilerRanges, job_of

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


def ranges(profiled: profile, path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the ranges of a profile by name, in the order of their begin."""
    profiled.export_chrome_trace(str(path))
    found: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def test_a_profile_shows_operations_until_they_are_complete(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def body(pg: ProcessGroup) -> None:
        tensor = torch.ones(4)
        pg.all_reduce(tensor, async_op=True).wait()  # the next ones are issued in C, where that is built
        if pg.rank() == 1:
            return other(pg, tensor)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            pg.barrier()
            pg.isend(tensor, 1).wait()
            work = pg.all_reduce(tensor, async_op=True)
            with record_function("compute"):
                torch.ones(8).sum()
            goes_on.set()
            while not work.is_completed():  # no thread waits in it: a thread of the group completes it
                time.sleep(0.001)
            received = pg.irecv(tensor, 1)
            received.wait()
            assert any(isinstance(each, ProfilerRanges) for each in dispatch.instruments)
        pg.barrier()
        shown = ranges(profiled, tmp_path / "step.json")
        (reduced,), (compute,) = shown["dist2:all_reduce"], shown["compute"]
        assert reduced["ts"] < compute["ts"]
        assert reduced["ts"] + reduced["dur"] > compute["ts"] + compute["dur"]
        for name in ("dist2:barrier", "dist2:send", "dist2:recv"):
            (shown_range,) = shown[name]
            assert shown_range["dur"] > 0
            assert "finished" not in shown_range["args"]  # torch says so of a range that was never closed
        return None

    def other(pg: ProcessGroup, tensor: torch.Tensor) -> None:
        pg.barrier()
        pg.recv(tensor, 0)
        goes_on.wait()
        pg.all_reduce(tensor)
        pg.send(tensor, 0)
        pg.barrier()

    run_ranks(2, body, INPROC)
    assert not any(isinstance(each, ProfilerRanges) for each in dispatch.instruments)  # nothing is left


def test_a_trace_has_the_rank_that_readers_of_several_traces_need(tmp_path: Path) -> None:
    world = FakeGroup(info_of(1, 4, name="world"))
    part = FakeGroup(info_of(0, 2, uid="part", name="tp", desc="tensor parallel", global_ranks=(1, 3)))
    for trace in range(2):  # the second one begins before an operation has ended since the first
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            part.run()
            world.run()
        profiled.export_chrome_trace(str(tmp_path / f"{trace}.json"))
        described = json.loads((tmp_path / f"{trace}.json").read_text())["distributedInfo"]
        assert (described["rank"], described["world_size"], described["backend"]) == (1, 4, "socket")
    assert job_of([part.info, world.info])["pg_config"] == [
        {
            "pg_name": "world",
            "pg_desc": "world",
            "backend_config": "socket",
            "pg_size": 4,
            "ranks": [0, 1, 2, 3],
        },
        {
            "pg_name": "tp",
            "pg_desc": "tensor parallel",
            "backend_config": "socket",
            "pg_size": 2,
            "ranks": [1, 3],
        },
    ]


def test_a_range_that_cannot_be_opened_breaks_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("torch.autograd.profiler.record_function", fails)
    group = FakeGroup(info_of())
    with logged() as logs, profile(activities=[ProfilerActivity.CPU]):
        group.run()
        group.run()
    (event,) = logs
    assert "instrument ProfilerRanges raised, and is switched off" in event["event"]
