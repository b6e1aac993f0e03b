"""dist2: process groups as objects for PyTorch.

    pg = dist2.new_group("socket")
    pg.all_reduce(tensor)

See the README for the three faces: objects, the old global API (`dist2.legacy`), and scraping.
"""

from contextlib import suppress
from importlib import import_module
from types import ModuleType

import torch.distributed

from dist2.backends.consensus import Agreement
from dist2.backends.registry import ProcessGroupFactory, backend_names, builtin_factory, register_backend
from dist2.backends.shared_tensors import shared_empty
from dist2.c10d.dynamo import describe, keep_out
from dist2.c10d.spellings import INSTEAD
from dist2.errors import (
    AuthenticationError,
    BackendUnavailableError,
    CorruptionError,
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    MismatchError,
    NanError,
    OperationTimeoutError,
    PeerLostError,
    RanksFailedError,
    RendezvousError,
    RendezvousTimeoutError,
    ResourceError,
    StoreError,
    StoreTimeoutError,
    UnknownBackendError,
    UnknownOptionError,
    WireError,
)
from dist2.group.context import current_process_group, process_group
from dist2.group.creation import new_group
from dist2.group.object_types import register_type
from dist2.group.process_group import ProcessGroup
from dist2.operation.instruments import add_instrument
from dist2.operation.instruments import preload as preload_instruments
from dist2.operation.kinds import ReduceOp, premul_sum
from dist2.operation.work import Work
from dist2.runtime.process import before_fork
from dist2.store import FileStore, HashStore, PrefixStore, Store, StoreCollectives, TCPStore

__version__ = "0.1.0"

__all__ = [
    "Agreement",
    "AuthenticationError",
    "BackendUnavailableError",
    "CorruptionError",
    "Dist2Error",
    "FileStore",
    "GroupAbortedError",
    "GroupRevokedError",
    "HashStore",
    "InvalidUsageError",
    "MismatchError",
    "NanError",
    "OperationTimeoutError",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupFactory",
    "RanksFailedError",
    "ReduceOp",
    "RendezvousError",
    "RendezvousTimeoutError",
    "ResourceError",
    "Store",
    "StoreCollectives",
    "StoreError",
    "StoreTimeoutError",
    "TCPStore",
    "UnknownBackendError",
    "UnknownOptionError",
    "WireError",
    "Work",
    "add_instrument",
    "backend_names",
    "current_process_group",
    "new_group",
    "premul_sum",
    "process_group",
    "register_backend",
    "register_type",
    "shared_empty",
]

describe(ProcessGroup)
keep_out(__name__)

_ON_DEMAND = ("functional", "launch", "legacy", "torch_backend")


def __getattr__(name: str) -> ModuleType:
    """Return a part that is imported when it is first used."""
    if name in _ON_DEMAND:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_instead(name)}")


def _instead(name: str) -> str:
    """Return the place of a name of torch.distributed in dist2, for an error."""
    if name.startswith("_") or not hasattr(torch.distributed, name):
        return ""
    legacy = f": it belongs to the global API: import dist2.legacy as dist, and use dist.{name}"
    group = "make a group, pg = dist2.new_group('socket')"
    if name == "init_process_group":
        return f": {group}; or for the global API, import dist2.legacy as dist"
    if name in INSTEAD:
        return f"{legacy}; of a group, pg.{INSTEAD[name]}"
    if hasattr(ProcessGroup, name):
        return (
            f": it is a method of a group: {group}, and call pg.{name}(...); or import dist2.legacy as dist"
        )
    return legacy


def __dir__() -> list[str]:
    return sorted({*__all__, *_ON_DEMAND, "__version__"})


@before_fork
def _load_before_fork() -> None:
    """Import the modules that a first group needs, so that forked ranks share them: each would import them.

    It took 4 ranks on 2 cores half a second.
    """
    with suppress(UnknownBackendError, BackendUnavailableError):  # `new_group` raises them
        builtin_factory("socket")
    preload_instruments()
    import_module("encodings.idna")  # looking up a host imports it
