"""Features of torch that tests compare with or use, and that older versions lack.

A test that needs one is skipped where it is missing, and the reason names it: ``@needs("sort_ranks")``, or
``require`` in a test. Features that dist2 itself uses are in `dist2.runtime.torch_versions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist2.runtime import torch_versions


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _source(module: str) -> str:
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()


def _is_since(major: int, minor: int) -> bool:
    """For behaviour inside torch's C++, which cannot be looked up."""
    return tuple(int(each) for each in torch.__version__.split(".")[:2]) >= (major, minor)


_FEATURES: dict[str, tuple[str, Callable[[], bool]]] = {
    "exchange": (
        "Tensor.__dlpack_c_exchange_api__, by which C reads tensors",
        lambda: torch_versions.TENSOR_EXCHANGE is not None,
    ),
    "options": (
        "Backend.Options.global_ranks_in_group",
        lambda: torch_versions.OPTIONS_NAME_THE_GROUP,
    ),
    "list_keys": ("Store.list_keys", lambda: hasattr(dist.Store, "list_keys")),
    "barrier": ("Store.barrier", lambda: hasattr(dist.Store, "barrier")),
    "single": ("all_gather_single and reduce_scatter_single", lambda: hasattr(dist, "all_gather_single")),
    "store_collectives": ("_StoreCollectives", lambda: hasattr(dist, "_StoreCollectives")),
    "sort_ranks": ("new_group(sort_ranks=)", lambda: _takes(dist.new_group, "sort_ranks")),
    "gloo_complex": ("broadcast of complex tensors by Gloo", lambda: _is_since(2, 9)),
    "zero_overlap": (
        "the overlap of DDP and ZeroRedundancyOptimizer for backends other than NCCL",
        lambda: "to avoid hangs" not in _source("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"),
    ),
    "pipelines": (
        "pipelines whose first messages are received with the dtype that they are sent with",
        lambda: (
            "torch.tensor(self.stage_index, device=self.device)"
            not in _source("torch.distributed.pipelining.stage")
        ),
    ),
    "gloo_alltoall": ("all_to_all by Gloo", lambda: _is_since(2, 12)),
    "analyser": (
        "an analyser of flight recorders that reads dumps of Gloo",
        lambda: _is_since(2, 12),
    ),
}


def has(feature: str) -> bool:
    """Return whether the installed torch has a feature."""
    return _FEATURES[feature][1]()


def reason(feature: str) -> str:
    """Return why a test is skipped."""
    return f"torch {torch.__version__} lacks {_FEATURES[feature][0]}"


def needs(feature: str) -> pytest.MarkDecorator:
    """Skip a test where torch lacks a feature."""
    return pytest.mark.skipif(not has(feature), reason=reason(feature))


def require(feature: str) -> None:
    """Skip the test that calls this where torch lacks a feature."""
    if not has(feature):
        pytest.skip(reason(feature))
