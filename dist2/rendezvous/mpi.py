"""``mpi://``: ranks are the processes of an MPI job, and MPI tells them where rank 0 serves the store.

So a job on several hosts needs no ``MASTER_ADDR``. The first rendezvous of a process exchanges host names and
rank 0's port by nonblocking collectives on ``MPI_COMM_WORLD``; later ones use the same address.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import attrs

from dist2.errors import RendezvousError, RendezvousTimeoutError
from dist2.rendezvous import launchers
from dist2.runtime.config import Config
from dist2.runtime.deadline import Deadline
from dist2.runtime.mpi_library import give_up, load
from dist2.store.address import local_address_towards
from dist2.store.base import Store
from dist2.store.tcp import TCPStore

_NAME_BYTES = 256
_PAUSE_S = 0.001

_lock = threading.Lock()
_found: list[_Place] = []


@attrs.frozen(eq=False)
class _Place:
    """Where rank 0 serves.

    Attributes:
        host: Its address.
        port: Its port.
        reservation: At rank 0: a socket that is bound there, so that no other program gets the port.
    """

    host: str
    port: int
    reservation: socket.socket | None


@attrs.frozen
class MpiEndpoint:
    """The store of an MPI job, which rank 0 serves.

    Attributes:
        label: The name used in messages.
    """

    label: str = attrs.field(eq=False)

    def __str__(self) -> str:
        return self.label

    @property
    def ends_with_rank_0(self) -> bool:
        """Yes: rank 0 serves."""
        return True

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Join the server; as rank 0, host it.

        Raises:
            RendezvousTimeoutError: Some processes of the job did not come.
        """
        with _lock:
            if not _found:
                _found.append(_exchange(load(), Deadline.after(timeout)))
            place = _found[0]
        return TCPStore(
            place.host, place.port, None, rank == 0, timeout, wait_for_workers=False, multi_tenant=True
        )


def world() -> dict[str, int]:
    """Return the rank and the number of processes in the MPI job.

    Raises:
        BackendUnavailableError: MPI cannot be used here.
        RendezvousError: A launcher has started another number of processes: MPI knows nothing of it, and each
            process would be a job of its own.
    """
    comm = load().COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    started = launchers.variable("WORLD_SIZE") or str(size)
    if started != str(size):
        raise RendezvousError(
            f"mpi:// rendezvous: the launcher has started {started} processes, and MPI sees {size}: "
            f"start the program with the mpiexec of this MPI library, or with srun --mpi=pmix (or pmi2)"
        )
    return {"rank": rank, "world_size": size}


def _exchange(mpi: Any, deadline: Deadline) -> _Place:
    """Return where rank 0 serves: all processes of the job call this."""
    comm = mpi.COMM_WORLD
    own = mpi.Get_processor_name().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    names = bytearray(_NAME_BYTES * comm.Get_size())
    _complete(comm.Iallgather(own, names), deadline, comm.Get_size())
    reservation, place = None, bytearray(_NAME_BYTES)
    if comm.Get_rank() == 0:
        reservation = _reserved(_host([each.rstrip(b"\0").decode() for each in _parts(names)]))
        host, port = reservation.getsockname()[:2]
        place[:] = f"{port} {host}".encode().ljust(_NAME_BYTES, b"\0")
    _complete(comm.Ibcast(place, 0), deadline, comm.Get_size())
    port, host = place.rstrip(b"\0").decode().split()
    return _Place(host, int(port), reservation)


def _parts(names: bytearray) -> Iterator[bytearray]:
    return (names[start : start + _NAME_BYTES] for start in range(0, len(names), _NAME_BYTES))


def _host(names: Sequence[str]) -> str:
    """Return the name or address at which rank 0 serves.

    Its own name may stand for a loopback address there, as in Debian's ``/etc/hosts``.

    Args:
        names: The names of all ranks' hosts.
    """
    others = [name for name in names if name != names[0]]
    if not others:
        return "127.0.0.1"
    return Config.from_environment().host or local_address_towards(others[0]) or names[0]


def _reserved(host: str) -> socket.socket:
    """Return a socket on a free port, which the server binds as well: it does not listen."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reservation = socket.socket(family, kind, protocol)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(address)
    return reservation


def _complete(request: Any, deadline: Deadline, world_size: int) -> None:
    while not request.Test():
        if deadline.passed:
            give_up(request)
            raise RendezvousTimeoutError(
                f"mpi:// rendezvous: not all {world_size} processes of the MPI job have called in time",
                timeout_s=deadline.timeout_s,
            )
        deadline.pause(_PAUSE_S)
