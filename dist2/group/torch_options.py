"""torch's ``pg_options`` objects as options of dist2's backends.

The fields that a user has set are those that differ from a new object's. Those that dist2's backend has too
are its options; the others are named in a warning, as they have no effect.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from dist2.runtime.torch_versions import BINDING

TORCHS_OPTIONS: type = BINDING.Backend.Options
"""Type of torch's ``pg_options``."""

_OF_NCCL = frozenset(
    {"is_high_priority_stream", "min_ctas", "max_ctas", "cga_cluster_size", "net_name", "split_share"}
)
"""Fields of torch's options for NCCL that are options of the backend ``nccl``."""

_OF_THE_CALL = frozenset(
    {"backend", "config", "group_name", "global_ranks_in_group", "split_color", "split_from"}
)
"""Fields that torch sets itself."""


def from_torch(options: object, backend: str) -> dict[str, Any]:
    """Return the options of a backend of dist2 that an options object of torch stands for.

    Args:
        options: A ``Backend.Options`` of any of torch's backends.
        backend: Name of the backend of dist2.
    """
    known = _OF_NCCL if backend == "nccl" else frozenset[str]()
    taken, left = dict[str, Any](), list[str]()
    for name, path, value in _changed(options):
        if name in known:
            taken[name] = value
        else:
            left.append(f"{path}={value!r}")
    if left:
        warnings.warn(
            f"pg_options: {', '.join(left)} {'has' if len(left) == 1 else 'have'} no effect on backend "
            f"{backend!r} of dist2 (a limit is the argument `timeout`)",
            stacklevel=4,
        )
    return taken


def _changed(options: Any) -> Iterator[tuple[str, str, object]]:
    """Yield the name, the path and the value of each field that differs from a new object's."""
    kind = type(options)
    new = kind(options.backend) if kind is TORCHS_OPTIONS else kind()
    for prefix, given, default in (
        ("", options, new),
        ("config.", getattr(options, "config", None), getattr(new, "config", None)),
    ):
        for name in dir(given):
            if name in _OF_THE_CALL or name.startswith("__") or not hasattr(default, name):
                continue
            value = getattr(given, name)
            if not callable(value) and value != getattr(default, name):
                yield name, f"{prefix}{name}", value
