"""`exchange`: one HTTP request on a connection of its own, over TCP, TLS or a Unix socket.

A question about the whole job is a request for each of thousands of ranks, so its CPU time matters:
`urllib.request` takes more than twice as much. The head travels with the body, in one packet. The request is
of HTTP/1.0, so the server sends no chunks and closes the connection at the end of its answer. Redirects are
not followed: the token would go elsewhere.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import SplitResult, unquote, urlsplit

import attrs

from dist2.errors import InvalidUsageError

MOST_HEAD = 64 << 10
RECEIVED = 256 << 10
_ALLOWED = re.compile(r"[!-~]*")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r?\n")


@attrs.frozen
class Reply:
    """An answer.

    Attributes:
        status: ``200``.
        headers: By name in lower case.
        body: All of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def exchange(
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    timeout_s: float,
    tls: ssl.SSLContext | None,
    most: int,
) -> Reply:
    """Return the answer to a GET, or with a body to a POST.

    Args:
        url: ``http://``, ``https://``, or ``unix://`` and the quoted path of a socket, with the path.
        headers: Beside those of the connection.
        body: What to send.
        timeout_s: Limit of each wait for the server.
        tls: For https; None trusts the authorities of the system.
        most: Bytes of an answer at most.

    Raises:
        InvalidUsageError: The URL has characters that a request cannot have.
        OSError: The server cannot be reached, or its answer is none, too long, or cut off.
    """
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    host = "localhost" if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
    if not _ALLOWED.fullmatch(target + host):
        raise InvalidUsageError(f"url must be printable ASCII without spaces, got {url!r}")
    method = "GET" if body is None else "POST"
    lines = [
        f"{method} {target} HTTP/1.0",
        f"Host: {host}",
        *(f"{name}: {headers[name]}" for name in headers),
    ]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    with _connected(parts, timeout_s, tls) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        return _reply(_received(sock, most), url)


def _connected(parts: SplitResult, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    if parts.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(unquote(parts.netloc))
        except BaseException:
            sock.close()
            raise
        return sock
    is_encrypted, host = parts.scheme == "https", parts.hostname or ""
    sock = socket.create_connection((host, parts.port or (443 if is_encrypted else 80)), timeout_s)
    if not is_encrypted:
        return sock
    try:
        return (tls or ssl.create_default_context()).wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def _received(sock: socket.socket, most: int) -> bytearray:
    received = bytearray()
    while part := sock.recv(RECEIVED):
        received += part
        if len(received) > most + MOST_HEAD:
            raise OSError(f"the answer has more than {most} bytes")
    return received


def _reply(received: bytearray, url: str) -> Reply:
    status = _STATUS.match(received)
    end = re.compile(rb"\r?\n\r?\n").search(received, 0, MOST_HEAD)
    if status is None or end is None:
        _cut_off(f"{url} gave no answer of HTTP" if received else "the server closed the connection")
    lines = received[status.end() : end.start()].decode("latin-1").splitlines()
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body, length = bytes(memoryview(received)[end.end() :]), headers.get("content-length", "")
    if length.isdigit() and len(body) < int(length):
        _cut_off(f"the server closed the connection after {len(body)} of {length} bytes")
    return Reply(int(status[1]), headers, body)


def _cut_off(why: str) -> NoReturn:
    raise ConnectionResetError(why)
