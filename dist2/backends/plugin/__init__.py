"""Backends of other packages that have c10d's methods.

A package registers one with torch (``torch.distributed.Backend.register_backend``) or a factory with dist2
(`dist2.register_backend`). It returns a C++ ``Backend``, a ``ProcessGroup``, or a Python object with c10d's
methods. `PluginBackend` runs the operations of a dist2 group on that object, beside a control group in which
ranks compare each call first (`AgreedBackend`). So these backends get dist2's checks, works, hooks, recorder
and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch.distributed import Backend as TorchBackend
from torch.distributed import ProcessGroup as TorchProcessGroup

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.plugin.backend import PluginBackend
from dist2.backends.plugin.registered import creator_of, extended_options
from dist2.backends.socket.agreed import AGREED_OPTIONS, CONTROL, agreed, library_spec
from dist2.errors import InvalidUsageError, UnknownOptionError
from dist2.operation.contract import GroupParts
from dist2.runtime.torch_versions import BINDING

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


def adopt(spec: GroupSpec, call: Callable[[GroupSpec], Any]) -> Backend | TorchProcessGroup:
    """Return a backend on top of the result of a factory that is registered with dist2.

    Args:
        spec: The group. Its option ``control`` is for the control group, the others are the factory's.
        call: Calls the factory.

    Returns:
        The backend; where the factory has returned a backend or a group of dist2's, that.

    Raises:
        InvalidUsageError: The factory has returned something else.
    """
    control = {name: value for name, value in spec.options.items() if name == CONTROL}
    own = {name: value for name, value in spec.options.items() if name != CONTROL}

    def make(part: GroupSpec) -> Any:
        made = call(attrs.evolve(part, options=own))
        if not isinstance(made, (Backend, BINDING.Backend, TorchProcessGroup)):
            raise InvalidUsageError(
                f"the factory of backend {spec.info.backend!r} must return a ProcessGroup or a Backend, "
                f"got {type(made).__name__}"
            )
        return made

    return _adopted(attrs.evolve(spec, options=control), make(spec), make, _devices_of)


create.check = check  # type: ignore[attr-defined]  # found by `new_group`
create.adopt = adopt  # type: ignore[attr-defined]  # found by `build`


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


def _devices_of(made: Any) -> tuple[str, ...]:
    """Return the devices whose tensors an object of torch's takes."""
    if isinstance(made, TorchProcessGroup):
        found = [device.type for device in made._device_types]
    else:
        found = TorchBackend.backend_capability.get(made.name().lower(), ["cpu"])
    return tuple(dict.fromkeys(found)) or ("cpu",)


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
