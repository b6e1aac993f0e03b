"""Names and values of the global API: backends, group placeholders, the deprecated ``reduce_op``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from dist2.backends.registry import backend_names, register_backend
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group.process_group import ProcessGroup
from dist2.legacy._world import NON_GROUP_MEMBER, default_group_if_any
from dist2.operation.kinds import ReduceKind, Reduction

default_pg_timeout = timedelta(minutes=30)
"""Limit of operations of groups that were given none."""

DEFAULT_BACKENDS = {"cpu": "socket"}
"""The backend of a device where none is named."""


class _BackendNames(type):
    """Makes every known backend an attribute: ``Backend.SOCKET == "socket"``."""

    def __getattr__(cls, name: str) -> str:
        if name.isupper() and name.lower() in backend_names():
            return name.lower()
        raise AttributeError(f"Backend has no name {name}; it has {', '.join(backend_names())}")

    @property
    def backend_list(cls) -> list[str]:
        """Every name that `init_process_group` takes."""
        return ["undefined", *backend_names()]

    @property
    def default_device_backend_map(cls) -> dict[str, str]:
        """The backend of each device where none is named."""
        return dict(DEFAULT_BACKENDS)


class Backend(str, metaclass=_BackendNames):
    """The name of a backend, in lower case; attributes in upper case stand for those there are."""

    __slots__ = ()

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"
    SOCKET = "socket"

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"Backend constructor parameter must be string-ish, got {name!r}")
        return super().__new__(cls, name.lower())

    @staticmethod
    def register_backend(
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Make a backend known: ``func(store, rank, world_size, timeout)`` returns a process group.

        Args:
            name: How users spell it.
            func: The creator, as in torch.
            extended_api: Must be False: dist2 has no ``DistributedBackendOptions`` to pass.
            devices: Ignored: the group says what it takes.
        """
        if extended_api:
            raise InvalidUsageError(f"extended_api must be False for backend {name!r}: dist2 has no such API")

        def create(
            store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device, **options: Any
        ) -> Any:
            return func(store, rank, world_size, timeout, **options)

        register_backend(name.lower(), create)


class BackendConfig:
    """Which backend serves which device: from ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``."""

    def __init__(self, backend: str) -> None:
        self.device_backend_map = backends_by_device(backend)

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backend of each device."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())


def backends_by_device(backend: str) -> dict[str, str]:
    """Return the backend of each device that a backend string names.

    Raises:
        InvalidUsageError: It is no text, a part is not ``device:backend``, or a device comes twice.
    """
    if not isinstance(backend, str):
        raise ArgumentTypeError(f"backend must be a str, got {backend!r} ({type(backend).__name__})")
    text = backend.lower()
    if text == Backend.UNDEFINED:
        return dict(DEFAULT_BACKENDS)
    if ":" not in text:
        device = "cuda" if text == Backend.NCCL else "xpu" if text == Backend.XCCL else "cpu"
        return {device: text}
    found: dict[str, str] = {}
    for pair in text.split(","):
        device, colon, name = (part.strip() for part in pair.partition(":"))
        if not (device and colon and name) or ":" in name:
            raise InvalidUsageError(
                f"Invalid device:backend pairing: {pair!r} in backend {backend!r}, "
                "which must be like 'cpu:gloo,cuda:nccl'"
            )
        if device in found:
            raise InvalidUsageError(f"Duplicate device type {device} in backend string {backend!r}")
        found[device] = name
    return found


class _WorldProperty(type):
    """Gives `group` and `GroupMember` their class property."""

    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch's name
        """The default group; None before `init_process_group`."""
        return default_group_if_any()


class group(metaclass=_WorldProperty):  # noqa: N801 - torch's name
    """Holds ``group.WORLD``, the default group."""


class GroupMember(metaclass=_WorldProperty):
    """Holds ``GroupMember.WORLD``, and what stands for a group that the caller is not in."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


class _DeprecatedReduceOp:
    """``reduce_op.SUM``: what `ReduceOp` was called before."""

    def __getattr__(self, name: str) -> Any:
        if name not in ReduceOp.RedOpType.__members__:
            raise AttributeError(name)
        warnings.warn("`reduce_op` is deprecated, please use `ReduceOp` instead", FutureWarning, stacklevel=2)
        return getattr(ReduceOp, name)


reduce_op = _DeprecatedReduceOp()


def supports_complex(reduceOp: ReduceOp) -> bool:  # noqa: N803 - torch's name
    """Whether tensors of complex numbers can be reduced so: sums can, orders and bits cannot."""
    return Reduction.of(reduceOp).kind in (ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM)


def is_backend_available(backend: str) -> bool:
    """Whether every backend that a string names is known here."""
    return all(name in backend_names() for name in backends_by_device(backend).values())


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the backend of a device where none is named.

    Raises:
        InvalidUsageError: dist2 has none for it.
    """
    kind = torch.device(device).type
    if kind not in DEFAULT_BACKENDS:
        raise InvalidUsageError(f"Default backend not registered for device : {device}")
    return DEFAULT_BACKENDS[kind]


def is_available() -> bool:
    """Whether dist2 can be used: it can wherever it can be imported."""
    return True


def is_gloo_available() -> bool:
    """Whether there is a backend ``gloo``."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Whether there is a backend ``nccl``."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Whether there is a backend ``mpi``."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Whether there is a backend ``ucc``."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Whether there is a backend ``xccl``."""
    return is_backend_available("xccl")
