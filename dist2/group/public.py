"""The public names, which `dist2` loads from here when the first of them is used.

The package `dist2.group` imports this module, so each process with a group has loaded it, and has marked the
code of dist2 as not to be compiled.
"""

from contextlib import suppress
from importlib import import_module

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
from dist2.store import FileStore, HashStore, PrefixStore, Store, StoreCollectives, TCPStore

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
keep_out("dist2")


def instead(name: str) -> str:
    """Return the place of a name of torch.distributed in dist2, for an error."""
    if not hasattr(torch.distributed, name):
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


def load_all() -> None:
    """Import the modules that a first group needs, and that its import leaves out."""
    with suppress(UnknownBackendError, BackendUnavailableError):  # `new_group` raises them
        builtin_factory("socket")
    preload_instruments()
    import_module("encodings.idna")  # looking up a host imports it
