"""Who gets an answer of a control plane whose process has a secret, or TLS, over real HTTP."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import certificates
import httpx
import pytest
import structlog

import observability
from dist2.errors import AuthenticationError
from dist2.secret import Secret
from dist2.security.refusals import refusals
from dist2.security.web import Visitor
from observability.board import Board
from observability.metrics import instrument as metrics
from observability.server import Server, serving
from observability.server import auth as auth_module

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
    monkeypatch.setattr(metrics, "board", Board())  # other tests break groups
    with observability.start() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


@pytest.fixture
def _afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients come from another host, as far as the server knows."""
    monkeypatch.setattr(auth_module, "_is_near", lambda request: False)


def counted(reason: str) -> int:
    return refusals.counts().get(("control", reason), 0)


def ask(client: httpx.Client, authorization: str, path: str = "/metrics") -> httpx.Response:
    return client.get(path, headers={"Authorization": authorization})


def proof_of(client: httpx.Client, visitor: Visitor) -> str:
    challenge = ask(client, visitor.opener)
    assert challenge.status_code == 401
    return visitor.prove(challenge.headers["www-authenticate"])


def visitor(secret: str = SECRET, job_id: str = "job", path: str = "/metrics") -> Visitor:
    return Visitor(Secret(secret.encode()), job_id, "GET", path)


@pytest.mark.usefixtures("_afar")
def test_who_knows_the_secret_needs_no_token(server: Server) -> None:
    before = refusals.counts()
    assert observability.read_metrics(server.url).value("dist2_build_info") == 1
    assert b'"ok": true' in observability.fetch(f"{server.url}/healthz")
    assert refusals.counts() == before, "a challenge is no refusal"


def test_the_token_is_not_sent_where_there_is_a_secret(server: Server) -> None:
    assert observability.read_metrics(server.url, "wrong").value("dist2_build_info") == 1


def test_errors_are_answers_as_well(server: Server) -> None:
    with pytest.raises(HTTPError, match="404"):
        observability.fetch(f"{server.url}/nothing")
    with pytest.raises(HTTPError, match="limit"):
        observability.fetch(f"{server.url}/works?limit=x")


