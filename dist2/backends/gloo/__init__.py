"""Gloo, torch's CPU backend over TCP, as a dist2 backend.

Gloo cannot break off an operation, and so neither can this backend: `abort` frees callers at once, but a
transfer under way ends with its own deadline, and until then may still write to its tensors. Gloo does not
check that ranks agree, and where sizes differ it ends the process. So a group has a control group, in which
ranks compare each call first (`AgreedBackend`), unless that is switched off.

Collectives and time-outs are Gloo's. dist2 adds the dtypes that Gloo lacks
(`carriers`), waits that `abort` can end (`core`), and messages from a rank to itself (`messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.gloo.collectives import Collectives
from dist2.backends.gloo.core import error_of
from dist2.backends.gloo.messages import Messages
from dist2.backends.socket.agreed import AGREED_OPTIONS, agreed, library_spec
from dist2.errors import BackendUnavailableError, Dist2Error, UnknownOptionError
from dist2.runtime.config import Config, environment_value

OPTIONS = ("hostname", "interface")


class GlooBackend(Collectives, Messages):
    """A group of torch's Gloo backend, without a control group."""

    def split(self, spec: GroupSpec) -> Backend:
        """Connect a subset anew, through the new group's store."""
        with spec.building() as heeding:
            return _connected(heeding)


def create(spec: GroupSpec) -> Backend:
    """Return a group of torch's Gloo backend, connected.

    Options: ``hostname`` or ``interface`` that Gloo binds; by default `Config.host`, else the interfaces that
    ``GLOO_SOCKET_IFNAME`` names, else torch's choice.
    ``control=False`` makes no control group; other options are those of the control group.

    Raises:
        UnknownOptionError: It has no such option.
        BackendUnavailableError: This torch was built without Gloo.
        OperationTimeoutError: Members did not arrive in time.
    """
    check(spec.device, spec.options)
    return agreed(spec, _connected(library_spec(spec)), _connected)


def check(device: torch.device, options: Mapping[str, object]) -> None:
    """Check the arguments of `new_group`, which calls this before it waits for other ranks.

    Raises:
        UnknownOptionError: It has no such option.
        BackendUnavailableError: This torch was built without Gloo.
    """
    known = (*OPTIONS, *AGREED_OPTIONS)
    for option in options:
        if option not in known:
            raise UnknownOptionError(f"backend 'gloo' has no option {option!r}; it has {', '.join(known)}")
    if not torch.distributed.is_gloo_available():
        raise BackendUnavailableError("this build of torch has no Gloo")


create.check = check  # type: ignore[attr-defined]  # found by `new_group`


def _connected(spec: GroupSpec) -> GlooBackend:
    try:
        return GlooBackend(spec, _connect(spec))
    except RuntimeError as error:
        if isinstance(error, Dist2Error):
            raise
        raise error_of(error, f"connecting group {spec.info.name!r} over gloo") from error


def _connect(spec: GroupSpec) -> Any:
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = _devices(gloo, spec)
    options._timeout = timedelta(seconds=spec.timeout_s)
    options._threads = 1  # a group runs one collective at a time, so a second thread would have nothing to do
    options.group_name = spec.info.name
    options.global_ranks_in_group = list(spec.info.global_ranks)
    return gloo(spec.store, spec.info.rank, spec.info.world_size, options)


def _devices(gloo: Any, spec: GroupSpec) -> list[object]:
    interface = spec.options.get("interface")
    hostname = spec.options.get("hostname") or Config.from_environment().host
    if interface is None and hostname is None:
        interface = environment_value("GLOO_SOCKET_IFNAME")  # torch's variable: names with commas between
    if interface:
        return [gloo.create_device(interface=each) for each in str(interface).split(",")]
    if hostname is not None:
        return [gloo.create_device(hostname=str(hostname))]
    return [gloo.create_default_device()]
