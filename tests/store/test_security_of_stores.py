"""Access to a store that is protected by a secret or by TLS, over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import trustme
from support import certificates
from support.captured_logs import logged, refusals_in
from support.stores import TIMEOUT, server, torch_server
from support.threads import together
from support.time_limits import in_time

import dist2
from dist2.errors import AuthenticationError, StoreConnectionError
from dist2.runtime.secret import Secret
from dist2.security.handshake import Caller, Listener, Plane
from dist2.security.refusals import refusals
from dist2.store import tcp_server

VALUE = "the secret of these tests"
SECRET = Secret(VALUE.encode())

Setter = Callable[..., None]


@pytest.fixture(autouse=True)
def _every_line_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist2.security.refusals._LINES_AT_ONCE", 10**6)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Setter:
    """Return a function that sets and unsets variables."""

    def set_to(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    set_to(DIST2_SECRET=VALUE, DIST2_JOB_ID="job")
    return set_to


@pytest.fixture
def master(settings: Setter) -> Iterator[dist2.TCPStore]:
    store = server()
    yield store
    store.close()


def join(store: dist2.TCPStore, **options: object) -> dist2.TCPStore:
    return dist2.TCPStore("127.0.0.1", store.port, timeout=options.pop("timeout", TIMEOUT), **options)


def counted(reason: str) -> int:
    return refusals.counts().get(("store", reason), 0)


def still_works(master: dist2.TCPStore) -> None:
    other = join(master)
    other.set("still", "works")
    assert master.get("still") == b"works"
    other.close()


def test_who_knows_the_secret_gets_in(master: dist2.TCPStore) -> None:
    other = join(master)
    other.set("key", "x" * 100_000)
    assert master.get("key") == b"x" * 100_000
    waiter = threading.Thread(target=lambda: other.wait(["later"]))
    waiter.start()
    assert other.add("count", 2) == 2, "a parked wait has the next call open another connection"
    master.set("later", "")
    waiter.join(10)
    assert not waiter.is_alive()
    other.close()


@pytest.mark.parametrize(
    ("variables", "words", "reason"),
    [
        ({"DIST2_SECRET": "another secret, as long"}, "it has another secret", "wrong_secret"),
        ({"DIST2_SECRET": None}, "asks for a secret: set the same DIST2_SECRET here", "no_secret_there"),
        ({"DIST2_JOB_ID": "other"}, "it belongs to another job", "other_job"),
    ],
)
def test_who_differs_is_refused_at_once_and_logged(
    master: dist2.TCPStore, settings: Setter, variables: dict[str, str | None], words: str, reason: str
) -> None:
    before = counted(reason)
    settings(**variables)
    with (
        logged() as logs,
        pytest.raises(AuthenticationError, match=words) as caught,
    ):
        join(master)
    assert VALUE not in str(caught.value)
    assert str(master.port) in str(caught.value)
    assert caught.value.reason == f"refused_there_{reason}"
    (entry,) = refusals_in(logs)
    assert entry["plane"] == "store"
    assert entry["reason"] == reason
    assert entry["peer"].startswith("127.0.0.1:")
    assert counted(reason) == before + 1
    settings(DIST2_SECRET=VALUE, DIST2_JOB_ID="job")
    still_works(master)


def test_a_server_without_the_secret_is_refused_by_the_client(settings: Setter) -> None:
    settings(DIST2_SECRET=None)
    open_server = server()
    try:
        settings(DIST2_SECRET=VALUE)
        before = counted("no_secret_here")
        with pytest.raises(AuthenticationError, match="it has no secret, and this process has"):
            join(open_server)
        assert counted("no_secret_here") == before + 1
        settings(DIST2_SECRET=None)
        still_works(open_server)
    finally:
        open_server.close()


def test_torchs_server_is_refused_by_a_client_with_a_secret(
    settings: Setter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist2.store.connection._HANDSHAKE_S", 0.1)
    theirs = torch_server()
    with pytest.raises(AuthenticationError, match=r"does not authenticate itself.*or is it torch's own"):
        dist2.TCPStore("127.0.0.1", theirs.port, timeout=TIMEOUT)


def test_torchs_client_is_refused_by_a_server_with_a_secret(master: dist2.TCPStore) -> None:
    with pytest.raises(RuntimeError):  # a DistError, or the failed check of an answer
        dist.TCPStore("127.0.0.1", master.port, None, False, timedelta(seconds=1), wait_for_workers=False)
    still_works(master)


def test_an_impostor_learns_nothing_and_is_found_out(settings: Setter) -> None:
    """A server without the secret answers as well as it can; the client sends it nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = bytearray()

        def answer() -> None:
            impostor = Listener(Secret(b"not the secret of the tests"), Plane.STORE, "job", "")
            connection, _ = listener.accept()
            with connection:
                opener = connection.recv(impostor.wanted, socket.MSG_WAITALL)
                connection.sendall(impostor.feed(opener))
                proof = connection.recv(48, socket.MSG_WAITALL)
                connection.sendall(proof[:11] + bytes([4]) + proof[12:])
                while data := connection.recv(1 << 16):
                    heard.extend(data)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AuthenticationError, match=r"its proof is wrong|sends something else"):
            dist2.TCPStore("127.0.0.1", listener.getsockname()[1], timeout=TIMEOUT)
        thread.join(10)
        assert not thread.is_alive()
        assert VALUE.encode() not in heard
        assert b"\x00\xce\xf7\x85\x3c" not in heard, "no query"


