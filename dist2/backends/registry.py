"""Backends by name: those that installed packages name as entry points, and those that programs register."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Store

from dist2.backends.base import Backend, GroupSpec
from dist2.errors import BackendUnavailableError, Dist2Error, InvalidUsageError, UnknownBackendError
from dist2.runtime.torch_versions import registered_backends

ENTRY_POINT_GROUP = "dist2.backends"
BRIDGE_GROUP = "dist2.backend_bridges"
TORCHS_GROUP = "torch.distributed.backends"
"""Entry points that torch 2.14 reads: each is a function that registers a backend with torch."""
TORCH_BRIDGE = "torch"
"""Entry point of the factory for backends that are registered with torch and not with dist2."""

_DEVICES = ("cpu", "cuda")
_COMPOSITES = {
    frozenset({("cpu", "socket")}): "socket",
    frozenset({("cuda", "nccl")}): "nccl",
    frozenset({("cpu", "socket"), ("cuda", "nccl")}): "nccl",
}
"""An NCCL group has a socket group for its control messages, which takes tensors on the CPU as well."""

BackendFactory = Callable[[GroupSpec], Backend]
"""Type of the entry points of ``dist2.backends``."""


class ProcessGroupFactory(Protocol):
    """Argument of `register_backend`: builds a whole group, or the `Backend` of one.

    Examples:
        >>> def create(store, rank, world_size, timeout, device, **options):
        ...     return torch.distributed.ProcessGroupGloo(store, rank, world_size, timeout)
        >>> factory: dist2.ProcessGroupFactory = create
    """

    def __call__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
        **kwargs: object,
    ) -> object: ...


_registered: dict[str, ProcessGroupFactory] = {}
_lock = threading.Lock()


def register_backend(name: str, func: ProcessGroupFactory) -> None:
    """Make ``new_group(name)`` call ``func(store, rank, world_size, timeout, device, **options)``.

    Args:
        name: How users spell the backend.
        func: Returns a C++ ``Backend`` or a ``ProcessGroup`` of torch, on which the operations of a dist2
            group then run, beside a control group unless the option ``control`` is False; or a
            `dist2.backends.base.Backend`, or a group of dist2's. ``store`` is private to the group;
            ``timeout`` is a `datetime.timedelta`. It gets all options but ``control``.

    Raises:
        InvalidUsageError: The name is taken ("already registered"), or ``func`` cannot be called.

    Examples:
        >>> def create(store, rank, world_size, timeout, device, **options):
        ...     return torch.distributed.ProcessGroupGloo(store, rank, world_size, timeout)
        >>> if pg.rank() == 0:
        ...     dist2.register_backend("plain_gloo", create)
    """
    if not isinstance(name, str) or not name:
        raise InvalidUsageError(f"name must be a non-empty string, got {name!r}")
    if not callable(func):
        raise InvalidUsageError(f"func must be callable, got {func!r} ({type(func).__name__})")
    with _lock:
        if name in _registered or name in _builtin_names():
            raise InvalidUsageError(f"Backend {name} already registered")
        _registered[name] = func


def registered_factory(name: str) -> ProcessGroupFactory | None:
    """Return the factory that `register_backend` was given for a name, or None."""
    return _registered.get(name)


def composite(by_device: Mapping[str, str]) -> str | None:
    """Return the backend that serves several devices as they are asked for; None if no one does.

    Args:
        by_device: The name of a backend for each type of device.
    """
    return _COMPOSITES.get(frozenset(by_device.items()))


def single_name(backend: str) -> str:
    """Return the one backend that a name like ``"cpu:socket,cuda:nccl"`` means; other names as they are.

    Raises:
        UnknownBackendError: No one backend serves these devices so.
    """
    if ":" not in backend:
        return backend
    pairs = [pair.partition(":") for pair in backend.split(",")]
    found = composite({device.strip(): name.strip() for device, _, name in pairs})
    if found is None or len(pairs) > len(_DEVICES):
        known = ", ".join(sorted(_spelled(each) for each in _COMPOSITES))
        raise UnknownBackendError(f"backend must be one of {known} where it names devices; got {backend!r}")
    return found


def _spelled(pairs: frozenset[tuple[str, str]]) -> str:
    return repr(",".join(f"{device}:{name}" for device, name in sorted(pairs)))


@cache
def builtin_factory(name: str) -> BackendFactory:
    """Return the factory that an installed package names for a backend, or one for backends of torch's table.

    It is looked for until it is found, and kept then: to ask reads the metadata of all packages there are.

    Raises:
        UnknownBackendError: No package names it.
        BackendUnavailableError: It is named, but cannot be imported here; or dist2 is not installed.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            factory: BackendFactory = point.load()
        except ImportError as error:
            raise BackendUnavailableError(f"backend {name!r} cannot be used here: {error}") from error
        return factory
    _register_with_torch(name)
    if name in torch_names():
        through_torch: BackendFactory = _torch_bridge()
        return through_torch
    if not _builtin_names():
        raise BackendUnavailableError(
            "dist2 was imported without its installation's metadata, which names its backends; install it: "
            "pip install --no-deps --editable PATH_OF_THE_SOURCES"
        )
    names = backend_names()
    meant = "".join(f"; did you mean {each!r}?" for each in difflib.get_close_matches(name, names, n=1))
    known = ", ".join(names)
    raise UnknownBackendError(
        f"backend must be one of {known}; got {name!r} (Backend {name} not registered){meant}"
    )


