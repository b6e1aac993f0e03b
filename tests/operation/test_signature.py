"""Signatures, fingerprints and records."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed import ReduceOp, _make_nccl_premul_sum

from dist2 import InvalidUsageError, premul_sum
from dist2.operation.kinds import AVG, MAX, SUM, OpKind, ReduceKind, Reduction
from dist2.operation.record import Operation, State
from dist2.operation.signature import GroupInfo, Signature, TensorMeta

INFO = GroupInfo("uid", "group", "", "socket", 0, (0, 1))


def signature(kind: OpKind = OpKind.ALL_REDUCE, **changes: object) -> Signature:
    meta = TensorMeta((4, 2), torch.float32)
    fields: dict[str, object] = {"inputs": (meta,), "outputs": (meta,), "reduction": SUM} | changes
    return Signature(kind, INFO, **fields)


def test_what_must_agree_changes_the_fingerprint() -> None:
    base = signature()
    halves = (TensorMeta((4, 2), torch.float16),)
    longer = (TensorMeta((4, 3), torch.float32),)
    others = [
        signature(reduction=MAX),
        signature(inputs=halves),
        signature(inputs=longer),
        signature(kind=OpKind.BROADCAST, root=0, reduction=None),
        signature(kind=OpKind.BROADCAST, root=1, reduction=None),
        signature(kind=OpKind.REDUCE, root=1),
        signature(reduction=premul_sum(2.0)),
        signature(reduction=premul_sum(3.0)),
    ]
    prints = [base.fingerprint, *(other.fingerprint for other in others)]
    assert len(set(prints)) == len(prints)


def test_what_may_differ_does_not() -> None:
    flat = (TensorMeta((8,), torch.float32),)
    assert signature().fingerprint == signature(inputs=flat, outputs=flat).fingerprint
    longer = (TensorMeta((9,), torch.float32),)
    kind = OpKind.ALL_TO_ALL_SINGLE
    assert signature(kind=kind).fingerprint == signature(kind=kind, inputs=longer).fingerprint
    # Only the root of a scatter brings inputs.
    bare = signature(kind=OpKind.SCATTER, inputs=(), root=0, reduction=None)
    root = signature(kind=OpKind.SCATTER, root=0, reduction=None)
    assert bare.fingerprint == root.fingerprint


def test_fingerprints_do_not_depend_on_the_process() -> None:
    code = (
        "import torch; from dist2.operation.signature import *; from dist2.operation.kinds import *;"
        "m = (TensorMeta((4, 2), torch.float32),); i = GroupInfo('u', 'g', '', 's', 0, (0, 1));"
        "print(Signature(OpKind.ALL_REDUCE, i, inputs=m, outputs=m, reduction=SUM).fingerprint)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50
    ).stdout
    assert int(printed) == signature().fingerprint


def test_reductions_are_one_object_each() -> None:
    assert Reduction.of(ReduceOp.SUM) is SUM
    assert Reduction.of(ReduceOp(ReduceOp.AVG)) is AVG
    assert Reduction.of(MAX) is MAX
    assert premul_sum(2) is premul_sum(torch.tensor(2.0))
    torchs = Reduction.of(_make_nccl_premul_sum(0.5))
    assert (torchs.kind, torchs.factor) == (ReduceKind.PREMUL_SUM, 0.5)
    assert torchs is premul_sum(0.5)


@pytest.mark.parametrize("op", ["sum", None, 0, torch.add])
def test_what_is_no_reduction_is_named(op: object) -> None:
    with pytest.raises(InvalidUsageError, match=r"op must be a ReduceOp, got"):
        Reduction.of(op)


@pytest.mark.parametrize("factor", ["two", None, torch.ones(2), 10**400])
def test_what_is_no_factor_is_named(factor: object) -> None:
    with pytest.raises(InvalidUsageError, match="factor must be a number or a tensor of one element"):
        premul_sum(factor)


def test_a_record_tells_its_state_and_where_it_was_called() -> None:
    operation = Operation(signature(), 7, 100, 2_000_000_100, False)
    assert operation.state is State.SCHEDULED
    operation.started_ns = 150
    assert operation.state is State.STARTED
    operation.finished_ns = 300
    assert operation.state is State.COMPLETED
    operation.error = ValueError("x")
    assert operation.state is State.FAILED
    assert operation.timeout_s == 2.0
    assert operation.describe() == "all_reduce(float32[4, 2], op=sum) #7"
    assert repr(operation) == "<Operation all_reduce(float32[4, 2], op=sum) #7, failed>"
    frame = sys._getframe()
    operation.code, operation.instruction = frame.f_code, frame.f_lasti
    line = operation.line
    assert operation.describe().endswith(f"#7 at {__file__}:{line}")
    assert abs(line - frame.f_lineno) <= 4


def test_sizes() -> None:
    meta = TensorMeta.of(torch.zeros(3, 4, dtype=torch.bfloat16))
    assert (meta.numel, meta.nbytes, str(meta)) == (12, 24, "bfloat16[3, 4]")
    gather = signature(kind=OpKind.ALL_GATHER, outputs=(TensorMeta((4, 2), torch.float32),) * 2)
    assert gather.nbytes == 64
