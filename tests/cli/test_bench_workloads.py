"""The benchmark's own checks: right results pass, a single wrong element does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist2.cli.bench.measuring import Measurement, compare
from dist2.cli.bench.workloads import (
    BARRIER,
    LIST_OPERATIONS,
    OPERATIONS,
    ROOT,
    SEND_RECV,
    Case,
    Workload,
    WrongResultError,
)

RANKS = 3
MOVING = [op for op in (*OPERATIONS, *LIST_OPERATIONS) if op != BARRIER]


def outputs(op: str, inputs: list[Tensor]) -> list[Tensor | None]:
    """Return the result of an operation on each rank, by its definition; None where it gives nothing."""
    total, ranks = torch.stack(inputs).sum(0), range(len(inputs))
    parts = [list(each.chunk(len(inputs))) for each in inputs]
    if op == "all_reduce":
        return [total for _ in ranks]
    if op == "reduce":
        return [total, None, None]
    if op == "broadcast":
        return [inputs[ROOT] for _ in ranks]
    if op == SEND_RECV:
        return [inputs[ROOT], inputs[ROOT], None]
    if op == "gather":
        return [torch.cat(inputs), None, None]
    if op == "scatter":
        return list(parts[ROOT])
    if op.startswith("all_gather"):
        return [torch.cat(inputs) for _ in ranks]
    if op.startswith("reduce_scatter"):
        return list(total.chunk(len(inputs)))
    return [torch.cat([each[rank] for each in parts]) for rank in ranks]


def filled(op: str, numel: int) -> list[tuple[Workload, Tensor | None]]:
    works = [Workload(Case(op, 4 * numel), rank, RANKS) for rank in range(RANKS)]
    for work in works:
        work.fill()
    return list(zip(works, outputs(op, [work.input.clone() for work in works]), strict=True))


@pytest.mark.parametrize("numel", [3, 3000, 3 * (1 << 20) + 3])
@pytest.mark.parametrize("op", MOVING)
def test_right_results_pass(op: str, numel: int) -> None:
    for work, right in filled(op, numel):
        if right is not None:
            work.output.copy_(right)
        work.check()


@pytest.mark.parametrize("op", MOVING)
def test_one_wrong_element_does_not(op: str) -> None:
    for work, right in filled(op, 3000):
        if right is not None:
            work.output.copy_(right)
            work.output[work.output.numel() // 2] += 1
            with pytest.raises(WrongResultError, match=f"{op} of 12000 bytes at rank {work.rank}: 1 of"):
                work.check()


def test_an_operation_that_does_nothing_is_seen() -> None:
    for work, right in filled("all_gather_single", 3000):
        assert right is not None
        with pytest.raises(WrongResultError):
            work.check()


@pytest.mark.parametrize(
    ("op", "factor"), [("all_reduce", 1.5), ("all_gather_single", 0.75), ("broadcast", 1), (SEND_RECV, 1)]
)
def test_bandwidths_count_what_must_be_moved(op: str, factor: float) -> None:
    case = Case(op, 1000)
    found = [Measurement(case, "dist2", (3e-6, 1e-6, 2e-6)), Measurement(case, "peer", (8e-6, 8e-6))]
    (compared,) = compare(found, "dist2", 4)
    assert compared.algorithm_bandwidth("dist2") == pytest.approx(5e8)
    assert compared.bus_bandwidth("dist2") == pytest.approx(5e8 * factor)
    assert compared.ratio("peer") == pytest.approx(4)


def test_a_failure_has_no_figures() -> None:
    case = Case("all_reduce", 1000)
    found = [Measurement(case, "dist2", (1e-6,)), Measurement(case, "peer", failure="gone")]
    (compared,) = compare(found, "dist2", 4)
    assert compared.ratio("peer") is compared.bus_bandwidth("peer") is None
