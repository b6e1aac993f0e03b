"""Jobs of processes with a secret and TLS: authenticated ranks work, others get the reason."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from support import certificates
from support.launched_ranks import answers, job, launched
from support.processes import DIED
from support.time_limits import in_time

import dist2
from dist2 import ProcessGroup

STRANGERS = 1000
ROUNDS = 200
"""Of work after the last of them has come."""


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32) + "\n")
    return file


# Members


def train(pg: ProcessGroup, pipe: Connection) -> Any:
    """Use all there is; then rank 1 dies, and the others go on."""
    rank, size = pg.rank(), pg.size()
    for numel in (4, 1 << 20):
        tensor = torch.full((numel,), float(rank))
        pg.all_reduce(tensor)
        assert tensor[-1] == sum(range(size))
    parts = [torch.zeros(3) for _ in range(size)]
    pg.all_gather(parts, torch.full((3,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(size))
    for numel in (10, 300_000):
        got = torch.zeros(numel)
        sent = pg.isend(torch.full((numel,), float(rank)), (rank + 1) % size)
        pg.recv(got, (rank - 1) % size)
        sent.wait()
        assert got[-1] == (rank - 1) % size
    ends = pg.split([0, size - 1])
    if ends is not None:
        both = torch.ones(5)
        ends.all_reduce(both)
        assert both[0] == 2
    pg.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            pg.all_reduce(torch.ones(1000))
    except dist2.PeerLostError as error:
        lost, elapsed = error.ranks, time.monotonic() - start
    smaller = pg.shrink()
    assert smaller is not None
    left = torch.ones(7)
    smaller.all_reduce(left)
    smaller.shutdown()
    return tuple(lost), elapsed, left[0].item()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_job_with_a_secret_and_tls_works_and_survives_a_death(
    tmp_path: Path, secret_file: Path, transport: str
) -> None:
    tls = certificates.make(tmp_path / "member").variables
    environments = launched(3, DIST2_SECRET_FILE=str(secret_file), **tls)
    with job(environments, train, transport=transport) as pipes:
        first, second, third = (answer for answer, _ in answers(pipes))
    assert second is DIED
    for lost, elapsed, left in (first, third):
        assert lost == (1,)
        in_time(elapsed, 2.0)
        assert left == 2.0


# Refused processes


def nothing(pg: ProcessGroup, pipe: Connection) -> str:
    return "came in"


def test_a_rank_with_another_secret_is_told_and_so_are_those_that_wait_for_it(secret_file: Path) -> None:
    environments = launched(3, DIST2_SECRET_FILE=str(secret_file))
    del environments[2]["DIST2_SECRET_FILE"]
    environments[2]["DIST2_SECRET"] = "not the secret of the others"
    with job(environments, nothing, timeout=2.0) as pipes:
        (first, refused), (second, _), (third, _) = answers(pipes)
    kind, message, elapsed = third
    assert kind == "AuthenticationError", message
    assert "another secret (DIST2_SECRET)" in message
    in_time(elapsed, 1.5, "at once, not after its timeout")
    assert refused["store", "wrong_secret"] >= 1
    assert second[0] == "RendezvousTimeoutError"
    # Rank 1 may end before rank 0, which then says so too.
    assert first[0] in ("RendezvousTimeoutError", "RendezvousError")
    assert re.search("rank 2 (of 3 )?did not arrive", first[1])


def test_ranks_that_meet_elsewhere_learn_at_once_that_one_has_another_secret(
    tmp_path: Path, secret_file: Path
) -> None:
    """A file does not check the secret; the records published in it do."""
    environments = launched(3, DIST2_SECRET_FILE=str(secret_file))
    environments[1] = {
        **environments[1],
        "DIST2_SECRET_FILE": "",
        "DIST2_SECRET": "another secret than theirs",
    }
    with job(environments, nothing, init_method=f"file://{tmp_path}/meeting") as pipes:
        for rank, (answer, refused) in enumerate(answers(pipes)):
            kind, message, elapsed = answer
            assert kind == "AuthenticationError"
            assert ("rank 0" if rank == 1 else "rank 1") in message
            in_time(elapsed, 5.0)
            assert refused["card", "wrong_secret"] == 1


def test_a_rank_with_a_certificate_of_another_authority_is_not_let_in(tmp_path: Path) -> None:
    authority = trustme.CA()
    environments = launched(2)
    environments[0] |= certificates.make(tmp_path / "ours", authority).variables
    environments[1] |= certificates.make(tmp_path / "theirs").variables
    with job(environments, nothing, timeout=2.0) as pipes:
        (first, refused), (second, _) = answers(pipes)
    assert second[0] == "AuthenticationError"
    assert "rank 1 of 2 did not arrive" in first[1]
    assert refused["store", "tls"] >= 1


# Strangers


def work_until_told(pg: ProcessGroup, pipe: Connection) -> tuple[int, float]:
    """Send the data port; work until a message comes, and some more; return the amount, and the longest
    round."""
    pipe.send(pg.backend._node.card.card.port)  # type: ignore[attr-defined]  # the socket backend's
    rounds, slowest, other = 0, 0.0, 1 - pg.rank()
    told, left = torch.zeros(1), ROUNDS
    while left:
        start = time.monotonic()
        told.fill_(float(pipe.poll(0)))
        pg.all_reduce(told)
        left -= told.item() == 2
        numbers = torch.full((5000,), float(rounds))
        pg.all_reduce(numbers)
        assert numbers[-1] == 2 * rounds
        got = torch.zeros(100)
        sent = pg.isend(torch.full((100,), float(rounds)), other)
        pg.recv(got, other)
        sent.wait()
        assert got[-1] == rounds
        if rounds % 10 == 0:
            pg.monitored_barrier()  # by way of the store
        slowest = max(slowest, time.monotonic() - start)
        rounds += 1
    late = pg.split([0, 1])
    assert late is not None
    late.barrier()
    return rounds, slowest


def _wait_until_closed(strangers: list[socket.socket]) -> None:
    """Wait until the other side has closed most of the connections: the kernel accepts them before a rank."""
    poll, closed = select.poll(), 0
    for stranger in strangers:
        poll.register(stranger, select.POLLIN)
    while closed < 0.6 * len(strangers):
        ended = poll.poll(20_000)
        assert ended, f"{len(strangers) - closed} of {len(strangers)} connections are kept"
        for descriptor, _ in ended:
            poll.unregister(descriptor)
        closed += len(ended)


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("secured", [True, False], ids=["secret", "open"])
def test_a_thousand_idle_connections_lose_a_job_nothing(secret_file: Path, secured: bool) -> None:
    environments = launched(2, **({"DIST2_SECRET_FILE": str(secret_file)} if secured else {}))
    store_port = int(environments[0]["MASTER_PORT"])
    strangers = []
    with job(environments, work_until_told, transport="tcp") as pipes:
        try:
            ports = [pipe.recv() for pipe in pipes]
            for port in (store_port, ports[0]) * STRANGERS:
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=10))  # noqa: PERF401 - closed
            _wait_until_closed(strangers if secured else strangers[1::2])
            for pipe in pipes:
                pipe.send("enough")
            for (rounds, slowest), refused in answers(pipes):
                assert rounds > ROUNDS
                in_time(slowest, 3.0)
                if refused:
                    # Without a secret the store is torch's, which keeps them all.
                    for kind in ("store", "data") if secured else ("data",):
                        assert refused[kind, "crowded"] > STRANGERS / 2
        finally:
            for stranger in strangers:
                stranger.close()
