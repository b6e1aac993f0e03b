"""Access to a control plane whose process has a secret or TLS, over real HTTP."""

from __future__ import annotations

import json
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import attrs
import httpx
import pytest
from click.testing import CliRunner
from support import certificates
from support.captured_logs import logged, refusals_in
from support.time_limits import in_time

import dist2
import observability
from dist2.cli.app import cli
from dist2.errors import InvalidUsageError
from dist2.runtime.config import Config
from dist2.runtime.other_process import Process
from dist2.security.refusals import refusals
from observability import token_files
from observability.commands.control_plane import NO_ANSWER
from observability.group_status import GroupStatusRegistry
from observability.incidents import folders
from observability.metrics import instrument as metrics
from observability.server import Server, serving

SECRET = "the secret of these tests"


@pytest.fixture(autouse=True)
def _every_line_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist2.security.refusals._LINES_AT_ONCE", 10**6)


@pytest.fixture
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST2_SECRET", SECRET)
    monkeypatch.setenv("DIST2_JOB_ID", "job")


@pytest.fixture
def server(_secret: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(metrics, "statuses", GroupStatusRegistry())  # other tests break groups
    with observability.start() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


def counted(reason: str) -> int:
    return refusals.counts().get(("control", reason), 0)


def ask(client: httpx.Client, authorization: str, path: str = "/metrics") -> httpx.Response:
    return client.get(path, headers={"Authorization": authorization})


# One token a job


def test_all_ranks_of_a_job_have_one_token(server: Server) -> None:
    with observability.start() as other:
        assert other.token == server.token
    assert len(server.token) >= 32
    assert SECRET not in server.token


@pytest.mark.parametrize("name", ["DIST2_SECRET", "DIST2_JOB_ID"])
def test_another_secret_or_job_has_another_token(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "not that of the others")
    before = counted("wrong_token")
    with pytest.raises(HTTPError, match=r"401: .*needs the job's DIST2_SECRET and DIST2_JOB_ID"):
        observability.read_metrics(server.url)
    assert counted("wrong_token") == before + 1


def test_who_knows_the_secret_need_not_be_told_the_token(server: Server) -> None:
    before = refusals.counts()
    assert observability.read_metrics(server.url).value("dist2_build_info") == 1
    assert b'"ok": true' in observability.fetch(f"{server.url}/healthz")
    assert refusals.counts() == before


def test_errors_are_answers_as_well(server: Server) -> None:
    with pytest.raises(HTTPError, match="404"):
        observability.fetch(f"{server.url}/nothing")
    with pytest.raises(HTTPError, match="limit"):
        observability.fetch(f"{server.url}/works?limit=x")


@pytest.mark.usefixtures("_secret")
def test_a_token_that_was_given_takes_the_place_of_the_derived_one() -> None:
    with observability.start(token="chosen") as server:
        assert server.token == "chosen"
        assert observability.read_metrics(server.url, "chosen").value("dist2_build_info") == 1
        with pytest.raises(HTTPError, match="401"):
            observability.read_metrics(server.url)


def test_a_token_is_only_sent_inside_of_this_host_or_encrypted(server: Server) -> None:
    for token in (None, server.token):
        with pytest.raises(InvalidUsageError, match=r"'203\.0\.113\.1' is not this host.*DIST2_TLS_CERT"):
            observability.fetch("http://203.0.113.1:9400/metrics", token)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [({}, "no_token"), ({"Authorization": "Bearer x"}, "wrong_token")],
    ids=["none", "wrong"],
)
def test_a_refusal_is_logged_and_counted(client: httpx.Client, headers: dict[str, str], reason: str) -> None:
    before = counted(reason)
    with logged() as logs:
        assert client.get("/metrics", headers=headers).status_code == 401
    assert counted(reason) == before + 1
    (entry,) = refusals_in(logs)
    assert entry["peer"].startswith("127.0.0.1:")
    assert entry["reason"] == reason


# TLS


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_it_needs_tls(host: str) -> None:
    with pytest.raises(InvalidUsageError, match=f"host='{host}'.*DIST2_TLS_CERT, DIST2_TLS_KEY"):
        observability.start(host=host)


