"""``mpi://`` with a stand-in for MPI, as no test has several hosts. Real jobs: `tests/backends/mpi`."""

from __future__ import annotations

import socket

import attrs
import pytest

from dist2 import RendezvousTimeoutError
from dist2.rendezvous import mpi
from dist2.runtime.deadline import Deadline

NAME_BYTES = 256


@attrs.define
class Request:
    """A nonblocking collective."""

    is_done: bool

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        return self.is_done


@attrs.define
class Job:
    """The module ``mpi4py.MPI`` as one process of a job sees it.

    Attributes:
        hosts: The name of each process's host.
        rank: This process.
        is_complete: Whether all processes have called.
    """

    hosts: list[str]
    rank: int
    is_complete: bool = True

    @property
    def COMM_WORLD(self) -> Job:  # noqa: N802 - MPI's name
        return self

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return len(self.hosts)

    def Get_processor_name(self) -> str:  # noqa: N802
        return self.hosts[self.rank]

    def Iallgather(self, own: bytes, names: bytearray) -> Request:  # noqa: N802
        assert own == self.hosts[self.rank].encode().ljust(NAME_BYTES, b"\0")
        names[:] = b"".join(host.encode().ljust(NAME_BYTES, b"\0") for host in self.hosts)
        return Request(self.is_complete)

    def Ibcast(self, content: bytearray, root: int) -> Request:  # noqa: N802
        assert root == 0
        if self.rank != 0:
            content[:] = b"4711 10.0.0.1".ljust(NAME_BYTES, b"\0")
        return Request(self.is_complete)


def test_ranks_meet_where_rank_0_says() -> None:
    place = mpi._exchange(Job(["node1"] * 3, rank=2), Deadline.after(5))
    assert (place.host, place.port, place.reservation) == ("10.0.0.1", 4711, None)


@pytest.mark.parametrize(
    ("hosts", "chosen", "expected"),
    [
        (["node1", "node1"], None, "127.0.0.1"),
        (["node1", "127.0.0.1"], None, "127.0.0.1"),  # the address on the way to the other host
        (["node1", "node2"], "127.0.0.2", "127.0.0.2"),
    ],
)
def test_rank_0_keeps_a_port_for_the_server(
    hosts: list[str], chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen is not None:
        monkeypatch.setenv("DIST2_HOST", chosen)
    place = mpi._exchange(Job(hosts, rank=0), Deadline.after(5))
    assert place.reservation is not None
    with place.reservation, socket.socket() as server:
        assert (place.host, place.port) == place.reservation.getsockname()
        assert place.host == expected
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(place.reservation.getsockname())
        server.listen()


def test_the_name_of_rank_0s_host_serves_without_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "local_address_towards", lambda host: None)
    place = mpi._exchange(Job(["localhost", "node2"], rank=0), Deadline.after(5))
    assert place.reservation is not None
    with place.reservation:
        assert place.host == "127.0.0.1"


def test_a_process_that_does_not_call_is_not_waited_for() -> None:
    with pytest.raises(RendezvousTimeoutError, match="not all 2 processes of the MPI job have called"):
        mpi._exchange(Job(["node1"] * 2, rank=1, is_complete=False), Deadline.after(0.05))
