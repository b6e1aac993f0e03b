"""torch.distributed, its RPC and dist2 in one process, with one address for all, in any order."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed
from support.processes import answers_of, started
from support.stores import exit_code, forked, unused_port
from torch.distributed import rpc
from torch.distributed.rendezvous import _rendezvous_handlers as torchs_handlers

import dist2
import dist2.legacy
from dist2.errors import RendezvousError
from dist2.runtime.deadline import Deadline
from dist2.store import torch_server
from dist2.store.torch_server import _accepted_at, _sockets_at

WORLD = 2
LIMIT_S = 20.0
SECRET = "known to the ranks, and not to torch"


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give torch its own handlers back in the end."""
    for scheme in ("env", "tcp"):
        monkeypatch.setitem(torchs_handlers, scheme, torchs_handlers[scheme])


def use_torch(rank: int) -> Callable[[], None]:
    torch.distributed.init_process_group("gloo")

    def check() -> None:
        torch.distributed.all_reduce(total := torch.ones(1))
        assert total.item() == WORLD

    return check


def use_rpc(rank: int) -> Callable[[], None]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD)

    def check() -> None:
        assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), 1)).item() == 2

    return check


def use_objects(rank: int) -> Callable[[], None]:
    pg = dist2.new_group("socket", timeout=LIMIT_S)

    def check() -> None:
        pg.all_reduce(total := torch.ones(1))
        assert total.item() == WORLD

    return check


def use_legacy(rank: int) -> Callable[[], None]:
    dist2.legacy.init_process_group(register_with_torch=False)

    def check() -> None:
        dist2.legacy.all_reduce(total := torch.ones(1))
        assert total.item() == WORLD

    return check


USERS = (use_torch, use_rpc, use_objects, use_legacy)


def _rank(
    pipe: Connection,
    rank: int,
    port: int,
    order: tuple[Callable[[int], Callable[[], None]], ...],
    secret: str = "",
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["DIST2_SECRET"] = secret
    checks = [use(rank) for use in order]
    for check in checks:
        check()
    torch.distributed.destroy_process_group()
    for use, check in zip(order, checks, strict=True):
        if use is not use_torch:
            check()
    use_objects(rank)()
    if use_rpc in order:
        rpc.shutdown()
        dist2.legacy.barrier()  # the server ends with rank 0, and shutdown asks it until the end
    dist2.legacy.destroy_process_group()
    pipe.send("fine")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "order",
    [
        (use_torch, use_objects, use_rpc, use_legacy),
        (use_objects, use_torch, use_rpc, use_legacy),
        (use_rpc, use_legacy, use_torch, use_objects),
        (use_legacy, use_rpc, use_objects, use_torch),
    ],
    ids=lambda order: "-".join(use.__name__.removeprefix("use_") for use in order),
)
def test_one_address_serves_all(order: tuple[Callable[[int], Callable[[], None]], ...]) -> None:
    port = unused_port()
    with started(_rank, *[(rank, port, order) for rank in range(WORLD)]) as pipes:
        assert answers_of(pipes) == ["fine"] * WORLD


def test_a_forked_child_holds_nothing_of_the_server() -> None:
    port = unused_port()
    met = dist2.rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1, LIMIT_S)
    assert (
        len(_sockets_at(port)) == 3
    )  # the listener, and connections of dist2's store and of the one that keeps it
    assert exit_code(forked(lambda: len(_sockets_at(port)))) == 0
    before = sorted(Path("/proc/self/fd").iterdir())
    _sockets_at(port)
    assert sorted(Path("/proc/self/fd").iterdir()) == before  # a copy of a pipe would keep its reader waiting
    met.store.set("key", "value")
    assert met.store.get("key") == b"value"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "order",
    [
        (use_objects, use_torch, use_rpc, use_legacy),
        (use_legacy, use_rpc, use_objects, use_torch),
        (use_torch, use_objects, use_legacy),
    ],
    ids=lambda order: "-".join(use.__name__.removeprefix("use_") for use in order),
)
def test_one_address_serves_all_with_a_secret(
    order: tuple[Callable[[int], Callable[[], None]], ...],
) -> None:
    """torch's client cannot prove knowledge of the secret; dist2's does so for it."""
    port = unused_port()
    with started(_rank, *[(rank, port, order, SECRET) for rank in range(WORLD)]) as pipes:
        assert answers_of(pipes) == ["fine"] * WORLD


