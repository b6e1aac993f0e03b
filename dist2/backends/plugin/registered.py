"""torch's table of registered backends, and the arguments of their creators."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
from torch.distributed import Backend as TorchBackend

from dist2.backends.base import GroupSpec
from dist2.errors import UnknownBackendError
from dist2.runtime.torch_versions import backend_options, registered_backends


@attrs.frozen
class Creator:
    """A function that makes the backend of a group.

    Attributes:
        function: The registered function.
        extended: Whether it takes ``(DistributedBackendOptions, pg_options)`` in place of
            ``(store, rank, world_size, timeout)``.
        devices: Types of devices whose tensors the backend takes.
    """

    function: Callable[..., Any]
    extended: bool
    devices: tuple[str, ...]


def creator_of(name: str) -> Creator:
    """Return the creator that is registered with torch for a name.

    Raises:
        UnknownBackendError: There is none.
    """
    found = registered_backends().get(name.upper())
    if found is None:
        raise UnknownBackendError(f"backend {name!r} is not registered with torch")
    devices = tuple(TorchBackend.backend_capability.get(name.lower(), ["cpu"]))
    return Creator(found.creator_fn, found.extended_api, devices)


def extended_options(spec: GroupSpec) -> Any:
    """Return the first argument of a creator that is registered with ``extended_api=True``."""
    options = backend_options()
    options.store = spec.store
    options.group_rank = spec.info.rank
    options.group_size = spec.info.world_size
    options.timeout = timedelta(seconds=spec.timeout_s)
    options.group_id = spec.info.name
    options.global_ranks_in_group = list(spec.info.global_ranks)
    return options
