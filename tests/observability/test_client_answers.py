"""Requests of commands and ranks to a control plane: what is sent, and which answers are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.error import HTTPError, URLError

import pytest

from dist2.errors import InvalidUsageError
from observability import client
from observability.client import Asker

SOON_S = 20.0


@contextmanager
def answering(*packets: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Serve one connection with an answer in several packets; yield the URL, and what returns the request."""
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(SOON_S)
                while b"\r\n\r\n" not in received:
                    received.extend(sock.recv(1 << 16))
                for packet in packets:
                    sock.sendall(packet)

        thread = threading.Thread(target=serve)
        thread.start()

        def request() -> bytes:
            thread.join(SOON_S)
            return bytes(received)

        yield f"http://127.0.0.1:{listener.getsockname()[1]}", request
        thread.join(SOON_S)


def ask(url: str, token: str | None = "t", body: object = None) -> bytes:
    return Asker().ask(url, token, body=body, timeout_s=SOON_S)


def test_a_request_has_its_head_and_its_body() -> None:
    with answering(b"HTTP/1.0 200 OK\r\nContent-", b"Length: 4\r\nX-Kind: a: b\r\n\r\n", b"bo", b"dy") as (
        url,
        request,
    ):
        assert ask(f"{url}/path?x=1", body=[1]) == b"body"
        head = request().partition(b"\r\n\r\n")[0].decode().split("\r\n")
        assert head[0] == "POST /path?x=1 HTTP/1.1"
        assert {
            f"Host: {url[7:]}",
            "Authorization: Bearer t",
            "Content-Length: 3",
            "Connection: close",
        } < set(head)


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    with answering(b"HTTP/1.1 200\r\n\r\n", b"all of it") as (url, request):
        assert ask(url) == b"all of it"
        assert request().startswith(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "Remote end closed connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\ncut", "6 more bytes: cut off"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2000\r\n\r\n" + bytes(2000), "more than 1000 in all"),
    ],
)
def test_what_is_no_answer_is_an_error_of_the_connection(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER", 1000)
    with answering(answer) as (url, _), pytest.raises(URLError, match=reason):
        ask(url)


@pytest.mark.parametrize("path", ["/a b", "/a\x00b", "/\u00fc"])
def test_a_path_cannot_end_the_line(path: str) -> None:
    with pytest.raises(InvalidUsageError, match="printable ASCII"):
        ask(f"http://127.0.0.1:1{path}")


def test_a_redirect_is_a_refusal_and_the_token_goes_nowhere_else() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\nelsewhere"
    with answering(moved) as (url, _), pytest.raises(HTTPError, match="elsewhere") as refused:
        Asker().ask(url, "t", timeout_s=SOON_S)
    assert (refused.value.code, refused.value.headers["location"]) == (302, "http://127.0.0.1:1/")
    refused.value.close()


def test_a_server_that_does_not_answer_in_time_is_an_error_with_that_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(URLError) as error:
            Asker().ask(url, "t", timeout_s=0.05)
        assert isinstance(error.value.reason, TimeoutError)