def test_torch_as_another_rank_is_told_where_a_secret_is(
    monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    monkeypatch.setenv("DIST2_SECRET", SECRET)
    url = f"tcp://127.0.0.1:{unused_port()}"
    with dist2.new_group("socket", timeout=LIMIT_S, init_method=url, rank=0, world_size=1):
        with pytest.raises(RendezvousError, match=r"as rank 0 of 1, so .* as rank 0 of 2: use another port"):
            torch.distributed.init_process_group("gloo", url, rank=0, world_size=2)
        torch.distributed.init_process_group("gloo", url, rank=0, world_size=1)
        torch.distributed.destroy_process_group()
        other = f"tcp://127.0.0.1:{unused_port()}"
        torch.distributed.init_process_group("gloo", other, rank=0, world_size=1)
        torch.distributed.destroy_process_group()


def test_with_a_secret_the_log_says_how_torch_gets_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restored: None
) -> None:
    monkeypatch.setenv("DIST2_SECRET", SECRET)
    port = unused_port()
    with dist2.new_group(
        "socket", timeout=LIMIT_S, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    ) as pg:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as stranger:
            stranger.sendall(b"\x00\xce\xf7\x85\x3c")  # as torch's client begins
            while stranger.recv(100):
                pass
        assert "in the same process, or with store=pg.get_group_store()" in caplog.text
        torch.distributed.init_process_group("gloo", store=pg.get_group_store(), rank=0, world_size=1)
        torch.distributed.destroy_process_group()


def test_a_strangers_server_is_not_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=r"EADDRINUSE.*use another port; or give .* as store="):
            dist2.rendezvous.rendezvous(url, 0, WORLD, LIMIT_S)
    port = unused_port()
    theirs = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(RendezvousError, match="EADDRINUSE"):  # of this process, but not meant to be shared
        dist2.rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", 0, WORLD, LIMIT_S)
    del theirs


@pytest.mark.parametrize("secret", ["", SECRET])
def test_torchs_store_is_used_where_rank_and_size_are_the_same(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("DIST2_SECRET", secret)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            with dist2.new_group("socket", timeout=LIMIT_S) as pg:
                assert (pg.rank(), pg.size()) == (0, 1)
        with pytest.raises(RendezvousError, match="MASTER_ADDR expected"):
            dist2.new_group("socket", timeout=LIMIT_S, rank=0, world_size=2)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(RendezvousError, match="MASTER_ADDR expected"):
        dist2.new_group("socket", timeout=LIMIT_S, rank=0, world_size=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_connection_counts_before_and_after_it_is_accepted(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=":" in host) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            end = "127.0.0.1:" + str(client.getsockname()[1])
            select.select([listener], [], [], LIMIT_S)
            peers, own, waiting = _accepted_at(port)
            assert (peers, end in own, waiting) == (set(), True, 1)
            with listener.accept()[0]:
                peers, own, waiting = _accepted_at(port)
                assert (peers, end in own, waiting) == ({end}, True, 0)
    assert _accepted_at(port)[0] == set()


def test_a_client_that_connects_while_a_server_ends_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, looks, counted = list[dist2.TCPStore](), list[int](), torch_server._accepted_at

    def count_and_connect(port: int) -> tuple[set[str], set[str], int]:
        found = counted(port)
        looks.append(len(found[0]))
        if len(looks) == torch_server._IDLE_LOOKS:  # nobody is connected, for the last time that it asks
            clients.append(dist2.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10)))
        return found

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ending = torch_server.TorchServer("127.0.0.1", port, listener, Deadline.after(timedelta(seconds=10)))
    monkeypatch.setattr(torch_server, "_accepted_at", count_and_connect)
    ending.retire()
    end = time.monotonic() + 10
    while len(looks) <= torch_server._IDLE_LOOKS + 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    (client,) = clients
    client.set("key", "value")
    assert client.get("key") == b"value"
    client.close()
    while ending._store is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