def test_a_recorded_handshake_opens_nothing_a_second_time(master: dist2.TCPStore) -> None:
    port = master.port
    caller = Caller(SECRET, Plane.STORE, "job", "", "")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(caller.opener)
        proof = caller.feed(sock.recv(48, socket.MSG_WAITALL))
        sock.sendall(proof)
        caller.feed(sock.recv(48, socket.MSG_WAITALL))
        assert caller.done
    before = counted("wrong_secret")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(caller.opener)
        assert len(sock.recv(48, socket.MSG_WAITALL)) == 48
        sock.sendall(proof)
        told = sock.recv(48, socket.MSG_WAITALL)
        assert told[11] == 5, "a refusal"
        assert sock.recv(1) == b""
    assert counted("wrong_secret") == before + 1
    still_works(master)


def test_nothing_is_read_before_the_handshake(master: dist2.TCPStore) -> None:
    """Requests behind a failed handshake are never executed."""
    caller = Caller(Secret(b"a wrong secret, but long"), Plane.STORE, "job", "", "")
    with socket.create_connection(("127.0.0.1", master.port), timeout=5) as sock:
        sock.sendall(caller.opener)
        proof = caller.feed(sock.recv(48, socket.MSG_WAITALL))
        key = b"\x02\x00\x00\x00\x00\x00\x00\x00/x"
        sock.sendall(proof + b"\x00\xce\xf7\x85\x3c" + b"\x01" + key + key)
        sock.recv(48, socket.MSG_WAITALL)
    still_works(master)
    assert not master.check(["x"])


