"""Gloo: torch's CPU backend over TCP.

What Gloo cannot do, and so neither can this: it has no way to break off an operation. `abort` frees
callers at once, but a transfer under way ends with its own deadline, and until then may still write to
its tensors. It does not check that ranks agree: where sizes differ it ends the process.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import GroupSpec
from dist2.backends.native.backend import NativeBackend
from dist2.backends.native.library import C10dBackend, Library
from dist2.config import Config
from dist2.errors import BackendUnavailableError


def create_gloo(spec: GroupSpec) -> NativeBackend:
    """Return a group of torch's Gloo backend, connected.

    Options: ``hostname`` or ``interface``, what Gloo binds; by default `Config.host`, else torch's choice.

    Raises:
        UnknownOptionError: It has no such option.
        BackendUnavailableError: This torch was built without Gloo.
        OperationTimeoutError: Members did not come in time.
    """
    return NativeBackend(GLOO, spec)


def _connect(spec: GroupSpec) -> C10dBackend:
    if not torch.distributed.is_gloo_available():
        raise BackendUnavailableError("this build of torch has no Gloo")
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [_device(gloo, spec)]
    options._timeout = timedelta(seconds=spec.timeout_s)
    options._threads = 1  # operations take turns, so a second thread would have nothing to do
    options.group_name = spec.info.name
    options.global_ranks_in_group = list(spec.info.global_ranks)
    return gloo(spec.store, spec.info.rank, spec.info.world_size, options)


def _device(gloo: Any, spec: GroupSpec) -> object:
    interface = spec.options.get("interface")
    hostname = spec.options.get("hostname") or Config.from_environment().host
    if interface is not None:
        return gloo.create_device(interface=str(interface))
    if hostname is not None:
        return gloo.create_device(hostname=str(hostname))
    return gloo.create_default_device()


GLOO = Library("gloo", _connect, options=("hostname", "interface"))
