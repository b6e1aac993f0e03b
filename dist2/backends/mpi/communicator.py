"""Making the communicator of a group, and the agreement before each collective.

MPI compares no calls and knows no deadlines: a collective that ranks call differently may hang, end the job
or return wrong data, and nothing can break it off. But MPI libraries optimize their blocking collectives
most. So one of these moves the data, after two nonblocking ones, at which ranks also watch the control links:

1. *Agree*: an ``MPI_Iallreduce`` of 16 bytes computes the highest and the lowest fingerprint of the calls. A
   rank that gives up here (a deadline, an abort, a death) takes no part in the second step. If the two
   differ, the ranks exchange their calls in words, and raise.
2. *Commit*: an ``MPI_Ibarrier``, which completes only if all ranks have passed the first step. A rank that is
   to give up here looks for another second whether it completes. If it does on one rank, it does on all of
   them within that time: so either all ranks call the blocking collective, or none does.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from time import monotonic_ns, sleep
from typing import Any

import attrs

from dist2.backends.socket.outside import Outside, peers_of
from dist2.backends.socket.transport.messages.explaining import mismatch
from dist2.errors import (
    Dist2Error,
    InvalidUsageError,
    MismatchError,
    PeerLostError,
)
from dist2.operation.description import MAX_BYTES, Call
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, context_id
from dist2.runtime.deadline import deadline_in
from dist2.runtime.mpi_library import failure, give_up

_LOOKS = 200
"""How often a thread looks at a request before it waits at the control links: about 100 us."""
_LOOK_NS = 1_000_000
"""Longest interval between two looks while it waits there."""
_MAX_TAG = 32767
"""Any MPI has tags up to this."""
_WORD = 8
_COMMIT_NS = 1_000_000_000
_PAUSE_S = 0.001


@attrs.frozen(eq=False)
class Communicator:
    """The communicator of one group.

    Attributes:
        mpi: The module ``mpi4py.MPI``.
        comm: MPI's communicator; ranks are group ranks.
        outside: The control links.
    """

    mpi: Any
    comm: Any
    outside: Outside

    @classmethod
    def connect(cls, mpi: Any, outside: Outside, info: GroupInfo, timeout_s: float) -> Communicator:
        """Return the communicator of a group's members. All of them call.

        Raises:
            InvalidUsageError: They are not processes of one MPI job; all ranks raise this.
            OperationTimeoutError, PeerLostError, GroupAbortedError: Ranks are missing.
            BackendError: MPI failed.
        """
        world = mpi.COMM_WORLD
        own = array("q", [world.Get_rank(), world.Get_size()]).tobytes()
        places = [array("q", each) for each in outside.gather(own, 0, deadline_in(timeout_s))]
        ranks, sizes = zip(*places, strict=True)
        if len(set(ranks)) < len(ranks) or len(set(sizes)) > 1 or info.world_size > sizes[0]:
            at = ", ".join(
                f"{info.names([rank])} is process {r} of {n}" for rank, (r, n) in enumerate(places[:4])
            )
            raise InvalidUsageError(
                f"the ranks of group {info.name!r} must be different processes of one MPI job, started by "
                f"one mpiexec or srun: {at}{' ...' if len(places) > 4 else ''}"
            )
        members = world.Get_group().Incl(ranks)
        try:
            comm = _created(mpi, members, context_id(info.uid))
        except mpi.Exception as error:
            raise failure(mpi, error, f"making the communicator of group {info.name!r}") from error
        finally:
            members.Free()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        return cls(mpi, comm, outside)

    def agree(self, operation: Operation) -> None:
        """Wait until all ranks have called a collective, and compare the calls.

        Raises:
            MismatchError: Ranks called different things; all ranks raise it.
            OperationTimeoutError, PeerLostError, GroupAbortedError, GroupRevokedError: As `wait`.
        """
        fingerprint = operation.signature.fingerprint
        signed = fingerprint - (1 << 64) if fingerprint >> 63 else fingerprint
        extremes = array("q", [signed, ~signed])  # the highest complement is that of the lowest
        all_reduce = self.comm.Iallreduce(self.mpi.IN_PLACE, [extremes, self.mpi.INT64_T], self.mpi.MAX)
        self._finish(all_reduce, operation)
        if extremes[0] != ~extremes[1]:
            raise self._difference(operation, signed)
        if operation.signature.kind is not OpKind.BARRIER:  # then no call follows that could block
            self._finish(self.comm.Ibarrier(), operation, _COMMIT_NS)

    def _finish(self, request: Any, operation: Operation, grace_ns: int = 0) -> None:
        """Wait for a request; where it is to be given up, only if it is not done after a grace period."""
        try:
            self.wait(request.Test, operation, operation.deadline_ns)
        except self.mpi.Exception as error:
            raise self.failed(error, operation) from error
        except Dist2Error:
            ends_ns = monotonic_ns() + grace_ns
            while not request.Test():
                if monotonic_ns() >= ends_ns:
                    give_up(request)
                    raise
                sleep(_PAUSE_S)
        except BaseException:  # an interrupt
            give_up(request)
            raise

    def failed(self, error: Exception, operation: Operation) -> Dist2Error:
        """Return the error of an operation that failed in MPI; of a death, as the control links tell it."""
        found = failure(self.mpi, error, operation.describe())
        if isinstance(found, PeerLostError):
            return self.outside.cause_of(found, operation.deadline_ns)
        return found

    def _difference(self, operation: Operation, fingerprint: int) -> MismatchError:
        """Return the error that shows the calls of all ranks."""
        mine = operation.call()
        content = array("q", [fingerprint]).tobytes() + mine.encode().ljust(MAX_BYTES)
        everyone = bytearray(len(content) * self.comm.Get_size())
        self._finish(self.comm.Iallgather(content, everyone), operation)
        parts = [everyone[at : at + len(content)] for at in range(0, len(everyone), len(content))]
        calls = {rank: Call.decode(part[_WORD:].rstrip()) for rank, part in enumerate(parts)}
        differ = [rank for rank, part in enumerate(parts) if part[:_WORD] != content[:_WORD]]
        actual = {rank: calls[rank].text for rank in differ}
        return mismatch(self.comm.Get_rank(), mine, calls, actual, operation.signature.group.names)

    def wait(self, done: Callable[[], bool], operation: Operation, until_ns: int) -> None:
        """Return when requests are done.

        Args:
            done: Makes progress, and tells whether they are.
            operation: The operation that they belong to.
            until_ns: When to give up.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError, GroupRevokedError: As `Outside.wait`.
        """
        for _ in range(_LOOKS):
            if done():
                return
            os.sched_yield()
        self.outside.wait(done, until_ns, peers_of(operation), _LOOK_NS)

    def free(self) -> None:
        """Free the communicator in order: nothing is under way on it, on any rank."""
        if not self.mpi.Is_finalized():
            self.comm.Free()


def _created(mpi: Any, members: Any, context: int) -> Any:
    """Return the communicator of a group of processes, which all call; others of the job may have died."""
    try:
        return mpi.Intracomm.Create_from_group(members, f"dist2-{context:x}")
    except NotImplementedError:  # by a library of MPI 3
        return mpi.COMM_WORLD.Create_group(members, context % _MAX_TAG)
