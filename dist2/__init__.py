"""dist2: process groups as objects for PyTorch.

    pg = dist2.new_group("socket")
    pg.all_reduce(tensor)

See the README for the three faces: objects, the old global API (`dist2.legacy`), and scraping.
"""

from contextlib import suppress
from importlib import import_module
from types import ModuleType

from dist2.agreement import Agreement
from dist2.context import current_process_group, process_group
from dist2.creation import new_group
from dist2.dynamo import describe, keep_out
from dist2.errors import (
    AuthenticationError,
    BackendUnavailableError,
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousError,
    StoreError,
    StoreTimeoutError,
    UnknownBackendError,
    UnknownOptionError,
    WireError,
)
from dist2.group import ProcessGroup
from dist2.hooks import add_instrument
from dist2.hooks import preload as preload_instruments
from dist2.ops import ReduceOp, premul_sum
from dist2.registry import ProcessGroupFactory, backend_names, builtin_factory, register_backend
from dist2.shared_tensors import shared_empty
from dist2.store import FileStore, HashStore, PrefixStore, Store, StoreCollectives, TCPStore
from dist2.work import Work

__version__ = "0.1.0"

__all__ = [
    "Agreement",
    "AuthenticationError",
    "BackendUnavailableError",
    "Dist2Error",
    "FileStore",
    "GroupAbortedError",
    "GroupRevokedError",
    "HashStore",
    "InvalidUsageError",
    "MismatchError",
    "OperationTimeoutError",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "RendezvousError",
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
    "shared_empty",
]

describe(ProcessGroup)
keep_out("dist2")

_ON_DEMAND = ("legacy", "torch_world")


def __getattr__(name: str) -> ModuleType:
    """Return a part that is imported when it is first used; the others are there from the start."""
    if name in _ON_DEMAND:
        module = import_module(f"{__name__}.{name}")
        keep_out(module.__name__)
        return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The first group needs these. Imported now, they are shared by all processes that are forked after this;
# otherwise each of them imports them at its first group, which takes 4 ranks on 2 cores half a second.
with suppress(UnknownBackendError, BackendUnavailableError):  # `new_group` raises them
    builtin_factory("socket")
preload_instruments()
