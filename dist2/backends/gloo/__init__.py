"""Gloo, torch's CPU backend over TCP, as a dist2 backend.

Gloo cannot break off an operation, and so neither can this backend: `abort` frees callers at once, but a
transfer under way ends with its own deadline, and until then may still write to its tensors. Gloo does not
check that ranks agree: where sizes differ it ends the process.

Collectives, time-outs and matching of messages are Gloo's. dist2 adds the dtypes that Gloo lacks
(`carriers`), waits that `abort` can end (`core`), and messages from a rank to itself (`messages`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.gloo.collectives import Collectives
from dist2.backends.gloo.core import error_of
from dist2.backends.gloo.messages import Messages
from dist2.errors import BackendUnavailableError, Dist2Error, UnknownOptionError
from dist2.runtime.config import Config

OPTIONS = ("hostname", "interface")


class GlooBackend(Collectives, Messages):
    """A group of torch's Gloo backend."""

    def split(self, spec: GroupSpec) -> Backend:
        """Connect a subset anew, through the new group's store."""
        with spec.building() as heeding:
            return create(heeding)


def create(spec: GroupSpec) -> GlooBackend:
    """Return a group of torch's Gloo backend, connected.

    Options: ``hostname`` or ``interface`` that Gloo binds; by default `Config.host`, else torch's choice.

    Raises:
        UnknownOptionError: It has no such option.
        BackendUnavailableError: This torch was built without Gloo.
        OperationTimeoutError: Members did not arrive in time.
    """
    for option in spec.options:
        if option not in OPTIONS:
            raise UnknownOptionError(f"backend 'gloo' has no option {option!r}; it has {', '.join(OPTIONS)}")
    if not torch.distributed.is_gloo_available():
        raise BackendUnavailableError("this build of torch has no Gloo")
    try:
        return GlooBackend(spec, _connect(spec))
    except RuntimeError as error:
        if isinstance(error, Dist2Error):
            raise
        raise error_of(error, f"connecting group {spec.info.name!r} over gloo") from error


def _connect(spec: GroupSpec) -> Any:
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [_device(gloo, spec)]
    options._timeout = timedelta(seconds=spec.timeout_s)
    options._threads = 1  # a group runs one collective at a time, so a second thread would have nothing to do
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
