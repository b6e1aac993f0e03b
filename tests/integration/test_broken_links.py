"""One connection between two hosts is reset: no rank has died, all are told the same, and all agree."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import caught, hear, tell
from support.ranks import Tenant, run_ranks
from support.time_limits import in_time

from dist2 import Dist2Error, PeerLostError, ProcessGroup
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.transport.links.link import Link

TOLD_S = 1.5
SETTLED_S = 4.0
HOSTS = (0, 0, 1, 1)


def links(pg: ProcessGroup, peer: int) -> list[Link]:
    """Return the connections of this rank to another one."""
    backend = pg.backend
    assert isinstance(backend, SocketBackend)
    fabric, mailbox = backend.endpoint._fabric, backend.endpoint._mailbox
    with fabric.lock:
        fabric.courier.reach(mailbox, peer)
        return list(fabric.linkage.to(mailbox.fabric_ids[peer]))


def reset(pg: ProcessGroup, peer: int) -> None:
    """Reset the connections of this rank to another one, as a middlebox may."""
    for link in links(pg, peer):
        assert isinstance(link.sock, socket.socket)
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.reject()


def _break(pg: ProcessGroup, ends: tuple[int, int]) -> dict[str, Any]:
    """Lose the connection of two ranks in the middle of work; go on with those that remain."""
    everyone = [f"{rank} knows" for rank in range(pg.size())]
    pg.all_reduce(torch.ones(4))
    for peer in range(pg.rank()):  # all are connected, as after a wait
        pg.send(torch.ones(1), peer)
    for peer in range(pg.rank() + 1, pg.size()):
        pg.recv(torch.ones(1), peer)
    pg.barrier()
    if pg.rank() == ends[0]:
        reset(pg, ends[1])

    def until_told() -> None:
        while True:
            pg.all_reduce(torch.ones(4))

    error, took_s = caught(PeerLostError, until_told)
    tell(pg, everyone[pg.rank()])
    hear(pg, *everyone)
    result: dict[str, Any] = {"text": str(error), "ranks": error.ranks, "took_s": took_s}
    try:
        left = pg.shrink(timeout=10)
    except Dist2Error as expelled:
        result["expelled"] = (type(expelled), str(expelled))
        return result
    total = torch.ones(1)
    left.all_reduce(total)
    result["left"] = left.info.global_ranks
    result["total"] = total.item()
    left.shutdown()
    return result


@pytest.mark.parametrize(
    ("hosts", "ends", "left"),
    [
        (HOSTS, (0, 2), (0, 1, 3)),  # one of them is the coordinator of the vote
        (HOSTS, (2, 0), (0, 1, 3)),
        (HOSTS, (1, 2), (0, 1, 3)),  # none is: it settles the dispute
        (HOSTS, (3, 1), (0, 1, 2)),
        ((0, 1, 2), (1, 2), (0, 1)),
    ],
)
def test_a_reset_connection_between_hosts_is_no_death_and_settled_in_one_way(
    hosts: tuple[int, ...], ends: tuple[int, int], left: tuple[int, ...]
) -> None:
    results = run_ranks(len(hosts), lambda pg: _break(pg, ends), Tenant("hosts", "socket", layout=hosts))
    for rank, result in enumerate(results):
        assert "died" not in result["text"]
        assert "lost the connection to it" in result["text"]
        assert set(result["ranks"]) <= set(ends) - {rank}, (rank, result)
        if rank in left:
            assert result["left"] == left, (rank, result)
            assert result["total"] == len(left)
        else:
            kind, text = result["expelled"]
            assert kind is PeerLostError
            assert "consider this rank lost" in text
    for result in results:
        in_time(result["took_s"], TOLD_S)


def _fail_to_connect(pg: ProcessGroup, together: threading.Barrier) -> dict[str, Any]:
    """Have rank 1 fail to connect to rank 2, once; all are told.

    A rank that waits for another one asks it in the end, and connects to it for that. So the others begin
    when rank 1 is about to connect: or it would need no connection of its own.
    """
    backend = pg.backend
    assert isinstance(backend, SocketBackend)
    connector = backend.endpoint._fabric.courier._connector

    def refuse(*_: object) -> socket.socket:
        del connector._connect  # the method is back
        together.wait()
        raise PeerLostError("the process cannot be reached: Network is unreachable")

    if pg.rank() == 1:
        connector._connect = refuse  # type: ignore[method-assign, assignment]  # as a route that is gone for a moment
    calls: tuple[Callable[[], Any], ...] = (
        lambda: pg.all_reduce(torch.ones(4)),
        lambda: pg.send(torch.ones(1), 2),
        lambda: pg.recv(torch.ones(1), 1),
    )
    if pg.rank() != 1:
        together.wait()
    error, took_s = caught(PeerLostError, calls[pg.rank()])
    return {"text": str(error), "ranks": error.ranks, "took_s": took_s}


def test_a_failed_attempt_to_connect_is_told_to_all_ranks() -> None:
    together = threading.Barrier(3, timeout=10)
    results = run_ranks(
        3, lambda pg: _fail_to_connect(pg, together), Tenant("hosts", "socket", layout=(0, 1, 2))
    )
    assert "rank 1 lost the connection to it (the process cannot be reached: Network is" in results[0]["text"]
    assert "Network is unreachable" in results[1]["text"]
    assert [result["ranks"] for result in results] == [(2,), (2,), (1,)]
    for result in results:
        assert "died" not in result["text"]
        in_time(result["took_s"], TOLD_S)


def test_a_message_sent_over_a_reset_connection_is_told_of_the_lost_connection() -> None:
    def body(pg: ProcessGroup) -> tuple[str, tuple[int, ...]]:
        if pg.rank() == 0:
            pg.send(torch.ones(1), 1)
            for link in links(pg, 1):
                link.sock.shutdown(socket.SHUT_WR)  # the write finds it, and not a read
            error, took_s = caught(PeerLostError, lambda: pg.isend(torch.ones(1), 1).wait())
            in_time(took_s, TOLD_S)
        else:
            pg.recv(torch.ones(1), 0)
            error, _ = caught(PeerLostError, lambda: pg.recv(torch.ones(1), 0))
        return str(error), error.ranks

    results = run_ranks(2, body, Tenant("hosts", "socket", layout=(0, 1)))
    for rank, (text, ranks) in enumerate(results):
        assert "lost the connection to it" in text
        assert ranks == (1 - rank,)