@pytest.mark.parametrize(
    ("variables", "reason", "words"),
    [
        ({"DIST2_SECRET": "not the secret of the others"}, "wrong_secret", "it has another secret"),
        ({"DIST2_JOB_ID": "another"}, "other_job", "it belongs to another job"),
    ],
    ids=["other secret", "other job"],
)
def test_who_differs_learns_why(
    server: Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str, words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = counted(reason)
    with structlog.testing.capture_logs() as logs, pytest.raises(AuthenticationError, match=words):
        observability.read_metrics(server.url)
    assert counted(reason) == before + 1
    (entry,) = [each for each in logs if each["event"] == "connection_refused"]
    assert (entry["plane"], entry["reason"]) == ("control", reason)
    assert entry["peer"].startswith("127.0.0.1:")


def test_what_was_overheard_opens_nothing(client: httpx.Client) -> None:
    proof = proof_of(client, visitor())
    assert ask(client, proof, "/groups").status_code == 401, "it was for another path"
    assert ask(client, proof).status_code == 200
    before = counted("replayed")
    assert ask(client, proof).status_code == 401
    assert counted("replayed") == before + 1


def test_other_versions_are_refused(client: httpx.Client) -> None:
    before = counted("other_version")
    assert ask(client, 'Dist2 version="0"').status_code == 401
    assert counted("other_version") == before + 1


def test_an_answer_shows_that_it_comes_from_the_job(client: httpx.Client) -> None:
    caller = visitor()
    answer = ask(client, proof_of(client, caller))
    caller.check(answer.headers["authentication-info"], answer.status_code, answer.content)
    with pytest.raises(AuthenticationError):
        caller.check(answer.headers["authentication-info"], answer.status_code, answer.content + b"x")


def test_head_is_proved_like_get(client: httpx.Client) -> None:
    caller = Visitor(Secret(SECRET.encode()), "job", "HEAD", "/metrics")
    answer = client.head("/metrics", headers={"Authorization": proof_of(client, caller)})
    assert (answer.status_code, answer.content) == (200, b"")
    caller.check(answer.headers["authentication-info"], 200, b"")


def test_a_server_without_the_secret_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with observability.start(token="chosen") as server:
        request.getfixturevalue("_secret")
        before = counted("no_secret_here")
        with pytest.raises(AuthenticationError, match="it has no secret, and this process has"):
            observability.read_metrics(server.url, "chosen")
        assert counted("no_secret_here") == before + 1


# Those who cannot prove anything: browsers, Prometheus


def test_the_token_counts_on_this_host(server: Server, client: httpx.Client) -> None:
    assert ask(client, f"Bearer {server.token}").status_code == 200
    assert client.get(f"/metrics?token={server.token}").status_code == 200


@pytest.mark.usefixtures("_afar")
def test_a_token_that_was_not_chosen_does_not_count_elsewhere(server: Server, client: httpx.Client) -> None:
    before = counted("token_from_afar")
    refused = ask(client, f"Bearer {server.token}")
    assert refused.status_code == 401
    assert "read_metrics" in refused.json()["reason"]
    assert "Bearer" not in refused.headers["www-authenticate"]
    assert client.get(f"/?token={server.token}").status_code == 401
    assert counted("token_from_afar") == before + 2


@pytest.mark.usefixtures("_secret", "_afar")
def test_a_token_that_was_chosen_counts_everywhere() -> None:
    with (
        observability.start(token="chosen") as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        assert ask(client, "Bearer chosen").status_code == 200
        assert ask(client, "Bearer wrong").status_code == 401


@pytest.mark.parametrize(
    ("headers", "reason"),
    [({}, "no_token"), ({"Authorization": "Bearer x"}, "wrong_token")],
    ids=["none", "wrong"],
)
def test_a_refusal_is_logged_and_counted(client: httpx.Client, headers: dict[str, str], reason: str) -> None:
    before = counted(reason)
    with structlog.testing.capture_logs() as logs:
        assert client.get("/metrics", headers=headers).status_code == 401
    assert counted(reason) == before + 1
    (entry,) = [each for each in logs if each["event"] == "connection_refused"]
    assert entry["peer"].startswith("127.0.0.1:")
    assert entry["reason"] == reason


# TLS


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


@pytest.mark.usefixtures("_afar")
def test_under_tls_any_token_counts_elsewhere(encrypted: tuple[Server, ssl.SSLContext]) -> None:
    server, trusting = encrypted
    with httpx.Client(base_url=server.url, trust_env=False, verify=trusting) as browser:
        assert ask(browser, f"Bearer {server.token}").status_code == 200


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
    "says", [b"", b"GET /metrics HTTP/1.1\r\nHost: a\r\n"], ids=["nothing", "half a request"]
)
def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)
    before = counted("silent")
    with observability.start() as server, connect(server, says) as sock:
        start = time.monotonic()
        assert is_closed(sock)
        assert time.monotonic() - start < 5
        assert counted("silent") == before + 1


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)


@pytest.mark.usefixtures("_impatient")
def test_who_does_not_end_its_tls_handshake_is_closed(encrypted: tuple[Server, ssl.SSLContext]) -> None:
    server, _ = encrypted
    before, start = counted("silent"), time.monotonic()
    with connect(server, b"\x16\x03\x01") as sock:
        assert is_closed(sock)
        while counted("silent") == before:
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
    before = counted("crowded")
    strangers = [connect(server, says) for _ in range(serving.MAX_WAITING + 50)]
    try:
        assert observability.read_metrics(server.url, server.token).value("dist2_build_info") == 1
        assert counted("crowded") >= before + 50
        assert is_closed(strangers[0])
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