def test_with_tls_it_may_listen_everywhere(encrypted: tuple[Server, ssl.SSLContext]) -> None:
    with observability.start(host="0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert observability.read_metrics(url, server.token).value("dist2_build_info") == 1
    with (
        dist2.new_group("fake", 20, rank=0, world_size=2) as pg,
        observability.start(pg, host="0.0.0.0") as server,
    ):
        assert server.url.startswith("https://127.0.0.1:"), "other ranks cannot connect to 0.0.0.0"


@pytest.fixture(params=["tls", "both"])
def encrypted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Server, ssl.SSLContext]]:
    variables = certificates.make(tmp_path / "member").variables
    for name, path in variables.items():
        monkeypatch.setenv(name, path)
    if request.param == "both":
        monkeypatch.setenv("DIST2_SECRET", SECRET)
    trusting = ssl.create_default_context(cafile=variables["DIST2_TLS_CA"])
    trusting.check_hostname = False
    with observability.start() as server:
        yield server, trusting


def test_with_certificates_it_is_encrypted(encrypted: tuple[Server, ssl.SSLContext]) -> None:
    server, trusting = encrypted
    assert server.url.startswith("https://127.0.0.1:")
    assert server.page_url.startswith("https://")
    assert observability.read_metrics(server.url, server.token).value("dist2_build_info") == 1
    with httpx.Client(base_url=server.url, trust_env=False, verify=trusting) as browser:
        assert browser.get("/metrics").status_code == 401
        assert ask(browser, f"Bearer {server.token}").status_code == 200


def test_a_command_without_the_authority_of_the_job_is_told_the_remedy(
    encrypted: tuple[Server, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = encrypted
    for name in ("DIST2_TLS_CERT", "DIST2_TLS_KEY", "DIST2_TLS_CA"):
        monkeypatch.delenv(name)
    ended = CliRunner().invoke(cli, ["why", server.url])
    assert ended.exit_code == NO_ANSWER
    assert "is not trusted here" in ended.output
    assert "SSL_CERT_FILE to the certificate of its CA" in ended.output


def test_who_does_not_speak_tls_gets_nothing(encrypted: tuple[Server, ssl.SSLContext]) -> None:
    server, _ = encrypted
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        try:
            assert not sock.recv(1000).startswith(b"HTTP")
        except ConnectionResetError:
            return


# Strangers


def connect(server: Server, says: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10)
    sock.sendall(says)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1000)
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("says", "events"),
    [(b"", 0), (b"GET /metrics HTTP/1.1\r\nHost: a\r\n", 1)],
    ids=["nothing: browsers connect in advance", "half a request"],
)
def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, says: bytes, events: int) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)
    before = counted("silent")
    with observability.start() as server, connect(server, says) as sock:
        start = time.monotonic()
        assert is_closed(sock)
        assert time.monotonic() - start < 5
        assert counted("silent") == before + events


def test_a_head_without_an_end_is_closed(server: Server) -> None:
    before = counted("long")
    with connect(server, b"GET / HTTP/1.1\r\nHost: a\r\nX: ") as sock:
        with suppress(ConnectionError):  # closed meanwhile
            for _ in range(16):
                sock.sendall(b"x" * (serving.MAX_HEAD // 8))
        assert is_closed(sock)
    assert counted("long") == before + 1


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)


@pytest.mark.usefixtures("_impatient")
def test_who_does_not_end_its_tls_handshake_is_closed(encrypted: tuple[Server, ssl.SSLContext]) -> None:
    server, _ = encrypted
    start = time.monotonic()
    with connect(server, b"\x16\x03\x01") as sock:
        assert is_closed(sock)
        assert time.monotonic() - start < 5


def test_who_stops_in_its_second_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)
    whole = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    with observability.start() as server, connect(server, whole) as sock:
        assert b"401" in sock.recv(100_000)
        sock.sendall(whole[:20])
        start = time.monotonic()
        while not is_closed(sock):
            assert time.monotonic() - start < 5


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01"], ids=["nothing", "half a handshake"])
def test_a_client_is_answered_however_many_handshakes_are_under_way(
    encrypted: tuple[Server, ssl.SSLContext], says: bytes
) -> None:
    server, _ = encrypted
    strangers = [connect(server, says) for _ in range(serving.MAX_WAITING + 50)]
    try:
        assert observability.read_metrics(server.url, server.token).value("dist2_build_info") == 1
    finally:
        for sock in strangers:
            sock.close()


