"""Contenders: dist2's socket backend and torch's Gloo behind one interface. MPI has its own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import attrs
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

import dist2
from dist2.backends.socket.transport.node import Node
from dist2.cli.bench.workloads import ROOT, SEND_RECV, Workload

TIMEOUT = timedelta(seconds=60)

Call = Callable[[], object]


class Contender(Protocol):
    """Something that runs operations on a fixed set of ranks."""

    def bind(self, work: Workload) -> Call:
        """Return a callable that runs the workload's operation once, to its end.

        Raises:
            NotImplementedError: It has no such operation.
        """

    def align(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """Give everything back."""


@attrs.frozen
class Place:
    """Where a contender meets the others of its kind."""

    store: Store
    rank: int
    world_size: int


class Dist2:
    """dist2's socket backend.

    Args:
        name: This contender's name.
        place: Where its ranks meet.
        transport: ``shm`` or ``tcp``.
        tuning: File of measured constants; by default the one that the environment names.
    """

    def __init__(self, name: str, place: Place, transport: str, tuning: str | None = None) -> None:
        # Links belong to processes: a contender with the node of another one would share its links.
        self._node = Node()
        given: dict[str, Any] = {} if tuning is None else {"tuning": tuning}
        self._group = dist2.new_group(
            "socket",
            TIMEOUT,
            store=PrefixStore(name, place.store),
            rank=place.rank,
            world_size=place.world_size,
            transport=transport,
            node=self._node,
            **given,
        )

    def bind(self, work: Workload) -> Call:
        pg, tensor, output = self._group, work.input, work.output
        inputs, outputs, mine = work.input_parts, work.output_parts, work.rank == ROOT
        calls: dict[str, Call] = {
            "all_reduce": partial(pg.all_reduce, tensor),
            "broadcast": partial(pg.broadcast, tensor, ROOT),
            "reduce": partial(pg.reduce, tensor, ROOT),
            "all_gather": partial(pg.all_gather, outputs, tensor),
            "all_gather_single": partial(pg.all_gather_single, output, tensor),
            "reduce_scatter": partial(pg.reduce_scatter, output, inputs),
            "reduce_scatter_single": partial(pg.reduce_scatter_single, output, tensor),
            "gather": partial(pg.gather, outputs if mine else [], tensor, ROOT),
            "scatter": partial(pg.scatter, output, inputs if mine else [], ROOT),
            "all_to_all": partial(pg.all_to_all, outputs, inputs),
            "all_to_all_single": partial(pg.all_to_all_single, output, tensor),
            "barrier": pg.barrier,
        }

        def ping() -> None:
            pg.send(tensor, 1)
            pg.recv(tensor, 1)

        def pong() -> None:
            pg.recv(tensor, ROOT)
            pg.send(tensor, ROOT)

        return played(work, calls, ping, pong)

    def align(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.shutdown()
        self._node.close()


class Gloo:
    """torch's own backend for CPU tensors, by its object: its global functions are slower."""

    def __init__(self, place: Place) -> None:
        store = PrefixStore("gloo", place.store)
        # torch's stubs leave most of its methods out.
        self._group: Any = ProcessGroupGloo(store, place.rank, place.world_size, TIMEOUT)

    def bind(self, work: Workload) -> Call:
        pg, tensor, output = self._group, work.input, work.output
        inputs, outputs, mine = work.input_parts, work.output_parts, work.rank == ROOT
        calls: dict[str, Call] = {
            "all_reduce": lambda: pg.allreduce(tensor).wait(),
            "broadcast": lambda: pg.broadcast(tensor, ROOT).wait(),
            "reduce": lambda: pg.reduce(tensor, ROOT).wait(),
            "all_gather": lambda: pg.allgather(outputs, tensor).wait(),
            "all_gather_single": lambda: pg._allgather_base(output, tensor).wait(),
            "reduce_scatter": lambda: pg.reduce_scatter(output, inputs).wait(),
            "reduce_scatter_single": lambda: pg._reduce_scatter_base(output, tensor).wait(),
            "gather": lambda: pg.gather(outputs if mine else [], tensor, ROOT).wait(),
            "scatter": lambda: pg.scatter(output, inputs if mine else [], ROOT).wait(),
            "all_to_all": lambda: pg.alltoall(outputs, inputs).wait(),
            "all_to_all_single": lambda: pg.alltoall_base(output, tensor, [], []).wait(),
            "barrier": lambda: pg.barrier().wait(),
        }

        def ping() -> None:
            pg.send([tensor], 1, 0).wait()
            pg.recv([tensor], 1, 0).wait()

        def pong() -> None:
            pg.recv([tensor], ROOT, 0).wait()
            pg.send([tensor], ROOT, 0).wait()

        return played(work, calls, ping, pong)

    def align(self) -> None:
        self._group.barrier().wait()

    def close(self) -> None:
        del self._group


def played(work: Workload, collectives: Mapping[str, Call], ping: Call, pong: Call) -> Call:
    """Return the call for a workload; of the ping-pong, the part of this rank: only the first two play."""
    if work.case.op != SEND_RECV:
        if work.case.op not in collectives:
            raise NotImplementedError(f"it has no {work.case.op}")
        return collectives[work.case.op]
    return (ping, pong)[work.rank] if work.rank < 2 else _nothing


def _nothing() -> None:
    pass
