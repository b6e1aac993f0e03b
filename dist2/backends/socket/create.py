"""Building a socket group: its members publish how to reach them and read how to reach the others."""

from __future__ import annotations

from datetime import timedelta

import attrs

from dist2.backends.base import GroupSpec
from dist2.backends.socket.address import data_host
from dist2.backends.socket.backend import Place, SocketBackend
from dist2.backends.socket.options import SocketOptions
from dist2.backends.socket.transport.node import NodeCard, process_node
from dist2.backends.socket.tuning import Thresholds, Tuning
from dist2.clock import deadline_in, remaining_s
from dist2.config import Config
from dist2.errors import InvalidUsageError, OperationTimeoutError


def create(spec: GroupSpec) -> SocketBackend:
    """Return the backend of a new group.

    Raises:
        UnknownOptionError, InvalidUsageError: An option is wrong, or the tuning file of rank 0.
        OperationTimeoutError: Members did not come in time; names them.
        BackendUnavailableError: ``transport="shm"`` for members that cannot share memory.
        RendezvousError: The address to listen on is not this machine's.
    """
    if spec.device.type != "cpu":
        raise InvalidUsageError(f"device must be 'cpu' for backend 'socket', got {str(spec.device)!r}")
    options = SocketOptions.parse(spec.options, Config.from_environment())
    host = options.host or data_host(spec.store)
    node = options.node if options.node is not None else process_node.acquire(host)
    try:
        deadline_ns = deadline_in(spec.timeout_s)
        _publish_tuning(spec, options.tuning)
        spec.store.set(_key(spec.info.rank, _CARD), node.card.to_json())
        cards = [NodeCard.from_json(text) for text in _from_all(spec, _CARD, deadline_ns)]
        thresholds = _published_tuning(spec)
        place = Place(node, options.node is not None, tuple(cards), thresholds)
        backend = SocketBackend(spec, options, place)
        # Nobody returns, and perhaps leaves again, before all have attached to its memory.
        spec.store.set(_key(spec.info.rank, _BUILT), "yes")
        try:
            _from_all(spec, _BUILT, deadline_ns)
        except BaseException:
            backend.shutdown()
            raise
        return backend
    finally:
        if options.node is None:
            process_node.release(node)  # the backend holds it for itself


def _publish_tuning(spec: GroupSpec, path: str | None) -> None:
    """As rank 0, say which constants the group goes by: algorithms must be chosen alike everywhere."""
    if spec.info.rank == 0:
        tuning = Tuning.read(path) if path is not None else Tuning()
        spec.store.set(_TUNING, attrs.evolve(tuning, measured={}).to_json())


def _published_tuning(spec: GroupSpec) -> Thresholds:
    """Return what rank 0 said; its card came after it."""
    return Tuning.from_json(spec.store.get(_TUNING).decode(), "rank 0's tuning").thresholds


def _from_all(spec: GroupSpec, what: str, deadline_ns: int) -> list[str]:
    """Return what every member has published, by rank, waiting for those that have not yet.

    Raises:
        OperationTimeoutError: Some did not come in time; names them.
    """
    store = spec.store
    keys = [_key(rank, what) for rank in range(spec.info.world_size)]
    try:
        store.wait(keys, timedelta(seconds=max(0.001, remaining_s(deadline_ns))))
    except RuntimeError as error:  # torch's stores have no type of their own for a timeout
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        names = ", ".join(map(str, missing))
        raise OperationTimeoutError(
            f"group {spec.info.name!r} cannot be built: rank(s) {names} of {spec.info.world_size} "
            f"did not come within {spec.timeout_s:.3g} s",
            missing=missing,
            timeout_s=spec.timeout_s,
            group=spec.info.name,
            op="new_group",
            rank=spec.info.rank,
        ) from error
    return [value.decode() for value in store.multi_get(keys)]


_CARD, _BUILT, _TUNING = "card", "built", "tuning"


def _key(rank: int, what: str) -> str:
    return f"{what}/{rank}"