def test_a_client_is_answered_however_many_strangers_are_connected(server: Server) -> None:
    strangers = [connect(server) for _ in range(serving.MAX_CLIENTS + 50)]
    try:
        assert observability.read_metrics(server.url).value("dist2_build_info") == 1
        assert counted("crowded") > 0
    finally:
        for sock in strangers:
            sock.close()


# Readers that know the token


def probe(server: Server) -> None:
    began = time.monotonic()
    assert b'"status"' in observability.fetch(f"{server.url}/healthz", timeout_s=20)
    in_time(time.monotonic() - began, 1.0)


def test_slow_readers_do_not_hold_up_probes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps are made beside the thread that answers probes."""
    made, enough = [], threading.Event()

    def encode(*_: object) -> bytes:
        made.append(1)
        assert enough.wait(30)
        return b"x" * (16 << 20)

    monkeypatch.setattr("observability.server.app.encode", encode)
    bears = f"Host: a\r\nAuthorization: Bearer {server.token}\r\n\r\n"
    request = f"GET /flight_recorder HTTP/1.1\r\n{bears}"
    readers = [connect(server, request.encode()) for _ in range(30)]
    try:
        probe(server)
        enough.set()
        answers = [reader.recv(15) for reader in readers]  # and no more
        assert answers == [b"HTTP/1.1 200 OK"] * 30
        probe(server)
        assert len(made) < 5, "one dump is for all that wait for it"
    finally:
        enough.set()
        for reader in readers:
            reader.close()


# Commands of the same user


def test_commands_find_the_token_of_a_job_of_their_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"dist2-{os.getuid()}"
    with observability.start(announce=False) as server:
        (file,) = folder.iterdir()
        assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
        for url in (server.url, f"{server.url}/", server.url.replace("127.0.0.1", "localhost")):
            asked = CliRunner().invoke(cli, ["why", url])
            assert (asked.exit_code, asked.stderr) == (0, ""), asked.output
        for secret in (["--token", server.token, server.url], [server.page_url]):
            asked = CliRunner().invoke(cli, ["why", *secret])
            assert asked.exit_code == 0
            assert "can see in ps" in asked.stderr
        file.chmod(0o644)
        assert token_files.token_at(server.url) is None, "another user may have changed it"
        file.chmod(0o600)
        held = json.loads(file.read_text())
        process = attrs.evolve(Process.here(), started=1)
        file.write_text(json.dumps({**held, "process": process.text}))
        assert token_files.token_at(server.url) is None, "another process may listen there by now"
        with observability.start(announce=False):
            assert not file.exists(), "it is of a process that has ended"
    assert not folder.exists()


@pytest.mark.parametrize("command", ["why", "top", "trace"])
def test_a_token_in_the_query_of_a_url_is_refused(command: str, server: Server) -> None:
    ended = CliRunner().invoke(cli, [command, f"{server.url}/?token={server.token}"])
    assert ended.exit_code == NO_ANSWER
    assert "all users of this host can see in ps" in ended.output
    assert "use --token-file or DIST2_CONTROL_TOKEN" in ended.output
    assert server.token not in ended.output


def test_a_folder_that_another_user_has_taken_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All users may make folders in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = f"dist2-{os.getuid()}"
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(0o777)
    root = folders.root_of(Config())
    assert root == tmp_path / f"{name}.1" / "incidents"
    with observability.start(announce=False) as server:
        assert CliRunner().invoke(cli, ["why", server.url]).exit_code == 0
        assert server.url in CliRunner().invoke(cli, ["ps"]).output
        assert folders.joined(root, "job", "x").path.parent == root
    assert list((tmp_path / name).iterdir()) == []
    monkeypatch.setattr(token_files, "NAMES", 1)
    taken = folders.root_of(Config())
    assert taken == tmp_path / name / "incidents"
    with pytest.raises(PermissionError, match="others have access to"):
        folders.joined(taken, "job", "x")


def test_no_token_is_written_where_another_user_may_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(token_files, "NAMES", 1)
    folder = tmp_path / f"dist2-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with observability.start(announce=False) as server:
        assert list(folder.iterdir()) == []
        assert token_files.token_at(server.url) is None
        monkeypatch.setenv("DIST2_CONTROL_TOKEN", server.token)
        asked = CliRunner().invoke(cli, ["why", server.url])
        assert (asked.exit_code, asked.stderr) == (0, ""), asked.output
        with observability.start(announce=False) as second:
            assert second.token == server.token
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with observability.start(announce=False):
        assert list(tmp_path.iterdir()) == [folder]
