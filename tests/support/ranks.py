"""Ranks as threads: run one function as every rank of a group, and fail like the first that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

import dist2
from dist2 import HashStore, ProcessGroup
from dist2.backends.nccl.library import Library
from dist2.backends.socket.transport.node import Node
from dist2.group.open_groups import open_groups
from dist2.runtime.config import Config
from dist2.testing import BackendCase, RankFailed
from support import nccl_stubs, torch_plugins
from support.host_device import HostDevice
from support.time_limits import Late, blamed

__all__ = [
    "SOCKETS",
    "TENANTS",
    "RankFailed",
    "Tenant",
    "host_platform",
    "nccl_tenants",
    "own_node",
    "run_ranks",
]

JOIN_S = 50.0


@attrs.frozen
class Tenant(BackendCase):
    """A backend and its options: a parameter of the conformance suite.

    Attributes:
        layout: Number of each rank's host, where several hosts are simulated.
    """

    bitwise: bool = True
    complete: bool = True
    layout: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    def run(
        self, world_size: int, body: Callable[[ProcessGroup], Any], *, timeout: float = 20.0
    ) -> list[Any]:
        """Run ranks with the nodes and devices that they need; see `run_ranks`."""
        return run_ranks(world_size, body, self, timeout=timeout)


def nccl_tenants() -> Iterator[Tenant]:
    """Yield NCCL on host memory: through cupy where that is installed, else through its twin."""
    if nccl_stubs.missing() is None:
        yield Tenant(
            "nccl", "nccl", {"transport": "inproc"}, bitwise=False, complete=False, compares_exchanges=False
        )


def plugin_tenants() -> Iterator[Tenant]:
    """Yield a backend of each kind that other packages register with torch."""
    for kind in torch_plugins.KINDS:
        yield Tenant(kind, kind, bitwise=False, complete=False)


TENANTS: tuple[Tenant, ...] = (
    Tenant("inproc", "socket", {"transport": "inproc"}),
    Tenant("tcp", "socket", {"transport": "tcp"}),
    Tenant("shm", "socket", {"transport": "shm"}),
    Tenant("gloo", "gloo", bitwise=False, complete=False),
    *nccl_tenants(),
)
SOCKETS: tuple[Tenant, ...] = (
    *(each for each in TENANTS if each.backend == "socket"),
    Tenant("hosts", "socket", layout=(0, 1, 1, 0, 1)),
)
"""Each transport, and two hosts, for up to five ranks."""


@contextmanager
def own_node(tenant: Tenant, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the options of a rank that needs a node or a device of its own.

    All other tenants get their nodes as users do.
    """
    if not tenant.layout and tenant.backend != "nccl":
        yield {}
        return
    host_id = f"host{tenant.layout[rank]}" if tenant.layout else None
    config = attrs.evolve(Config.from_environment(), host_id=host_id)
    node = Node(config=config)
    try:
        if tenant.backend == "nccl":
            with host_platform() as platform:
                yield {"node": node, "platform": platform}
        else:
            yield {"node": node}
    finally:
        node.close()


@contextmanager
def host_platform(**device: Any) -> Iterator[Callable[[], tuple[HostDevice, Library]]]:
    """Yield the factory of an NCCL group's device and library: host memory, and the stub."""
    made = HostDevice(**{"max_delay_us": 50, **device})
    try:
        yield lambda: (made, nccl_stubs.library())
    finally:
        made.close()


def run_ranks(
    world_size: int,
    body: Callable[[ProcessGroup], Any],
    tenant: Tenant,
    *,
    timeout: float = 20.0,
) -> list[Any]:
    """Call ``body(pg)`` on ``world_size`` threads, each a rank of one new group; return the result of each.

    Groups are shut down after the body, and aborted if it raised, so that the others return. Groups that a
    body made and left open are aborted in the end.

    Raises:
        RankFailed: From the exception of the rank that failed first; `Late` if it was late, and no other rank
            failed by itself.
    """
    store = HashStore()
    results: list[Any] = [None] * world_size
    failures: list[tuple[float, int, BaseException]] = []

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            with (
                own_node(tenant, rank) as options,
                dist2.new_group(
                    tenant.backend,
                    timeout,
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    **tenant.options,
                    **options,
                ) as pg,
            ):
                results[rank] = body(pg)
        except BaseException as error:  # noqa: BLE001 - reported to the test
            failures.append((time.monotonic(), rank, error))

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
    ]
    before = set(open_groups())
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + max(JOIN_S, 2 * timeout)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for group in set(open_groups()) - before:
        group.abort()
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if failures:
        failures.sort(key=lambda failure: failure[0])
        error = blamed([each for _, _, each in failures])
        (rank,) = [rank for _, rank, each in failures if each is error]
        kind = Late if isinstance(error, Late) else RankFailed
        raise kind(f"rank {rank}: {error!r}{f' (and stuck: {stuck})' if stuck else ''}") from error
    if stuck:
        raise RankFailed(f"stuck: {stuck}")
    return results
