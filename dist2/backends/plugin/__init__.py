"""Backends that packages register with torch: ``torch.distributed.Backend.register_backend``.

`create` calls the registered creator, which returns a C++ ``Backend``, a ``ProcessGroup``, or a Python
object with c10d's methods. `PluginBackend` runs the operations of a dist2 group on that object, beside a control group in which
ranks compare each call first (`AgreedBackend`). So these backends get dist2's checks, works, hooks, recorder
and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.plugin.backend import PluginBackend
from dist2.backends.plugin.registered import creator_of, extended_options
from dist2.backends.socket.agreed import AGREED_OPTIONS, agreed, library_spec
from dist2.errors import InvalidUsageError, UnknownOptionError
from dist2.operation.contract import GroupParts

__all__ = ["PluginBackend", "create"]

PG_OPTIONS = "pg_options"


def create(spec: GroupSpec) -> Backend | TorchProcessGroup:
    """Return a backend on top of an object of a creator that is registered with torch.

    Options: ``pg_options``, an object that a creator with ``extended_api=True`` gets as its second argument;
    ``control=False`` makes no control group; others are those of the control group.

    Returns:
        The backend; where the creator has returned a group of dist2's, that group.

    Raises:
        UnknownOptionError: There is no such option.
        InvalidUsageError: ``pg_options`` is given, and the creator does not take it; or the creator has
            returned None.
    """
    check(spec.device, spec.options)
    creator = creator_of(spec.info.backend)
    own = library_spec(spec)
    return _adopted(spec, _call_creator(own), _call_creator, lambda made: creator.devices)


def check(device: torch.device, options: Mapping[str, object]) -> None:
    """Check the arguments of `new_group`, which calls this before it waits for other ranks.

    Raises:
        UnknownOptionError: There is no such option.
    """
    known = (PG_OPTIONS, *AGREED_OPTIONS)
    for option in options:
        if option not in known:
            raise UnknownOptionError(
                f"it is registered with torch and has no option {option!r}, only {', '.join(known)}"
            )


create.check = check  # type: ignore[attr-defined]  # found by `new_group`


def _adopted(
    spec: GroupSpec,
    made: Any,
    call: Callable[[GroupSpec], Any],
    devices: Callable[[Any], tuple[str, ...]],
) -> Backend | TorchProcessGroup:
    """Return a backend on top of an object; objects of dist2's as they are."""
    if made is None:
        raise InvalidUsageError(f"the creator of backend {spec.info.backend!r} returned None")
    if isinstance(made, (Backend, GroupParts)):
        return made  # type: ignore[return-value]  # a ProcessGroup of dist2's
    types = devices(made)

    def make(part: GroupSpec) -> PluginBackend:
        return PluginBackend(part, call(part), types, make)

    return agreed(spec, PluginBackend(library_spec(spec), made, types, make), make)


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
