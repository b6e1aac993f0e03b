"""Names and values of the global API: backends, group placeholders, the deprecated ``reduce_op``."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed
from torch.distributed import Backend as TorchBackend
from torch.distributed import ReduceOp

from dist2.backends.registry import backend_names
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group.process_group import ProcessGroup
from dist2.legacy.world import NON_GROUP_MEMBER, default_group_if_any, worlds
from dist2.operation.kinds import ReduceKind, Reduction
from dist2.runtime.torch_versions import registered_backends

default_pg_timeout = timedelta(minutes=30)
"""Limit of operations of groups that were given none."""

BOTH_DEVICES = ("cpu", "cuda")
"""Devices of a backend that torch does not know: dist2's own take tensors of both."""

OF_DIST2 = frozenset({"socket", "gloo", "nccl", "mpi", "fake"})
"""Names that stand for backends of dist2, where torch has others of the same name."""

OF_TORCH = {"nccl2": "nccl", "nccl-legacy": "nccl", "nccl-lazy": "nccl"}
"""Names of torch 2.14 for its own backends over NCCL, and the backend of dist2 that they mean here."""


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
    def backend_capability(cls) -> dict[str, list[str]]:
        """The devices of each backend, dist2's and torch's."""
        known: dict[str, list[str]] = torch.distributed.Backend.backend_capability
        return {
            name: list(known.get(name, BOTH_DEVICES)) for name in {**known, **dict.fromkeys(backend_names())}
        }

    @property
    def backend_type_map(cls) -> dict[str, Any]:
        """The type of each backend in torch's C++: ``CUSTOM`` for unknown ones."""
        custom: Any = torch.distributed.ProcessGroup.BackendType.CUSTOM
        return dict.fromkeys(backend_names(), custom) | dict(torch.distributed.Backend.backend_type_map)

    @property
    def _plugins(cls) -> dict[str, Any]:
        """The backends that were registered with torch."""
        return registered_backends()


class Backend(str, metaclass=_BackendNames):
    """Makes a `str` in lower case of a backend's name; attributes in upper case stand for known names.

    Attributes:
        default_device_backend_map: The backend of each device where none is named: torch's, but for the CPU.
            May be changed and replaced.
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"
    SOCKET = "socket"

    default_device_backend_map: MutableMapping[str, str] = ChainMap(
        {"cpu": SOCKET}, TorchBackend.default_device_backend_map
    )

    def __new__(cls, name: str) -> str:  # type: ignore[misc]  # as torch's: other libraries look at the type
        if not isinstance(name, str):
            raise ArgumentTypeError(f"Backend constructor parameter must be string-ish, got {name!r}")
        return name.lower()

    @staticmethod
    def register_backend(
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Make a backend known, to torch as well: ``func(store, rank, world_size, timeout)`` returns one.

        Args:
            name: The name that users give.
            func: Returns a C++ ``Backend``, a process group, or an object with c10d's methods.
            extended_api: ``func`` takes a ``DistributedBackendOptions`` and ``pg_options`` instead.
            devices: Types of devices whose tensors it takes; by default ``"cpu"``.

        Raises:
            InvalidUsageError: The name is taken.
        """
        if name.lower() in backend_names():
            raise InvalidUsageError(f"Backend {name.lower()} already registered")
        TorchBackend.register_backend(name, func, extended_api, ["cpu"] if devices is None else devices)


class BackendConfig:
    """Which backend serves which device: from ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``."""

    def __init__(self, backend: str) -> None:
        named = backends_by_device(backend)
        name = backend.lower()
        # A name without a device stands for every device that the backend serves.
        devices = Backend.backend_capability.get(name, ()) if name in named.values() else ()
        self.device_backend_map = dict.fromkeys(devices, name) or named

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backend of each device."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())


def backends_by_device(backend: str) -> dict[str, str]:
    """Return the backend of each device that a backend string names.

    Raises:
        InvalidUsageError: It is no text, a part is not ``device:backend``, or a device is listed twice.
    """
    if not isinstance(backend, str):
        raise ArgumentTypeError(f"backend must be a str, got {backend!r} ({type(backend).__name__})")
    text = backend.lower()
    if text == Backend.UNDEFINED:
        return {"cpu": get_default_backend_for_device("cpu")}
    if ":" not in text:
        own = OF_TORCH.get(text, text)
        device = "cuda" if own == Backend.NCCL else "xpu" if own == Backend.XCCL else "cpu"
        return {device: own}
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
        found[device] = OF_TORCH.get(name, name)
    return found


class _WorldProperty(type):
    """Gives `group` and `GroupMember` their class property."""

    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch's name
        """The default group; None before `init_process_group`. May be set to another group, or to None."""
        return default_group_if_any()

    @WORLD.setter
    def WORLD(cls, pg: ProcessGroup | None) -> None:  # noqa: N802 - torch's name
        worlds.replace_default(pg)


class group(metaclass=_WorldProperty):  # noqa: N801 - torch's name
    """Holds ``group.WORLD``, the default group."""


class GroupMember(metaclass=_WorldProperty):
    """Holds ``GroupMember.WORLD``, and the value for a group that the caller is not in."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


class _DeprecatedReduceOp:
    """``reduce_op.SUM``: the former name of `ReduceOp`."""

    def __getattr__(self, name: str) -> Any:
        members: Mapping[str, Any] = ReduceOp.RedOpType.__members__
        if name != "__members__" and name not in members:
            raise AttributeError(name)
        warnings.warn("`reduce_op` is deprecated, please use `ReduceOp` instead", FutureWarning, stacklevel=2)
        return members if name == "__members__" else members[name]


reduce_op = _DeprecatedReduceOp()


def supports_complex(reduceOp: ReduceOp) -> bool:  # noqa: N803 - torch's name
    """Whether tensors of complex numbers can be reduced so: sums can, orders and bits cannot."""
    named: object = ReduceOp.PREMUL_SUM
    if reduceOp is named:  # Reductions have a factor
        return True
    return Reduction.of(reduceOp).kind in (ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PREMUL_SUM)


_PACKAGES = {"nccl": "cupy", "mpi": "mpi4py"}
"""Packages that backends need and dist2 does not install by itself."""


def is_backend_available(backend: str) -> bool:
    """Whether every backend that a string names is known here, and has the packages that it needs."""
    return all(map(_is_usable, backends_by_device(backend).values()))


def _is_usable(name: str) -> bool:
    if name not in backend_names() or (name == "nccl" and not torch.backends.cuda.is_built()):
        return False
    return name not in _PACKAGES or find_spec(_PACKAGES[name]) is not None


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the backend of a device where none is named.

    Raises:
        InvalidUsageError: There is none.
    """
    kind = torch.device(device).type
    name = Backend.default_device_backend_map.get(kind)
    if name is None:
        raise InvalidUsageError(f"Default backend not registered for device : {device}")
    return OF_TORCH.get(name, name)


def is_available() -> bool:
    """Whether dist2 can be used: it can wherever it can be imported."""
    return True


def is_gloo_available() -> bool:
    """Whether there is a backend ``gloo``."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Whether there is a backend ``nccl``: torch is built for GPUs, and cupy is installed."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Whether there is a backend ``mpi``: mpi4py is installed."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Whether there is a backend ``ucc``."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Whether there is a backend ``xccl``."""
    return is_backend_available("xccl")
