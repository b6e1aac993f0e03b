"""MPI as a contender, through mpi4py: whichever MPI the launcher belongs to. Importing it starts MPI."""

from __future__ import annotations

from functools import partial

from mpi4py import MPI

from dist2.cli.bench.contenders import Call, played
from dist2.cli.bench.workloads import ROOT, Workload


class Mpi:
    """All ranks that the launcher started. Buffers are the memory of torch's tensors, described once."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD

    @property
    def rank(self) -> int:
        """The caller's."""
        return int(self._comm.Get_rank())

    def bind(self, work: Workload) -> Call:
        comm, mine = self._comm, work.rank == ROOT
        sent = [work.input.numpy(), MPI.FLOAT]
        received = [work.output.numpy(), MPI.FLOAT]
        at_root = MPI.IN_PLACE if mine else sent
        calls: dict[str, Call] = {
            "all_reduce": partial(comm.Allreduce, MPI.IN_PLACE, received),
            "broadcast": partial(comm.Bcast, received, ROOT),
            "reduce": partial(comm.Reduce, at_root, received if mine else None, MPI.SUM, ROOT),
            "all_gather_single": partial(comm.Allgather, sent, received),
            "reduce_scatter_single": partial(comm.Reduce_scatter_block, sent, received),
            "gather": partial(comm.Gather, sent, received if mine else None, ROOT),
            "scatter": partial(comm.Scatter, sent if mine else None, received, ROOT),
            "all_to_all_single": partial(comm.Alltoall, sent, received),
            "barrier": comm.Barrier,
        }

        def ping() -> None:
            comm.Send(sent, 1)
            comm.Recv(sent, 1)

        def pong() -> None:
            comm.Recv(sent, ROOT)
            comm.Send(sent, ROOT)

        return played(work, calls, ping, pong)

    def align(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        MPI.Finalize()
