"""Backends that are registered with torch, of each kind that a creator may return."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Backend
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

# Programs such as `python -m drill` do not have the path that pytest is configured with.
sys.path.append(str(Path(__file__).parents[2] / "examples" / "custom_backend"))
import store_backend

taken_options: list[Any] = []
"""Second arguments of the creator with the extended interface."""


def compiled(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a C++ backend."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def extended(options: Any, pg_options: Any) -> Any:
    """Return a C++ backend, by the extended interface."""
    taken_options.append(pg_options)
    assert options.global_ranks_in_group[options.group_rank] >= 0
    assert options.group_id
    return compiled(options.store, options.group_rank, options.group_size, options.timeout)


def whole(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of torch's with a C++ backend in it."""
    group = TorchProcessGroup(store, rank, size)
    group._register_backend(
        torch.device("cpu"), TorchProcessGroup.BackendType.GLOO, compiled(store, rank, size, timeout)
    )
    return group


class Duck:
    """An object of no class of torch's, with c10d's methods."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._group = store_backend.StoreGroup(store, rank, size, timeout)
        self.ended: list[str] = []

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")

    def __getattr__(self, name: str) -> Any:
        if name not in ("allreduce", "broadcast", "allgather", "alltoall", "send", "recv", "recv_anysource"):
            raise AttributeError(name)
        return getattr(self._group, name)


CREATORS = {"compiled": compiled, "whole": whole, "duck": Duck}
for name, creator in CREATORS.items():
    Backend.register_backend(name, creator, devices=["cpu"])
Backend.register_backend("extended", extended, extended_api=True, devices=["cpu"])
KINDS = (*CREATORS, "extended", store_backend.NAME)
