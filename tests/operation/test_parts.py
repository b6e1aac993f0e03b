"""Parts of operations: recorded on request, by scripts in C and by programs of messages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.fake_groups import FakeGroup, info_of
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.operation.parts import Part, PartsLog, parts_log
from dist2.operation.record import Operation

SHM = Tenant("shm", "socket", {"transport": "shm"})
TCP = Tenant("tcp", "socket", {"transport": "tcp"})


@pytest.mark.parametrize(
    ("tenant", "numel", "dtype", "names"),
    [
        (SHM, 2, torch.float32, ["copy", "wait", "reduce"]),
        (SHM, 1 << 20, torch.float32, ["copy", "wait", "reduce"]),
        (SHM, 2, torch.float16, ["copy", "wait", "reduce"]),  # torch folds
        (TCP, 2, torch.float32, ["send", "recv", "reduce"]),
        (TCP, 1 << 20, torch.float32, ["send", "recv", "reduce"]),
        (TCP, 2, torch.float16, ["send", "recv", "reduce"]),
    ],
    ids=str,
)
def test_parts_fill_an_operation_while_they_are_recorded(
    tenant: Tenant, numel: int, dtype: torch.dtype, names: list[str]
) -> None:
    def body(pg: ProcessGroup) -> list[Operation]:
        tensor = torch.zeros(numel, dtype=dtype)
        pg.all_reduce(tensor)  # makes the program
        seen: list[Operation] = []
        remove = pg.register_completion_hook(seen.append)
        if pg.rank() == 0:
            parts_log.record(60)
        pg.barrier()
        pg.all_reduce(tensor)
        pg.barrier()
        if pg.rank() == 0:
            parts_log.stop()
        pg.barrier()
        pg.all_reduce(tensor)
        remove()
        return [each for each in seen if each.signature.kind.value == "all_reduce"]

    for recorded, later in run_ranks(2, body, tenant):
        parts = parts_log.of(recorded)
        assert {*names} <= {part.name for part in parts} <= {*names, "wait", "other"}
        for before, after in pairwise(parts):
            assert before.ended_ns <= after.begun_ns
        assert all(part.begun_ns < part.ended_ns for part in parts)
        assert recorded.created_ns <= parts[0].begun_ns
        assert parts[-1].ended_ns <= recorded.finished_ns
        assert parts_log.of(later) == ()


def test_what_python_does_between_parts_is_told_apart() -> None:
    log = PartsLog()
    operation = FakeGroup(info_of()).run()
    log.record(60)
    try:
        log.take(operation, 10, [("copy", 10, 20)])
        log.take(operation, 25, [("wait", 25, 30), ("reduce", 30, 30)])
        log.take(operation, 50, [("copy", 51, 60)])
    finally:
        log.stop()
    assert log.of(operation) == (
        Part("copy", 10, 20),
        Part("other", 20, 25),
        Part("wait", 25, 30),
        Part("reduce", 30, 50),  # torch folded
        Part("copy", 51, 60),
    )


def test_recording_ends_with_the_first_operation_after_its_time() -> None:
    log = PartsLog()
    operation = FakeGroup(info_of()).run()
    log.record(0.0)
    log.take(operation, 10, [("copy", 10, 20)])
    assert not log.on
