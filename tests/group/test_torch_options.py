"""torch's ``pg_options`` objects: fields that dist2's backends have too, and a warning for the others."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import dist2.legacy
from dist2 import HashStore
from dist2.group.torch_options import TORCHS_OPTIONS, from_torch
from dist2.legacy.lifecycle import options_of

Gloo: Any = dist.ProcessGroupGloo
UNDEFINED = -(2**31)


class NcclOptions:
    """The fields of torch's options for NCCL, which a build for CPUs lacks."""

    def __init__(self) -> None:
        self.backend, self._timeout, self.is_high_priority_stream = "nccl", timedelta(minutes=10), False
        self.split_from, self.split_color = None, -2
        self.config = SimpleNamespace(
            min_ctas=UNDEFINED, max_ctas=UNDEFINED, net_name=None, cta_policy=UNDEFINED, unsafe_get_ptr=print
        )


def nccl_options() -> Any:
    """Return torch's own where there are some."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    return NcclOptions() if nccl is None else nccl.Options()


@pytest.mark.parametrize("make", [Gloo._Options, nccl_options, lambda: TORCHS_OPTIONS("nccl")])
def test_a_new_object_says_nothing(make: Any) -> None:
    assert from_torch(make(), "nccl") == from_torch(make(), "socket") == {}


def test_fields_of_nccl_are_options_of_nccl() -> None:
    options = nccl_options()
    options.is_high_priority_stream = True
    options.config.min_ctas, options.config.net_name = 4, "Socket"
    asked = {"is_high_priority_stream": True, "min_ctas": 4, "net_name": "Socket"}
    assert from_torch(options, "nccl") == asked
    with pytest.warns(
        UserWarning,
        match=r"is_high_priority_stream=True, config.min_ctas=4, config.net_name='Socket' have no effect on "
        r"backend 'socket'",
    ):
        assert from_torch(options, "socket") == {}


def test_other_fields_are_told() -> None:
    options = nccl_options()
    options._timeout = timedelta(seconds=3)
    options.config.min_ctas = 2
    with pytest.warns(
        UserWarning, match=r"^pg_options: _timeout=.* has no effect on backend .nccl.*`timeout`"
    ):
        assert from_torch(options, "nccl") == {"min_ctas": 2}


def test_a_program_hears_of_fields_without_effect() -> None:
    options = Gloo._Options()
    options._threads = 5
    with pytest.warns(UserWarning, match="_threads=5 has no effect on backend 'gloo'") as said:
        dist2.legacy.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, pg_options=options)
    assert said[0].filename == __file__
    dist2.legacy.destroy_process_group()


def test_backends_that_torch_has_entered_itself_take_torchs_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend._plugins, "GLOO", None)  # as torch 2.14 does at the first use
    assert options_of(Gloo._Options(), "gloo") == {}
