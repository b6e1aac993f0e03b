"""One HTTP request over a connection of its own: what is sent, and which answers are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.error import HTTPError, URLError

import pytest

from dist2.errors import InvalidUsageError
from observability.client import Asker
from observability.http_exchange import exchange

SOON_S = 20.0
MOST = 1 << 20


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


def test_the_head_and_the_body_are_one_request() -> None:
    with answering(b"HTTP/1.0 200 OK\r\nContent-", b"Length: 4\r\nX-Kind: a: b\r\n\r\n", b"bo", b"dy") as (
        url,
        request,
    ):
        reply = exchange(f"{url}/path?x=1", {"Authorization": "Bearer t"}, b"sent", SOON_S, None, MOST)
        assert (reply.status, reply.body) == (200, b"body")
        assert reply.headers == {"content-length": "4", "x-kind": "a: b"}
        head, _, body = request().partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /path?x=1 HTTP/1.0"
        assert set(lines[1:]) == {f"Host: {url[7:]}", "Authorization: Bearer t", "Content-Length: 4"}
        assert body == b"sent"


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    with answering(b"HTTP/1.1 200\r\n\r\n", b"all of it") as (url, request):
        assert exchange(url, {}, None, SOON_S, None, MOST).body == b"all of it"
        assert request().startswith(b"GET / HTTP/1.0\r\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the server closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "gave no answer of HTTP"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n", "gave no answer of HTTP"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\ncut", "the connection after 3 of 9 bytes"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + bytes(70_000), "more than 1000 bytes"),
    ],
)
def test_what_is_no_answer_is_an_error_of_the_connection(answer: bytes, reason: str) -> None:
    with answering(answer) as (url, _), pytest.raises(OSError, match=reason):
        exchange(url, {}, None, SOON_S, None, 1000)


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: y", "/\u00fc"])
def test_a_path_cannot_end_the_line(path: str) -> None:
    with pytest.raises(InvalidUsageError, match="printable ASCII"):
        exchange(f"http://127.0.0.1:1{path}", {}, None, SOON_S, None, MOST)


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
