"""Building a socket group: its members publish how to reach them and read how to reach the others."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from dist2.backends.base import GroupSpec
from dist2.backends.socket.address import data_host
from dist2.backends.socket.backend import Place, SocketBackend
from dist2.backends.socket.options import SocketOptions
from dist2.backends.socket.transport.node import NodeCard, process_node
from dist2.clock import deadline_in, remaining_s
from dist2.config import Config
from dist2.errors import InvalidUsageError, OperationTimeoutError


def create(spec: GroupSpec) -> SocketBackend:
    """Return the backend of a new group.

    Raises:
        UnknownOptionError, InvalidUsageError: An option is wrong.
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
        cards = _exchange_cards(spec, node.card)
        return SocketBackend(spec, options, Place(node, options.node is not None, cards))
    finally:
        if options.node is None:
            process_node.release(node)  # the backend holds it for itself


def _exchange_cards(spec: GroupSpec, mine: NodeCard) -> tuple[NodeCard, ...]:
    deadline_ns = deadline_in(spec.timeout_s)
    spec.store.set(_key(spec.info.rank), mine.to_json())
    return tuple(
        mine if rank == spec.info.rank else _read_card(spec, rank, deadline_ns)
        for rank in range(spec.info.world_size)
    )


def _read_card(spec: GroupSpec, rank: int, deadline_ns: int) -> NodeCard:
    store = spec.store
    try:
        store.wait([_key(rank)], timedelta(seconds=max(0.001, remaining_s(deadline_ns))))
    except RuntimeError as error:  # torch's stores have no type of their own for a timeout
        missing = _absent(store, spec.info.world_size)
        names = ", ".join(map(str, missing))
        raise OperationTimeoutError(
            f"group {spec.info.name!r} cannot be built: rank(s) {names} of {spec.info.world_size} did not come "
            f"within {spec.timeout_s:.3g} s",
            missing=missing,
            timeout_s=spec.timeout_s,
            group=spec.info.name,
            op="new_group",
            rank=spec.info.rank,
        ) from error
    return NodeCard.from_json(store.get(_key(rank)).decode())


def _absent(store: Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"card/{rank}"
