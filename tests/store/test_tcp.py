"""`TCPStore`: connecting, waiting, threads, limits, and access to the server."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.captured_logs import logged
from support.programs import run
from support.raising_handlers import interrupted
from support.stores import exit_code, forked, leaving_nothing, server, torch_server, unused_port
from support.threads import together
from support.time_limits import Late, in_time
from support.torch_features import require

import dist2
from dist2.errors import (
    InvalidUsageError,
    StoreConnectionError,
    StoreConnectTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from dist2.runtime.deadline import Deadline
from dist2.store import tcp_server
from dist2.store.connection import Connection
from dist2.store.protocol import MAGIC, Query, Request, encode_request
from dist2.store.torch_server import _accepted_at

HELLO = encode_request(Request(Query.VALIDATE, number=MAGIC))
PING = encode_request(Request(Query.PING, number=7))
PATIENCE_S = 5.0
"""How long late calls may be repeated: see `timed_within`."""
NEVER = 1 << 30
"""How many must come to a barrier that each such call comes to once more."""


@pytest.fixture(autouse=True)
def _leaving_nothing() -> Iterator[None]:
    with leaving_nothing():
        yield


@pytest.fixture
def master() -> Iterator[dist2.TCPStore]:
    store = server()
    yield store
    store.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)


def join(master: Any, **options: Any) -> dist2.TCPStore:
    return dist2.TCPStore("127.0.0.1", master.port, **options)


def timed_within(
    call: Callable[[], Any], kind: type[BaseException], at_least_s: float, at_most_s: float
) -> BaseException:
    """Return the error of a call that must take so long.

    It is repeated while it is late: other processes may delay this one now and then, but a real delay occurs
    each time.
    """
    late: list[float] = []
    while sum(late) < PATIENCE_S:
        error, took_s = timed(call, kind)
        assert took_s >= at_least_s
        if took_s < at_most_s:
            return error
        late.append(took_s)
    raise Late(f"each time later than {at_most_s} s: {late}")


def timed(call: Callable[[], Any], kind: type[BaseException]) -> tuple[BaseException, float]:
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    return caught.value, time.monotonic() - start


def test_attributes(master: dist2.TCPStore) -> None:
    assert isinstance(master, dist.Store)
    assert master.host == "127.0.0.1"
    assert 0 < master.port < 1 << 16
    assert master.libuvBackend is True
    assert repr(master) == f"TCPStore(127.0.0.1:{master.port}, server=port {master.port})"


def test_arguments_are_positional_as_in_torch() -> None:
    store = dist2.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=9), True, False, None, False)
    assert store.timeout == timedelta(seconds=9)
    assert store.libuvBackend is False
    store.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": -1}, "port must be an int from 0 to 65535, got -1"),
        ({"port": 65536}, "got 65536"),
        ({"port": "80"}, "got '80'"),
        ({"host_name": ""}, "host_name must be a non-empty str"),
        ({"host_name": None}, "host_name must be a non-empty str"),
        ({"world_size": 0}, "world size cannot be 0"),
        ({"timeout": -1}, "timeout must not be negative"),
        ({"timeout": "1"}, "timeout must be a timedelta or seconds"),
        ({"is_master": True, "master_listen_fd": -1}, "master_listen_fd must be a bound TCP socket, got -1"),
        ({"is_master": True, "master_listen_fd": "3"}, "master_listen_fd must be an int, got '3'"),
        ({"is_master": True, "master_listen_fd": True}, "master_listen_fd must be an int, got True"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        dist2.TCPStore(**{"host_name": "127.0.0.1", "port": 0, **options})


def test_a_port_in_use_is_named(master: dist2.TCPStore) -> None:
    with pytest.raises(StoreConnectionError, match=rf"port: {master.port}, name: EADDRINUSE") as caught:
        dist2.TCPStore("127.0.0.1", master.port, is_master=True)
    assert isinstance(caught.value, dist.DistNetworkError)


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(
        StoreConnectionError, match=r"192\.0\.2\.1.*EADDRNOTAVAIL.*no address of this machine"
    ):
        dist2.TCPStore("192.0.2.1", 0, is_master=True)


def test_only_the_given_address_is_bound() -> None:
    store = dist2.TCPStore("127.0.0.2", 0, is_master=True)
    try:
        for other in ("127.0.0.1", "127.0.0.3"):
            with socket.socket() as sock:
                assert sock.connect_ex((other, store.port)) != 0
        with socket.create_connection(("127.0.0.2", store.port)):
            pass
    finally:
        store.close()


def test_a_listening_socket_can_be_handed_over() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist2.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    assert store.port == port
    store.set("key", "value")
    assert store.get("key") == b"value"
    store.close()


def test_a_bound_socket_that_does_not_listen_yet_can_be_handed_over() -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    store = dist2.TCPStore("127.0.0.1", port, 1, True, 5, master_listen_fd=bound.detach())
    worker = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    worker.set("key", "value")
    assert store.get("key") == b"value"
    del worker
    store.close()


def udp_socket() -> socket.socket:
    sock = socket.socket(type=socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock


def connected_socket() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (udp_socket, "it is of AF_INET, SOCK_DGRAM"),
        (lambda: socket.socket(socket.AF_UNIX), "it is of AF_UNIX, SOCK_STREAM"),
        (socket.socket, "it is not bound"),
        (connected_socket, "Invalid argument"),
    ],
)
def test_other_sockets_than_bound_ones_are_refused_and_stay_open(
    make: Callable[[], socket.socket], words: str
) -> None:
    with make() as sock:
        number = sock.fileno()
        with pytest.raises(InvalidUsageError, match=f"must be a bound TCP socket, got {number}: .*{words}"):
            dist2.TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=number)
        assert os.fstat(number)


def test_descriptors_that_are_no_sockets_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        with pytest.raises(InvalidUsageError, match=f"must be a bound TCP socket, got {number}: "):
            dist2.TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=number)
        assert os.fstat(number)
    with pytest.raises(InvalidUsageError, match=f"must be a bound TCP socket, got {number}: .*Bad file"):
        dist2.TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=number)


def test_a_listening_socket_of_another_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bound = listener.getsockname()[1]
        with pytest.raises(
            InvalidUsageError, match=rf"bound to port {bound}, expected to be bound to port 1$"
        ):
            dist2.TCPStore("127.0.0.1", 1, is_master=True, master_listen_fd=listener.fileno())


def test_names_are_looked_up() -> None:
    store = dist2.TCPStore("localhost", 0, is_master=True)
    assert store.host == "localhost"
    other = dist2.TCPStore("localhost", store.port)
    other.set("key", "value")
    assert store.get("key") == b"value"
    other.close()
    store.close()


@pytest.mark.parametrize("is_master", [False, True])
@pytest.mark.parametrize("name", [".svc.local", "a..b", "x" * 64])
def test_what_can_be_no_name_is_refused_at_once(
    name: str, is_master: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidUsageError, match="can be no host's name") as caught:
        dist2.TCPStore(name, 1234, is_master=is_master, timeout=5)
    assert repr(name) in str(caught.value)
    assert capfd.readouterr().err == ""


# Time limits


@pytest.mark.parametrize("timeout_s", [0.3, 1.0])
def test_connecting_to_nobody_ends_in_time(timeout_s: float) -> None:
    port = unused_port()
    error = timed_within(
        lambda: dist2.TCPStore("127.0.0.1", port, timeout=timeout_s),
        StoreConnectTimeoutError,
        timeout_s,
        timeout_s * 1.1,
    )
    assert isinstance(error, dist.DistNetworkError)
    assert isinstance(error, TimeoutError)
    assert f"timed out after {timeout_s * 1000:.0f}ms while trying to connect to (127.0.0.1, {port})" in str(
        error
    )


def test_connecting_to_the_mute_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        timed_within(
            lambda: dist2.TCPStore("127.0.0.1", port, timeout=0.4), StoreConnectTimeoutError, 0.4, 0.44
        )


def test_who_is_no_store_is_refused() -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(dist2.WireError, match=rf"127\.0\.0\.1:{port} is no store|without a request"):
            dist2.TCPStore("127.0.0.1", port, timeout=5)
        thread.join()


def test_a_server_may_come_late() -> None:
    port = unused_port()
    kept: list[dist2.TCPStore] = []

    def serve() -> None:
        time.sleep(0.2)
        kept.append(dist2.TCPStore("127.0.0.1", port, is_master=True))

    def ask() -> None:
        store = dist2.TCPStore("127.0.0.1", port, timeout=10)
        store.set("key", "value")
        store.close()

    together(serve, ask)
    store = kept.pop()
    assert store.get("key") == b"value"
    store.close()


@pytest.mark.parametrize("timeout_s", [0.05, 0.5])
@pytest.mark.parametrize("other", [server, torch_server], ids=["ours", "torchs"])
def test_waits_end_in_time(other: Callable[[], Any], timeout_s: float) -> None:
    if other is torch_server:
        require("barrier")
    master = other()
    store = join(master, timeout=20)
    store.set_timeout(timeout_s)
    for call in (
        lambda: store.get("no"),
        lambda: store.wait(["no"]),
        lambda: store.wait(["no"], timeout_s),
        lambda: store.multi_get(["no"]),
        lambda: store.barrier("alone", NEVER),
        lambda: store.queue_pop("no"),
        lambda: store.queue_pop("alone"),  # a key of that name ends its wait again and again
    ):
        error = timed_within(call, StoreTimeoutError, timeout_s, timeout_s * 1.1 + 0.005)
        assert f"timeout after {timeout_s * 1000:.0f}ms, key" in str(error)
    store.set("yes", "the connection is as good as before")
    assert store.get("yes").startswith(b"the")
    store.close()


def test_a_server_that_stops_answering_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    store = server()
    stopped, release = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        release.wait()

    monkeypatch.setattr(store._required_link().lease.server, "_sweep", stop)
    store.set("wakes", "it")
    stopped.wait()
    store.set_timeout(0.3)
    try:
        timed_within(store.num_keys, StoreTimeoutError, 0.3, 0.33)
        timed_within(store.num_keys, StoreTimeoutError, 0.3, 0.33)  # connecting anew counts too
    finally:
        release.set()
        store.close()


def test_zero_means_no_limit(master: dist2.TCPStore) -> None:
    other = master.clone()
    master.set_timeout(timedelta(0))
    got, _ = together(lambda: master.get("late"), lambda: (time.sleep(0.1), other.set("late", "1")))
    assert got == b"1"


# Members


def test_the_master_waits_for_its_workers() -> None:
    port = unused_port()

    def worker() -> None:
        time.sleep(0.1)
        dist2.TCPStore("127.0.0.1", port, 3, timeout=10).close()

    start = time.monotonic()
    store, *_ = together(lambda: dist2.TCPStore("127.0.0.1", port, 3, True, 10), worker, worker)
    assert time.monotonic() - start >= 0.1
    assert store.num_keys() == 1
    store.close()


def test_a_master_waits_until_its_own_name_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        tries.append(host)
        if len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, **options)

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for multi_tenant in (False, True):
        tries.clear()
        with logged() as logs:
            store = dist2.TCPStore("new-host", 0, is_master=True, timeout=10, multi_tenant=multi_tenant)
        assert ["does not resolve yet" in each["event"] for each in logs] == [True]
        store.set("key", "value")
        store.close()
        assert tries[:3] == ["new-host"] * 3


def test_a_master_whose_name_gets_no_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    error = timed_within(
        lambda: dist2.TCPStore("no-host", 29500, is_master=True, timeout=0.3),
        StoreConnectTimeoutError,
        0.3,
        0.33,
    )
    assert "timed out after 300ms waiting for an address" in str(error)
    assert "host: no-host, port: 29500" in str(error)
    assert "Temporary failure in name resolution" in str(error)


def test_missing_workers_are_counted() -> None:
    error = timed_within(lambda: dist2.TCPStore("127.0.0.1", 0, 3, True, 0.3), StoreTimeoutError, 0.3, 0.33)
    assert "Timed out after 0.3 seconds waiting for clients. 1/3 clients joined." in str(error)


def test_workers_of_torch_count() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store, worker = together(
        lambda: dist2.TCPStore("127.0.0.1", port, 2, True, 30, master_listen_fd=listener.detach()),
        lambda: dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=30)),
    )
    worker.set("key", "value")
    assert store.get("key") == b"value"
    del worker
    store.close()


def test_nobody_binds_where_an_agent_serves(agent: None) -> None:
    with pytest.raises(StoreConnectTimeoutError):
        dist2.TCPStore("127.0.0.1", unused_port(), is_master=True, timeout=0.2)


def test_an_agents_store_is_joined(agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torch_server()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(theirs.port))
    store = dist2.TCPStore("127.0.0.1", theirs.port, 2, is_master=True, timeout=20)
    store.set("key", "value")
    assert theirs.get("key") == b"value"
    store.close()
    elsewhere = dist2.TCPStore("127.0.0.1", 0, is_master=True)
    assert elsewhere.port != theirs.port, "other addresses are no business of the agent's"
    elsewhere.close()


# Several threads, signals, interruptions


def test_a_blocked_wait_does_not_hold_up_other_threads(master: dist2.TCPStore) -> None:
    def others() -> None:
        time.sleep(0.1)
        assert master.add("count", 1) == 1
        assert master.get("count") == b"1"
        master.set("late", "now")

    together(lambda: master.wait(["late"], 10), lambda: master.wait(["late"], 10), others)
    assert master.get("late") == b"now"


def test_threads_read_what_they_wrote(master: dist2.TCPStore) -> None:
    store = join(master)

    def body(number: int) -> None:
        for count in range(60):
            key = f"{number}/{count}"
            store.set(key, key)
            assert store.check([key])
            if count % 10 == 0:
                with pytest.raises(StoreTimeoutError):
                    store.wait(["never"], 0.012)
            assert store.get(key) == key.encode()

    together(*(lambda number=number: body(number) for number in range(4)))
    store.close()


def test_connections_do_not_pile_up(master: dist2.TCPStore) -> None:
    store = join(master)
    serving = master._required_link().lease.server
    before = serving.connections
    together(
        *(lambda: store.wait(["late"], 10) for _ in range(6)),
        lambda: (time.sleep(0.1), store.set("late", "")),
    )
    deadline = time.monotonic() + 5
    while serving.connections > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert serving.connections == before
    store.close()


def test_closing_frees_who_waits(master: dist2.TCPStore) -> None:
    store = join(master)

    def wait() -> float:
        start = time.monotonic()
        with pytest.raises(StoreError, match="is closed"):
            store.wait(["never"], 20)
        return time.monotonic() - start

    took_s, _ = together(wait, lambda: (time.sleep(0.1), store.close()))
    in_time(took_s, 1)
    with pytest.raises(StoreError, match="TCPStore is closed"):
        store.get("key")


def test_the_servers_end_frees_who_waits() -> None:
    master = server()
    store = join(master)

    def wait() -> None:
        with pytest.raises(StoreConnectionError, match=r"127\.0\.0\.1:\d+ was closed.*shutdown or crash"):
            store.wait(["never"], 20)

    together(wait, lambda: (time.sleep(0.1), master.close()))
    with pytest.raises(StoreConnectionError, match="was closed"):
        store.set("key", "value")
    store.close()


def test_signals_do_not_break_waits(master: dist2.TCPStore) -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))

    def disturb() -> None:
        for _ in range(5):
            time.sleep(0.03)
            os.kill(os.getpid(), signal.SIGUSR1)
        other.set("late", "1")

    other = master.clone()
    thread = threading.Thread(target=disturb)
    try:
        thread.start()
        assert master.get("late") == b"1"
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, previous)
    assert len(seen) == 5


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest would take for itself."""