def build(spec: GroupSpec) -> Backend | TorchProcessGroup:
    """Build the backend that a spec names: one of dist2's, or a whole group of torch's.

    Raises:
        UnknownBackendError, UnknownOptionError, BackendUnavailableError, OperationTimeoutError: As
            `new_group`.
        InvalidUsageError: A registered factory returned something else.
    """
    registered = registered_factory(spec.info.backend)
    if registered is None:
        try:
            return builtin_factory(spec.info.backend)(spec)
        except Dist2Error as error:
            info = spec.info
            error.locate(info.name, "new_group", rank=info.rank, members=info.global_ranks)
            raise
    adopted: Backend | TorchProcessGroup = _torch_bridge().adopt(spec, partial(_call, registered))
    return adopted


def _call(factory: ProcessGroupFactory, spec: GroupSpec) -> object:
    return factory(
        spec.store,
        spec.info.rank,
        spec.info.world_size,
        timedelta(seconds=spec.timeout_s),
        spec.device,
        **spec.options,
    )


def _torch_bridge() -> Any:
    """Return the factory for backends that are registered with torch."""
    (bridge,) = entry_points(group=BRIDGE_GROUP, name=TORCH_BRIDGE)
    return bridge.load()


def backend_names() -> list[str]:
    """Return the names that `new_group` knows, sorted.

    Examples:
        >>> "socket" in dist2.backend_names()
        True
    """
    torchs = {point.name.lower() for point in entry_points(group=TORCHS_GROUP)}
    return sorted({*_registered, *_builtin_names(), *torch_names(), *torchs})


def _register_with_torch(name: str) -> None:
    """Have the package that offers torch a backend of this name register it, unless that was done before.

    Raises:
        BackendUnavailableError: It cannot be imported here, or registers another name.
    """
    for point in entry_points(group=TORCHS_GROUP):
        if point.name.lower() != name or name in torch_names():
            continue
        try:
            point.load()()
        except ImportError as error:
            raise BackendUnavailableError(f"backend {name!r} cannot be used here: {error}") from error
        if name not in torch_names():
            raise BackendUnavailableError(f"the entry point {point.value!r} registers no backend {name!r}")


def torch_names() -> set[str]:
    """Return the names that packages have registered with `torch.distributed.Backend.register_backend`."""
    return {name.lower() for name in registered_backends()}


def _builtin_names() -> set[str]:
    return {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
