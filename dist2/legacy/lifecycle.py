"""The beginning and the end of the global API: rendezvous, `init_process_group`, `destroy_process_group`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch.distributed import Store

from dist2.backends.registry import builtin_factory, composite, registered_factory, torch_names
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group import creation
from dist2.group.process_group import ProcessGroup
from dist2.group.torch_options import TORCHS_OPTIONS, from_torch
from dist2.group.torch_tables import check_no_default_group
from dist2.legacy.checks import limit_or_default
from dist2.legacy.names import OF_DIST2, Backend, backends_by_device, default_pg_timeout
from dist2.legacy.world import Group, World, group_ranks, is_outside, worlds
from dist2.rendezvous import Located, call_handler, locate
from dist2.rendezvous.url import FileEndpoint
from dist2.runtime.deadline import seconds
from dist2.runtime.signals import holds_no_lock


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[Store, int, int]]:
    """Meet the other ranks at a URL; yield ``(store, rank, world_size)``.

    Wrong arguments raise here, and not when the first value is taken. A file needs no server: its store
    exists at once, before other ranks have called.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, or of a registered scheme.
        rank: The caller's rank, if the URL does not contain it.
        world_size: Number of ranks, if the URL does not contain it.
        **kwargs: ``timeout``, a `timedelta`; for a registered handler, its arguments.
    """
    if not isinstance(url, str):
        raise ArgumentTypeError(f"`url` must be a string. {type(url)}: {url!r}")
    handled = call_handler(url, rank, world_size, **kwargs)
    if handled is not None:
        return handled  # type: ignore[return-value]  # torch's contract for handlers
    limit_s = seconds(kwargs.get("timeout", default_pg_timeout))
    return _meet(locate(url, rank, world_size), timedelta(seconds=limit_s))


def rank_told(url: str | None, rank: int) -> int | None:
    """Return the rank in the arguments of `init_process_group`, or None."""
    if rank >= 0 or not isinstance(url, str):
        return rank if rank >= 0 else None
    told = parse_qs(urlsplit(url).query).get("rank", [""])[0]
    return int(told) if told.isdecimal() else None


def _meet(located: Located, timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    endpoint, rank, world_size = located.endpoint, located.rank, located.world_size
    if isinstance(endpoint, FileEndpoint):
        yield endpoint.open(rank, world_size, timeout), rank, world_size
    else:
        met = located.meet(timeout)
        yield met.store, met.rank, met.world_size


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
    _ranks: list[int] | None = None,
    enable_reconfigure: bool = False,
    *,
    register_with_torch: bool = True,
) -> None:
    """Make the default group of all ranks of the job.

    It becomes torch's own default group as well, until `destroy_process_group`: DDP, samplers, meshes and
    ``torch.distributed`` itself use it. Not where ranks are threads of one process, as torch has one default
    group for all threads.

    Args:
        backend: ``"socket"`` (the default on CPUs), ``"gloo"``, another name, or one a device:
            ``"cpu:socket,cuda:nccl"`` makes a group for both; of others like ``"cpu:gloo,cuda:nccl"`` the
            one for ``device_id`` (by default CPU) is used.
        init_method: Where ranks meet: a URL, by default ``env://``.
        timeout: Limit of operations that name none; by default 30 minutes.
        world_size: How many ranks, where the URL does not say.
        rank: The caller's rank, likewise.
        store: Meet here instead of at a URL; then ``rank`` and ``world_size`` are required.
        group_name: Ignored, as in torch.
        pg_options: A mapping of options for the backend, or an options object of torch.
        device_id: Where the group's tensors live by default.
        _ranks: Ignored: names are unique anyway.
        enable_reconfigure: Must be False: `ProcessGroup.reconfigure` returns another group.
        register_with_torch: Whether to make it torch's default group.

    Raises:
        InvalidUsageError: It was called before, torch has another default group, arguments contradict
            each other, or ``enable_reconfigure`` is true. Ranks that are threads of one process each call it,
            and give their rank.
        UnknownBackendError, BackendUnavailableError, RendezvousError: As `dist2.new_group`.
    """
    if enable_reconfigure:
        raise InvalidUsageError(
            "enable_reconfigure must be False: no group of dist2 changes its members in place. Any group's "
            "handle() and reconfigure(uuid, handles) make a new group of the members that are left"
        )
    with worlds.claim(rank_told(init_method, rank)) as world:
        if register_with_torch and world.is_shared:
            check_no_default_group("the group of dist2.legacy.init_process_group")
        name, device = chosen_backend(backend, device_id)
        given: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
        if store is not None and (init_method is not None or rank < 0 or world_size < 1):
            raise InvalidUsageError(_wrong_meeting(init_method, world_size, rank))
        allowed = limit_or_default(timeout)
        check_backend(name)
        if store is None and name != Backend.FAKE:  # whose other ranks do not exist
            given = {"init_method": init_method, "rank": rank, "world_size": world_size}
        pg = creation.new_group(
            name,
            allowed,
            device,
            desc="default_pg",
            **given,
            **options_of(pg_options, name),
        )
        worlds.begin(world, pg)
        if register_with_torch:
            world.enter_torch()


def check_backend(name: str) -> None:
    """Refuse a backend that is not there, before ranks wait for each other.

    Raises:
        UnknownBackendError: It is not.
    """
    if registered_factory(name) is None:
        builtin_factory(name)


def _wrong_meeting(init_method: str | None, world_size: int, rank: int) -> str:
    if init_method is not None:
        return f"Cannot specify both init_method and store (init_method={init_method!r})."
    if world_size < 1:
        return f"world_size must be positive if using store, got {world_size}"
    return f"rank must be non-negative if using store, got {rank}"


def chosen_backend(backend: str | None, device_id: torch.device | int | None) -> tuple[str, torch.device]:
    """Return the backend that a backend string names for a device, and the device.

    A dist2 group has one backend: where the string names several that no one serves, those that are left out
    are named in a warning.
    """
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    by_device = backends_by_device(Backend(backend or Backend.UNDEFINED))
    whole = composite(by_device) if len(by_device) > 1 else None
    if whole is not None:
        return whole, device if device is not None else torch.device("cuda")
    kind = device.type if device is not None else "cpu" if "cpu" in by_device else next(iter(by_device))
    if kind not in by_device and len(by_device) > 1:
        raise InvalidUsageError(f"backend {backend!r} names none for device_id {device}")
    name = by_device.pop(kind, None) or by_device.popitem()[1]
    if by_device:
        left = ", ".join(f"{kind}:{other}" for kind, other in by_device.items())
        warnings.warn(f"one backend a group: using {kind}:{name}, not {left}", stacklevel=3)
    return name, device if device is not None else torch.device(kind)


def options_of(pg_options: Any | None, backend: str = "") -> Mapping[str, Any]:
    """Return a backend's options.

    Args:
        pg_options: A mapping, or an object of torch: the fields count that the backend has too. For a backend
            that is registered with torch, the object that it takes.
        backend: Name of the backend.

    Raises:
        ArgumentTypeError: They are neither a mapping nor one of torch's options objects.
    """
    if pg_options is None:
        return {}
    ours = backend in OF_DIST2  # torch 2.14 has entered its own backends of these names when they are used
    if backend in torch_names() and not ours and not isinstance(pg_options, Mapping):
        return {"pg_options": pg_options}
    if isinstance(pg_options, TORCHS_OPTIONS):
        return from_torch(pg_options, backend)
    if not isinstance(pg_options, Mapping):
        raise ArgumentTypeError(
            f"pg_options must be a mapping of the backend's options, or an options object of torch, "
            f"got {type(pg_options).__name__}"
        )
    return pg_options


@holds_no_lock
def destroy_process_group(group: Group = None) -> None:
    """Shut a group down; without ``group``, all of them, and forget `init_process_group`.

    Groups that torch has made under the default group, for a mesh for example, are torch's to destroy.

    Raises:
        InvalidUsageError: There is no default group, or neither the global API nor torch made this one.
    """
    if is_outside(group):
        return
    here = worlds.here()
    if group is not None and here.in_torch is not None and here.in_torch.destroy(group):
        return
    if group is None and here.default is None:
        raise InvalidUsageError("Default process group has not been initialized: nothing to destroy")
    pg = group_ranks(group).pg if group is not None else here.default
    world = None if pg is None else worlds.find(pg)
    if pg is None or world is None:
        raise InvalidUsageError(f"Invalid process group specified: {pg!r}")
    close_all(world) if pg is world.default else close(pg)


@holds_no_lock
def close(pg: ProcessGroup) -> None:
    """Shut a group down and forget it."""
    world = worlds.find(pg)
    if world is not None:
        world.forget(pg)
    pg.shutdown()


@holds_no_lock
def close_all(world: World) -> None:
    """Shut all groups of a world down, those made last first, and forget everything."""
    world.leave_torch()  # groups that torch has made of these are closed before them
    groups = list(world.ranks)
    default = world.default
    for pg in reversed(groups):
        if pg is not default:
            close(pg)
    worlds.end(world)
    if default is not None:
        world.forget(default)
        default.shutdown()
