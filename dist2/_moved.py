"""Old import paths of public names: they still work, and warn with the new path."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "dist2.agreement": "dist2.backends.consensus",
    "dist2.collectives": "dist2.group.collectives",
    "dist2.config": "dist2.runtime.config",
    "dist2.context": "dist2.group.context",
    "dist2.creation": "dist2.group.creation",
    "dist2.hooks": "dist2.operation.instruments",
    "dist2.ops": "dist2.operation.kinds",
    "dist2.point_to_point": "dist2.group.point_to_point",
    "dist2.registry": "dist2.backends.registry",
    "dist2.shared_tensors": "dist2.backends.shared_tensors",
    "dist2.torch_world": "dist2.torch_backend",
    "dist2.work": "dist2.operation.work",
}
"""Modules that users could name, by their path up to version 0.1.0."""


class MovedModules(MetaPathFinder):
    """Finds a moved module at its old path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        warnings.warn(f"{fullname} has moved: import {MOVED[fullname]}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _Alias())


class _Alias(Loader):
    """Puts the module itself in place of the one that the import system made."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])