def test_a_torchrun_agents_store_is_joined_without_the_secret(
    settings: Setter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist2.store.connection._HANDSHAKE_S", 0.1)
    agent = torch_server()
    settings(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent.port))
    store = dist2.TCPStore("127.0.0.1", agent.port, timeout=TIMEOUT, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"
    store.close()
    settings(MASTER_PORT=str(agent.port + 1))
    with pytest.raises(AuthenticationError):
        dist2.TCPStore("127.0.0.1", agent.port, timeout=TIMEOUT)


# Strangers


@pytest.mark.parametrize(
    ("secret", "says"), [(VALUE, b""), (VALUE, b"dist2-hs\x01"), (None, b""), (None, b"\x00")]
)
def test_a_thousand_idle_strangers_cost_nothing(
    settings: Setter, descriptors: None, secret: str | None, says: bytes
) -> None:
    settings(DIST2_SECRET=secret)
    master = server()
    worker = join(master)
    before = counted("crowded")
    strangers = []
    try:
        for _ in range(1000):
            stranger = socket.create_connection(("127.0.0.1", master.port), timeout=5)
            stranger.sendall(says)
            strangers.append(stranger)
        start = time.monotonic()
        for number in range(100):
            worker.set(f"key{number}", "value")
            assert master.get(f"key{number}") == b"value"
        late = join(master)
        late.set("late", "but in")
        assert master.get("late") == b"but in"
        assert time.monotonic() - start < 3
        assert len(master._required_link().lease.server._strangers) <= tcp_server.MAX_STRANGERS
        assert counted("crowded") - before >= 700
        late.close()
    finally:
        for stranger in strangers:
            stranger.close()
        worker.close()
        master.close()


def test_members_that_come_all_at_once_are_no_strangers(
    master: dist2.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_STRANGERS", 4)
    stores: list[dist2.TCPStore] = together(*[lambda: join(master)] * 24)
    for store in stores:
        store.close()


def test_a_handshake_that_stops_half_way_ends(
    master: dist2.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HELLO_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tcp_server, "_SWEEP_S", 0.05)
    caller = Caller(SECRET, Plane.STORE, "job", "", "")
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", master.port), timeout=5) as sock:
        sock.sendall(caller.opener)
        assert len(sock.recv(48, socket.MSG_WAITALL)) == 48
        assert sock.recv(1) == b""
    took_s = time.monotonic() - start
    assert took_s > 0.15
    in_time(took_s, 1.5)


# TLS


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=[VALUE, None], ids=["secret", "open"])
def encrypted(
    request: pytest.FixtureRequest, settings: Setter, authority: trustme.CA, tmp_path: Path
) -> Iterator[dist2.TCPStore]:
    files = certificates.make(tmp_path / "member", authority)
    settings(DIST2_SECRET=request.param, **files.variables)
    store = server()
    yield store
    store.close()


def without_tls(settings: Setter) -> None:
    settings(DIST2_TLS_CERT=None, DIST2_TLS_KEY=None, DIST2_TLS_CA=None)


def test_members_with_certificates_meet(
    encrypted: dist2.TCPStore, settings: Setter, authority: trustme.CA, tmp_path: Path
) -> None:
    settings(**certificates.make(tmp_path / "other", authority).variables)
    other = join(encrypted)
    value = bytes(range(256)) * 20_000
    for key in ("a", "b", "c"):
        other.set(key, value)
    assert encrypted.multi_get(["a", "b", "c"]) == [value] * 3
    assert other.multi_get(["a", "b", "c"]) == [value] * 3
    assert [other.add("count", 1) for _ in range(50)] == list(range(1, 51))
    other.close()


def test_the_store_is_encrypted(encrypted: dist2.TCPStore) -> None:
    """A relay between client and server sees none of the stored values."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", encrypted.port))
            back = threading.Thread(target=copy, args=(far, near))
            back.start()
            copy(near, far)
            back.join()
            near.close()
            far.close()

        def copy(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(1 << 16):
                    seen.extend(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        thread = threading.Thread(target=relay)
        thread.start()
        store = dist2.TCPStore("127.0.0.1", listener.getsockname()[1], timeout=TIMEOUT)
        store.set("key", "plain words")
        assert encrypted.get("key") == b"plain words"
        store.close()
        thread.join(10)
    assert not thread.is_alive()
    assert len(seen) > 500
    assert b"plain words" not in seen


def test_who_has_no_certificate_is_refused(encrypted: dist2.TCPStore, settings: Setter) -> None:
    before = counted("no_tls_there")
    without_tls(settings)
    settings(DIST2_SECRET=None)
    with pytest.raises(AuthenticationError, match="it speaks TLS, set DIST2_TLS_CERT"):
        join(encrypted)
    assert counted("no_tls_there") == before + 1


def test_a_certificate_of_another_authority_is_refused(
    encrypted: dist2.TCPStore, settings: Setter, authority: trustme.CA, tmp_path: Path
) -> None:
    before = counted("tls")
    theirs = certificates.make(tmp_path / "theirs")
    settings(**theirs.variables)
    with pytest.raises(AuthenticationError, match="certificate verify failed"):
        join(encrypted)
    # It trusts the server, but the server does not trust it.
    ours = certificates.make(tmp_path / "ours", authority)
    settings(DIST2_TLS_CA=ours.variables["DIST2_TLS_CA"])
    with pytest.raises(AuthenticationError, match="unknown ca"):
        join(encrypted)
    settings(**ours.variables)
    join(encrypted).close()  # an accepted client is handled after the refused ones were counted
    assert counted("tls") >= before + 2


def test_a_server_without_tls_is_refused(settings: Setter, tmp_path: Path, authority: trustme.CA) -> None:
    plain = server()
    before = counted("tls_unexpected")
    settings(**certificates.make(tmp_path / "member", authority).variables)
    with pytest.raises(AuthenticationError, match="does not authenticate itself"):
        join(plain)
    assert counted("tls_unexpected") > before
    plain.close()


def test_a_key_that_others_may_read_is_refused(
    settings: Setter, tmp_path: Path, authority: trustme.CA
) -> None:
    files = certificates.make(tmp_path / "member", authority).variables
    Path(files["DIST2_TLS_KEY"]).chmod(0o644)
    settings(**files)
    with pytest.raises(dist2.InvalidUsageError, match="chmod 600"):
        server()


def test_closing_an_encrypted_store_frees_who_waits(encrypted: dist2.TCPStore) -> None:
    other = join(encrypted)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            other.wait(["never"])
        except dist2.StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    other.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], (StoreConnectionError, dist2.StoreError))
