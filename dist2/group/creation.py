"""`new_group`: from a backend's name to a group that works."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Literal, TypeAlias, Unpack, overload

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Store

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.registry import build, builtin_factory, registered_factory, single_name
from dist2.errors import InvalidUsageError, RendezvousError
from dist2.group.options import AnyOptions, FakeOptions, GlooOptions, NcclOptions, SocketOptions
from dist2.group.process_group import ProcessGroup
from dist2.group.verification import check_completes_on_host, check_verify
from dist2.operation.instruments import dispatch
from dist2.operation.signature import GroupInfo
from dist2.rendezvous import Meeting, rendezvous
from dist2.rendezvous.joining import agree, join_group, object_to
from dist2.runtime.arguments import check_names, check_rank, check_store, check_world_size
from dist2.runtime.config import Config, environment_flag
from dist2.runtime.deadline import seconds
from dist2.runtime.resources import scarce_resources
from dist2.runtime.version import __version__
from dist2.store import HashStore

_NAN_CHECK = "TORCH_DIST_NAN_CHECK"

When: TypeAlias = timedelta | float | None
Device: TypeAlias = str | torch.device


@overload
def new_group(
    backend: Literal["socket", "mpi"],
    timeout: When = None,
    device: Device = "cpu",
    **options: Unpack[SocketOptions],
) -> ProcessGroup: ...
@overload
def new_group(
    backend: Literal["gloo"], timeout: When = None, device: Device = "cpu", **options: Unpack[GlooOptions]
) -> ProcessGroup: ...
@overload
def new_group(
    backend: Literal["nccl"], timeout: When = None, device: Device = "cpu", **options: Unpack[NcclOptions]
) -> ProcessGroup: ...
@overload
def new_group(
    backend: Literal["fake"], timeout: When = None, device: Device = "cpu", **options: Unpack[FakeOptions]
) -> ProcessGroup: ...
@overload
def new_group(
    backend: str, timeout: When = None, device: Device = "cpu", **options: Unpack[AnyOptions]
) -> ProcessGroup: ...
def new_group(
    backend: str,
    timeout: When = None,
    device: Device = "cpu",
    *,
    init_method: str | None = None,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    name: str | None = None,
    desc: str = "",
    check_nan: bool | None = None,
    verify: bool | int = False,
    **options: object,
) -> ProcessGroup:
    """Return a new process group; all its ranks call this, and each gets its own object.

    The group, its memory and its connections stay until `shutdown`, `abort`, the end of its ``with`` block or
    of the process, even if the program drops the object: torch may find it by its name.

    Nothing global is set: use the object, or enter it with `process_group`. May be called many times,
    in the same order on all ranks.

    Args:
        backend: ``"socket"``, ``"nccl"``, ``"mpi"``, ``"gloo"``, ``"fake"`` or a registered name; or one a
            device, as ``"cpu:socket,cuda:nccl"``.
        timeout: Limit of each operation and of building the group: a `timedelta` or seconds. Default:
            ``DIST2_TIMEOUT`` or 30 minutes.
        device: Where the group's tensors live by default.
        init_method: Where ranks meet: ``env://``, ``tcp://host:port``, ``file:///path`` or ``mpi://``. The
            default is ``mpi://`` for backend ``"mpi"``, else ``env://``.
        store: Meet here instead; then ``rank`` and ``world_size`` are required. Ranks may be threads of one
            process: each calls this with its rank, and may share the store object.
        rank: The caller's rank; by default from the URL or the environment.
        world_size: Number of ranks; by default from the URL or the environment.
        name: The group's name in c10d. Equal on all ranks.
        desc: Free text, shown by the control plane.
        check_nan: Whether operations refuse tensors with NaN, before anything is sent (`NanError`); also of
            groups derived from this one. Default: ``TORCH_DIST_NAN_CHECK``, or False.
        verify: Whether results that must be equal on all ranks are hashed and compared (`CorruptionError`);
            an int n verifies every n-th one. Equal on all ranks; also of groups derived from this one.
        **options: For the backend; see its documentation. Type checkers know those of dist2's backends; pass
            others as ``**mapping``.

    Raises:
        UnknownBackendError: No such backend; the message lists those there are.
        UnknownOptionError: The backend has no such option.
        BackendUnavailableError: It cannot run here; the message names the missing package or feature.
        RendezvousError: Ranks could not meet; the message names the variable, URL or port at fault.
        OperationTimeoutError: Ranks did not arrive in time; `missing` has them. At a URL it is its subclass
            `RendezvousTimeoutError`.
        ResourceError: The system refused descriptors, memory or a system call.
        PeerLostError: A rank failed or died while it built the group; the message says which and why.
        InvalidUsageError: An argument is wrong, or it or the version of dist2 differs between ranks; the
            message has the value of each rank.

    Examples:
        >>> alone = dist2.new_group("socket", timeout=30, store=dist2.HashStore(), rank=0, world_size=1)
        >>> alone.size()
        1
        >>> alone.shutdown()
    """
    if not isinstance(backend, str):
        raise InvalidUsageError(f"backend must be a name, got {backend!r} ({type(backend).__name__})")
    config = Config.from_environment()
    timeout_s = config.timeout_s if timeout is None else seconds(timeout)
    backend = single_name(backend)
    checked_device = _device(device)
    check_names(name, desc)
    verified = check_verify(verify)
    checks_nan = _checks_nan(check_nan)
    factory = None if registered_factory(backend) is not None else builtin_factory(backend)
    if verified:
        check_completes_on_host(backend, verified, getattr(factory, "natively_async", False))
    if config.instruments:
        dispatch.load_defaults()
    alone = not getattr(factory, "has_peers", True)  # its other ranks do not exist
    if alone and store is None and rank is not None and world_size is not None:
        store = HashStore()
    if init_method is None and store is None:
        init_method = getattr(factory, "init_method", None)
    with scarce_resources():
        try:
            met = _meet(init_method, store, rank, world_size, timeout_s)
        except RendezvousError:
            _check_backend(factory, checked_device, options)  # no launcher helps where it cannot run
            raise
    rank, world_size = met.rank, met.world_size
    with ExitStack() as building:
        scoped, uid = met.store, secrets.token_hex(6)
        if not alone:
            # Other versions may lay out shared memory, or schedule an operation, in another way.
            asked = {
                "dist2": __version__,
                "name": repr(name),
                "backend": repr(backend),
                "verify": repr(verified),
            }
            watch = join_group(met.store, rank, world_size, timeout_s, asked, name, met.roll)
            scoped = building.enter_context(watch)
            _check_backend(factory, checked_device, options)  # the block notifies waiting ranks
            uid = agree(watch, timeout_s)
        info = GroupInfo(
            uid=uid,
            name=name or f"group-{uid}",
            desc=desc,
            backend=backend,
            rank=rank,
            global_ranks=tuple(range(world_size)),
        )
        spec = GroupSpec(info, scoped, timeout_s, checked_device, options, "", checks_nan, verified)
        return _group(spec, _built(spec))


def _checks_nan(check_nan: object) -> bool:
    if check_nan is None:
        return environment_flag(_NAN_CHECK, False)
    if not isinstance(check_nan, bool):
        raise InvalidUsageError(f"check_nan must be a bool, got {check_nan!r} ({type(check_nan).__name__})")
    return check_nan


def _check_backend(factory: object, device: torch.device, options: Mapping[str, object]) -> None:
    """Check the device, the options and the packages of a backend, if it offers that."""
    check = getattr(factory, "check", None)
    if check is not None:
        check(device, options)


def open_group(spec: GroupSpec) -> ProcessGroup:
    """Return the group that a spec describes, for callers that know its members and its store.

    Raises:
        UnknownBackendError, UnknownOptionError, BackendUnavailableError, OperationTimeoutError,
            PeerLostError: As `new_group`.
    """
    with spec.building() as watched:
        made = _built(watched)
    return _group(spec, made)


def _built(spec: GroupSpec) -> Backend | TorchProcessGroup:
    with scarce_resources():
        return build(spec)


def _group(spec: GroupSpec, made: Backend | TorchProcessGroup) -> ProcessGroup:
    if isinstance(made, Backend):
        return ProcessGroup(spec, made, open_group)
    return made  # type: ignore[return-value]  # a registered factory may build any torch group


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidUsageError(f"device must name a torch device, got {device!r}") from error


def _meet(
    init_method: str | None, store: Store | None, rank: int | None, world_size: int | None, timeout_s: float
) -> Meeting:
    """Return where ranks meet, the caller's rank, and how many there are."""
    if store is None:
        return rendezvous(init_method or "env://", rank=rank, world_size=world_size, timeout=timeout_s)
    if init_method is not None:
        raise InvalidUsageError(f"give store or init_method, not both (init_method={init_method!r})")
    check_store(store)
    if rank is None or world_size is None:
        raise InvalidUsageError(f"with store, give rank and world_size too, got {rank=} and {world_size=}")
    size = check_world_size(world_size)
    try:
        return Meeting(store, check_rank(rank, "rank", size), size)
    except InvalidUsageError as error:
        if size > 1:  # else there should be no others
            object_to(store, str(error))
        raise
