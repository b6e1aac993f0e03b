"""Queries of the global API: members and attributes of groups."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from dist2.errors import InvalidUsageError
from dist2.group.process_group import ProcessGroup
from dist2.legacy.names import default_pg_timeout
from dist2.legacy.world import Group, default_group, group_ranks, is_outside, worlds
from dist2.rendezvous.launchers import variable
from dist2.runtime.config import environment_value
from dist2.runtime.torch_versions import group_of_name, time_estimator


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and `destroy_process_group` not since."""
    return worlds.here().usable is not None


def get_rank(group: Group = None) -> int:
    """Return the caller's rank in a group; -1 if it is not in it."""
    return -1 if is_outside(group) else group_ranks(group).pg.rank()


def get_world_size(group: Group = None) -> int:
    """Return how many ranks a group has; -1 if the caller is not in it."""
    return -1 if is_outside(group) else group_ranks(group).pg.size()


def get_backend(group: Group = None) -> str:
    """Return the name of a group's backend."""
    return group_ranks(group).pg.name()


def get_backend_config(group: Group = None) -> str:
    """Return a group's backend by device, like ``"cpu:socket"``."""
    pg = group_ranks(group).pg
    return ",".join(f"{device}:{pg.name()}" for device in pg.backend.device_types)


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank that a global rank has in a group.

    Raises:
        InvalidUsageError: It is not in it.
    """
    return group_ranks(group).group_rank(global_rank, None)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank of a group.

    Raises:
        InvalidUsageError: There is no such rank.
    """
    return group_ranks(group).global_rank(group_rank)


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group's members, by group rank."""
    return list(group_ranks(group).ranks)


def get_pg_count() -> int:
    """Return how many groups were made since `init_process_group`, its own included."""
    return worlds.here().made


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the caller's rank on its host, as the launcher says it in ``LOCAL_RANK``.

    Raises:
        InvalidUsageError: It says nothing, and there is no ``fallback_rank``.
    """
    told = variable("LOCAL_RANK")
    if told is not None:
        return int(told)
    if fallback_rank is None:
        raise InvalidUsageError("LOCAL_RANK is not in the environment. Consider passing fallback_rank.")
    return int(fallback_rank)


def is_torchelastic_launched() -> bool:
    """Whether torchrun started this process."""
    return environment_value("TORCHELASTIC_RUN_ID") is not None


def _get_default_group() -> ProcessGroup:
    return default_group()


def _get_process_group_name(pg: ProcessGroup) -> str:
    return group_ranks(pg).pg.group_name


def _rank_not_in_group(group: Group) -> bool:
    return is_outside(group)


def _get_global_rank(group: ProcessGroup, rank: int) -> int:
    return get_global_rank(group, rank)


def _get_default_store() -> Store:
    return default_group().get_group_store()


def _get_default_timeout(backend: str) -> timedelta:
    return default_pg_timeout


def set_timeout(timeout: timedelta, group: Group = None) -> None:
    """Change the limit of operations of a group that are given none, from the next call on."""
    group_ranks(group).pg.set_timeout(timeout)


_set_pg_timeout = set_timeout  # its name before torch 2.14


def get_backend_impl(group: ProcessGroup | str | None = None, device: torch.device | None = None) -> Any:
    """Return the object that answers for a group's backend, as c10d describes backends.

    Args:
        group: A group, or its name in torch's tables; the default group by default.
        device: Of the tensors that it takes; by default any of the group's.
    """
    pg = group_ranks(group_of_name(group) if isinstance(group, str) else group).pg
    return pg.get_backend(pg.spec.device if device is None else device)


def _time_estimator(group: Group = None, device: torch.device | None = None) -> AbstractContextManager[Any]:
    """Do torch's, which raises NotImplementedError: no backend here estimates times."""
    pg = group_ranks(group).pg
    made: AbstractContextManager[Any] = time_estimator(pg, pg.spec.device if device is None else device)
    return made