@pytest.mark.parametrize("before_parking", [True, False])
def test_an_interrupted_wait_leaves_a_sound_store(
    master: dist2.TCPStore, before_parking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    if before_parking:
        monkeypatch.setattr("dist2.store.client._PARK_AFTER_S", 10.0)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            master.wait(["never"], 10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert master.add("count", 1) == 1
    assert master.get("count") == b"1"


def test_a_handler_that_raises_anywhere_leaves_other_threads_their_turn(master: dist2.TCPStore) -> None:
    master.set("there", "a value")
    with ThreadPoolExecutor(1) as other:
        for where in itertools.count():
            raised = interrupted(where, lambda: master.add("count", 1))
            other.submit(master.wait, ["there"], 5.0).result()
            if not raised:
                break
    assert where > 20


def test_a_signal_handler_may_use_the_store_it_interrupts(
    master: dist2.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist2.store.client._PARK_AFTER_S", 10.0)
    previous = signal.signal(signal.SIGALRM, lambda *_: master.set("late", "from the handler"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert master.get("late") == b"from the handler"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_forked_child_cannot_use_its_parents_store(master: dist2.TCPStore) -> None:
    master.set("key", "value")

    def body() -> int:
        try:
            master.get("key")
        except StoreError as error:
            return 7 if "after fork" in str(error) else 8
        return 9

    assert exit_code(forked(body)) == 7
    assert master.get("key") == b"value"


# Bad clients


def talk(port: int, *parts: bytes) -> bytes:
    """Send parts on one connection; return the bytes that come until its end, or until none come."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
        for part in parts:
            sock.sendall(part)
        received = b""
        try:
            while data := sock.recv(1 << 16):
                received += data
        except ConnectionResetError:
            pass
        return received


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((b"GET / HTTP/1.1\r\n\r\n",), "unknown query 71"),
        ((PING,), "PING from a client that has not said hello"),
        ((b"\x00\x01\x02\x03\x04",), "hello with magic"),
        ((HELLO, b"\x03" + struct.pack("<Q", 1 << 62)), "key length"),
        ((HELLO, b"\x01" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 1 << 40)), "value length"),
        ((HELLO, b"\x05" + struct.pack("<Q", 1 << 40)), "number of keys"),
        ((HELLO, b"\xff" * 100), "unknown query 255"),
    ],
)
def test_bad_frames_close_only_their_connection(
    master: dist2.TCPStore, parts: tuple[bytes, ...], words: str
) -> None:
    other = join(master)
    with logged() as logs:
        assert talk(master.port, *parts) == b""
        other.set("key", "value")
        assert master.get("key") == b"value"
    (entry,) = [log for log in logs if "closed the connection" in log["event"]]
    assert words in entry["event"]
    assert entry["port"] == master.port
    assert entry["peer"].startswith("127.0.0.1:")
    other.close()


def test_good_frames_before_bad_ones_are_answered(master: dist2.TCPStore) -> None:
    with socket.create_connection(("127.0.0.1", master.port), timeout=5) as sock:
        sock.sendall(HELLO + PING)
        assert sock.recv(4) == struct.pack("<I", 7)
        sock.sendall(b"\xff")
        assert sock.recv(4) == b""


def test_counting_on_text_ends_the_connection_of_torchs_client(master: dist2.TCPStore) -> None:
    store = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=30), wait_for_workers=False)
    store.set("text", "no number")
    with pytest.raises(dist.DistNetworkError):
        store.add("text", 1)
    assert master.get("text") == b"no number"


@pytest.mark.parametrize("host", [server, torch_server])
def test_a_server_that_ends_during_an_addition_is_gone(host: Callable[[], Any]) -> None:
    serving = host()
    store = join(serving)
    store.set("text", "1")
    if isinstance(serving, dist2.TCPStore):
        serving.close()
    del serving
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreConnectionError, match="was closed"):
            store.add("text", 1)
    in_time(time.monotonic() - start, 0.5)
    store.close()


def test_an_addition_looks_no_longer_than_a_heartbeat_for_a_host_that_has_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    def vanished(self: Connection, request: Request, deadline: Deadline) -> None:
        raise StoreConnectionError("its host has not answered")

    def attempt(address: object, deadline: Deadline, *_: object) -> None:
        limits.append(deadline.remaining_s())
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setenv("DIST2_HEARTBEAT", "2")
    with closing(server()) as store:
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "ask", vanished)
            patched.setattr(Connection, "attempt", attempt)
            with pytest.raises(StoreConnectionError, match="has not answered"):
                store.add("count", 1)
        assert [limit is not None and limit <= 2 for limit in limits] == [True]


def test_a_server_that_ends_between_two_connections_is_gone() -> None:
    """A connection is dropped after a late answer; a server that had listened is not waited for again."""
    ending = server()
    store = join(ending)
    client = store._required_link().client
    assert client._working is not None
    client._working.close()
    client._working = None
    ending.close()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreConnectionError, match=r"was closed: Connection refused"):
            store.check(["key"])
    in_time(time.monotonic() - start, 0.5)
    store.close()


def test_connections_to_torchs_server_are_found_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as peer, listener.accept()[0]:
            waiting = _accepted_at(port)
            assert waiting[0] == {f"127.0.0.1:{peer.getsockname()[1]}"}
            monkeypatch.setattr("dist2.store.torch_server._DESCRIPTORS", Path("/nonexistent"))
            assert _accepted_at(port) == waiting


def test_strangers_who_stay_silent_are_sent_away(
    master: dist2.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tcp_server, "_SWEEP_S", 0.05)
    start = time.monotonic()
    assert talk(master.port, b"\x00\xce") == b""
    took_s = time.monotonic() - start
    assert took_s > 0.15
    in_time(took_s, 1.5)


def test_idle_strangers_hold_up_nobody(master: dist2.TCPStore) -> None:
    strangers = [socket.create_connection(("127.0.0.1", master.port)) for _ in range(100)]
    start = time.monotonic()
    master.set("key", "value")
    assert master.get("key") == b"value"
    in_time(time.monotonic() - start, 1)
    for stranger in strangers:
        stranger.close()


def test_a_client_that_reads_nothing_does_not_swell_the_server(master: dist2.TCPStore) -> None:
    master.set("large", b"x" * (1 << 20))
    assert master.check(["large"]), "it has arrived"
    serving = master._required_link().lease.server
    get = encode_request(Request(Query.GET, (b"/large",)))
    with socket.create_connection(("127.0.0.1", master.port)) as sock:
        sock.sendall(HELLO)
        sock.setblocking(False)
        asked = 0
        quiet = time.monotonic()
        while time.monotonic() - quiet < 0.2 and asked < 1 << 24:
            try:
                asked += sock.send(get * 1000)
                quiet = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert asked > 1 << 17, "thousands of answers are due"
        assert max(len(session.outgoing) for session in serving._sessions.values()) < 6 << 20
        assert master.get("large") == b"x" * (1 << 20), "others are served meanwhile"


def test_answers_that_were_held_up_come_in_the_end(master: dist2.TCPStore) -> None:
    master.set("large", b"x" * (3 << 20))
    assert master.check(["large"]), "it has arrived"
    get = encode_request(Request(Query.GET, (b"/large",)))
    with socket.create_connection(("127.0.0.1", master.port), timeout=5) as sock:
        sock.sendall(HELLO + get * 5 + PING)
        due = 5 * (8 + (3 << 20))
        received = 0
        while received < due:
            received += len(sock.recv(min(1 << 20, due - received)))
        assert sock.recv(4) == struct.pack("<I", 7)
        sock.sendall(PING)
        assert sock.recv(4) == struct.pack("<I", 7), "it is read from again"


@pytest.mark.parametrize("multi_tenant", [False, True])
def test_too_large_values_are_refused_before_they_are_sent(multi_tenant: bool) -> None:
    """torch's server, which stores share, hangs up on them: the store was lost for good."""
    with closing(dist2.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=multi_tenant)) as store:
        largest = bytes(8 << 20)
        store.multi_set(["key", "other"], [largest, largest])
        assert store.get("key") == largest
        words = f"value must have at most {8 << 20} bytes, got {9 << 20}"
        with pytest.raises(InvalidUsageError, match=words):
            store.set("key", bytes(9 << 20))
        with pytest.raises(InvalidUsageError, match="key must be shorter than 65536 bytes, got 65536"):
            store.set("k" * 65536, "")
        store.set("key", "still works")
        assert store.get("key") == b"still works"


# Shared servers


def test_stores_of_one_process_may_share_a_server() -> None:
    first = dist2.TCPStore("127.0.0.1", unused_port(), is_master=True, multi_tenant=True)
    second = dist2.TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True)
    second.set("key", "value")
    assert first.get("key") == b"value"
    first.close()
    assert second.get("key") == b"value"
    second.close()


def test_a_shared_server_serves_until_its_last_client_is_gone() -> None:
    master = dist2.TCPStore("127.0.0.1", unused_port(), is_master=True, multi_tenant=True)
    port = master.port
    client = join(master)
    master.set("key", "value")
    master.close()
    assert client.get("key") == b"value"
    again = dist2.TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)
    assert again.get("key") == b"value", "it was taken back, not made anew"
    again.close()
    client.close()


def test_clones_keep_the_server() -> None:
    master = server()
    clone = master.clone()
    master.close()
    clone.set("key", "value")
    assert clone.get("key") == b"value"
    clone.close()


def test_a_forgotten_store_closes_itself() -> None:
    forgotten = server()
    place = (forgotten.host, forgotten.port)
    socket.create_connection(place, 5).close()
    del forgotten
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, 5)


LEFT_OPEN = """
import dist2
store = dist2.TCPStore("127.0.0.1", 0, None, True)
store.set("key", "value")
"""


def test_a_store_that_is_open_at_the_end_of_the_process_closes_its_socket() -> None:
    ended = run([sys.executable, "-W", "always::ResourceWarning", "-c", LEFT_OPEN])
    assert ended.code == 0, ended
    assert "ResourceWarning" not in ended.errors, ended


def test_256_clients_meet_at_a_barrier(master: dist2.TCPStore) -> None:
    clients = [join(master) for _ in range(256)]

    def meet(client: dist2.TCPStore) -> int:
        count = client.add("arrived", 1)
        if count == 256:
            client.set("go", "")
        client.wait(["go"], 30)
        client.barrier("barrier", 256, 30)
        return count

    counts = together(*(lambda client=client: meet(client) for client in clients))
    assert sorted(counts) == list(range(1, 257))
    for client in clients:
        client.close()
