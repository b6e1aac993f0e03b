"""Backends that packages register with torch: ``torch.distributed.Backend.register_backend``.

`create` calls the registered creator, which returns a C++ ``Backend``, a ``ProcessGroup``, or a Python
object with c10d's methods. `PluginBackend` runs the operations of a dist2 group on that object. So these
backends get dist2's checks, works, hooks, recorder and metrics. Calls are not compared between ranks, as
dist2 does not move the bytes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup as TorchProcessGroup

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.plugin.backend import PluginBackend
from dist2.backends.plugin.registered import creator_of, extended_options
from dist2.errors import InvalidUsageError, UnknownOptionError
from dist2.operation.contract import GroupParts

__all__ = ["PluginBackend", "create"]

PG_OPTIONS = "pg_options"


def create(spec: GroupSpec) -> Backend | TorchProcessGroup:
    """Return a backend on top of an object of a creator that is registered with torch.

    Options: ``pg_options``, an object that a creator with ``extended_api=True`` gets as its second argument.

    Returns:
        The backend; where the creator has returned a group of dist2's, that group.

    Raises:
        UnknownOptionError: The option is not ``pg_options``.
        InvalidUsageError: ``pg_options`` is given, and the creator does not take it; or the creator has
            returned None.
    """
    for option in spec.options:
        if option != PG_OPTIONS:
            raise UnknownOptionError(
                f"backend {spec.info.backend!r} is registered with torch and has no option {option!r}; "
                f"it has {PG_OPTIONS!r}"
            )
    made = _call_creator(spec)
    if made is None:
        raise InvalidUsageError(f"the creator of backend {spec.info.backend!r} returned None")
    if isinstance(made, GroupParts):
        return made  # type: ignore[return-value]  # a ProcessGroup of dist2's
    return PluginBackend(spec, made, create)


def _call_creator(spec: GroupSpec) -> Any:
    creator = creator_of(spec.info.backend)
    options = spec.options.get(PG_OPTIONS)
    if creator.extended:
        return creator.function(extended_options(spec), options)
    if options is not None:
        raise InvalidUsageError(
            f"backend {spec.info.backend!r} takes no pg_options: it is registered without extended_api=True"
        )
    limit = timedelta(seconds=spec.timeout_s)
    return creator.function(spec.store, spec.info.rank, spec.info.world_size, limit)
