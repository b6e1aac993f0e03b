"""`dist2.legacy` in the place of `torch.distributed`, as torch's tests use it."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed

import dist2.legacy
from dist2.torch_backend import default_group

BACKEND = "socket"
"""dist2's backend, used in place of the one that the tests name."""


class Replacement(types.ModuleType):
    """The module that tests get under the name ``dist``.

    Names that `dist2.legacy` lacks are torch's. The default group is also torch's own default group, for the
    parts of torch that ask for it.

    Args:
        played: Name of the backend that the tests believe to run on.
    """

    def __init__(self, played: str) -> None:
        super().__init__("dist")
        self._played = played
        self._entered = ExitStack()
        self.changed: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.changed:
            return self.changed[name]
        if name in vars(dist2.legacy):
            return getattr(dist2.legacy, name)
        return getattr(torch.distributed, name)

    def init_process_group(self, backend: str | None = None, *args: Any, **options: Any) -> None:
        dist2.legacy.init_process_group(self._ours(backend), *args, **options)
        if not torch.distributed.is_initialized():
            self._entered.enter_context(default_group(dist2.legacy._get_default_group()))

    def destroy_process_group(self, group: Any = None) -> None:
        if group is None or group is dist2.legacy.group.WORLD:
            self._entered.close()
        dist2.legacy.destroy_process_group(group)

    def new_group(self, *args: Any, **options: Any) -> Any:
        if "backend" in options:
            options["backend"] = self._ours(options["backend"])
        return dist2.legacy.new_group(*args, **options)

    def _ours(self, backend: str | None) -> str | None:
        return BACKEND if backend is not None and backend == self._played else backend


def replace_in(module: Any, played: str) -> Replacement:
    """Give a module of torch's tests dist2's names in the place of torch's."""
    module.dist = replacement = Replacement(played)
    for name in ("_get_default_group", "get_world_size"):
        setattr(module, name, getattr(dist2.legacy, name))
    module._get_pg_config = _pg_config
    return replacement


def _pg_config(group: Any = None) -> dict[str, Any]:
    ranks = dist2.legacy.get_process_group_ranks(group)
    pg = dist2.legacy._get_default_group() if group is None else group
    return {"pg_name": pg.group_name, "pg_desc": pg.group_desc, "pg_size": len(ranks), "ranks": ranks}
