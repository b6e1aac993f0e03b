"""The NCCL backend: errors for missing parts, and accepted arguments. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dist2
from dist2 import (
    BackendUnavailableError,
    HashStore,
    InvalidUsageError,
    UnknownBackendError,
    UnknownOptionError,
)
from dist2.backends.nccl import library
from dist2.backends.nccl.arithmetic import arithmetic_of, moved
from dist2.backends.nccl.functions import Config
from dist2.backends.nccl.options import NcclOptions
from dist2.backends.registry import composite, single_name
from dist2.operation.kinds import Reduction, premul_sum


class _Communicator:
    def commSplit(self) -> None:  # noqa: N802 - cupy's name
        """Split, as cupy 14 can."""


def cupy_nccl(**changes: Any) -> SimpleNamespace:
    found = {"available": True, "NcclCommunicator": _Communicator, "get_version": lambda: 22809}
    return SimpleNamespace(**{**found, **changes})


def refusal(monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, devices: bool, cupy: Any) -> str:
    """Return why NCCL cannot be used, where things are so."""

    def import_module(name: str) -> Any:
        if isinstance(cupy, ImportError):
            raise cupy
        return cupy

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices)
    monkeypatch.setattr(library, "import_module", import_module)
    with pytest.raises(BackendUnavailableError) as caught:
        library.load()
    return str(caught.value)


def test_five_reasons_have_five_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "build of torch for GPUs": {"cuda": None, "devices": False, "cupy": cupy_nccl()},
        "torch sees none": {"cuda": "13.0", "devices": False, "cupy": cupy_nccl()},
        "pip install 'dist2[nccl]'": {"cuda": "13.0", "devices": True, "cupy": ImportError("no cupy")},
        "pip install nvidia-nccl-cu13": {"cuda": "13.0", "devices": True, "cupy": cupy_nccl(available=False)},
        "needs NCCL 2.18.0 or newer, found 2.17.1": {
            "cuda": "13.0",
            "devices": True,
            "cupy": cupy_nccl(get_version=lambda: 21701),
        },
    }
    texts = [refusal(monkeypatch, **case) for case in cases.values()]
    for part, text in zip(cases, texts, strict=True):
        assert part in text
        assert sum(part in other for other in texts) == 1


def test_a_cupy_that_cannot_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = cupy_nccl(NcclCommunicator=object)
    assert "needs cupy 14" in refusal(monkeypatch, cuda="13.0", devices=True, cupy=old)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_new_group_says_why_it_cannot() -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'nccl' needs a"):
        dist2.new_group("nccl", 5, store=HashStore(), rank=0, world_size=1)


def test_importing_dist2_imports_no_cupy() -> None:
    code = "import sys, dist2, dist2.backends.nccl; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0


def test_options_are_known_by_name() -> None:
    assert NcclOptions.parse({"blocking": True, "transport": "tcp"}).control == {"transport": "tcp"}
    with pytest.raises(UnknownOptionError, match="no option 'chunks'; it has blocking, strict"):
        NcclOptions.parse({"chunks": 1})
    with pytest.raises(InvalidUsageError, match="blocking must be a bool, got 1"):
        NcclOptions.parse({"blocking": 1})


def test_settings_of_communicators() -> None:
    options = NcclOptions.parse({"min_ctas": 2, "net_name": "Socket", "is_high_priority_stream": True})
    assert options.config == {"min_ctas": 2, "net_name": "Socket"}
    assert NcclOptions().config == {}
    for name, value in {"min_ctas": -1, "max_ctas": "4", "split_share": True, "net_name": ""}.items():
        with pytest.raises(InvalidUsageError, match=f"{name} must be .*got {value!r}"):
            NcclOptions.parse({name: value})


def test_a_configuration_as_nccl_reads_it() -> None:
    made = Config.of({"max_ctas": 8, "net_name": "IB"})
    assert (made.size, made.magic, made.version) == (48, 0xCAFEBEEF, 21800)
    assert (made.max_ctas, made.net_name) == (8, b"IB")
    undefined = {made.blocking, made.cga_cluster_size, made.min_ctas, made.split_share, made.traffic_class}
    assert undefined == {-(2**31)}


def test_names_of_several_devices() -> None:
    assert single_name("nccl") == "nccl"
    assert single_name("cpu:socket,cuda:nccl") == single_name("cuda:nccl, cpu:socket") == "nccl"
    assert single_name("cpu:socket") == "socket"
    assert composite({"cpu": "gloo", "cuda": "nccl"}) is None
    for wrong in ("cpu:gloo,cuda:nccl", "cpu:socket,cpu:socket,cuda:nccl", "cuda:"):
        with pytest.raises(UnknownBackendError, match="'cpu:socket,cuda:nccl'"):
            single_name(wrong)


def test_reductions_in_terms_of_nccl() -> None:
    total = Reduction.of(torch.distributed.ReduceOp.SUM)
    assert arithmetic_of(torch.bfloat16, total, "reduce").code == 9
    assert arithmetic_of(torch.int16, total, "reduce").converts
    boolean = arithmetic_of(torch.bool, total, "reduce")
    assert (boolean.code, boolean.op) == (1, 2)
    assert arithmetic_of(torch.complex64, premul_sum(0.5), "reduce").factor == b"\x00\x00\x00\x3f"
    with pytest.raises(InvalidUsageError, match=r"op=band is not possible on torch\.int32"):
        arithmetic_of(torch.int32, Reduction.of(torch.distributed.ReduceOp.BAND), "all_reduce")
    assert (moved(24), moved(7)) == ((3, 4), (7, 1))
