"""Ask a control plane, with its token."""

from __future__ import annotations

import json
import socket
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from io import BytesIO
from time import sleep
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from dist2.errors import InvalidUsageError
from dist2.runtime.config import Config
from dist2.security.job_secrets import JobSecrets
from observability.access import NEEDS_TLS, is_loopback, job_token

MAX_ANSWER = 64 << 20
"""An answer is read up to this many bytes."""
TRIES = 3
"""A control plane that has too many requests is asked so often, each time after the pause that it wants."""


class _UnixConnection(HTTPConnection):
    """HTTP over the Unix socket whose quoted path is the host."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(unquote(self.host))


class Asker:
    """Sends requests on behalf of this process: with its certificates, by no proxy, and to no other place.

    A question about the whole job is a request for each of thousands of ranks: `urllib.request` takes more
    CPU time for each.

    Args:
        secrets: Its secret and certificates; by default those of the environment.
    """

    def __init__(self, secrets: JobSecrets | None = None) -> None:
        if secrets is None:
            secrets = JobSecrets.of(Config.from_environment())
        self.secrets = secrets
        self._tls = None if secrets.tls is None else secrets.tls.context(False)

    def ask(
        self, url: str, token: str | None = None, *, body: object = None, timeout_s: float = 5.0
    ) -> bytes:
        """Return the answer of a control plane to a GET, or with a body to a POST of it as JSON.

        Args:
            url: Whole, with the path.
            token: Of that control plane; by default the one derived from the secret, if there is one.
            body: Plain data; None sends none.
            timeout_s: Limit of each wait for the server.

        Raises:
            InvalidUsageError: The URL or the token cannot be one, or the URL leaves this host unencrypted.
            urllib.error.HTTPError: The control plane refused; 401 for a wrong token.
            OSError: It cannot be reached.
        """
        require_http(url)
        # The error does not quote it, as errors get into logs.
        if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable()):
            raise InvalidUsageError("token must be a str of printable ASCII, as Server.token is")
        bearer = job_token(self.secrets) if token is None else token
        host = urlsplit(url).hostname or ""
        if bearer is not None and url.startswith("http://") and not is_loopback(host):
            what = f"{host!r} is not this host, and the URL does not begin with https://"
            raise InvalidUsageError(f"{what}: {NEEDS_TLS}")
        request = _request(url, bearer, body)
        for _ in range(TRIES - 1):
            try:
                return self._send(url, request, timeout_s)
            except HTTPError as refusal:
                pause = refusal.headers.get("Retry-After", "")
                if refusal.code != HTTPStatus.TOO_MANY_REQUESTS or not pause.isdigit() or body is not None:
                    raise
            sleep(min(int(pause), timeout_s))
        return self._send(url, request, timeout_s)

    def _send(self, url: str, request: bytes, timeout_s: float) -> bytes:
        connection = self._connection(url, timeout_s)
        try:
            # Head and body at once: `connection.request` sends two packets, for which the server wakes twice.
            connection.send(request)
            with connection.response_class(connection.sock) as response:
                response.begin()
                answer = response.read(MAX_ANSWER)
                if response.length:
                    raise OSError(f"{response.length} more bytes: cut off, or more than {MAX_ANSWER} in all")
        except (OSError, HTTPException) as error:
            raise URLError(error) from error
        finally:
            connection.close()
        if response.status < HTTPStatus.MULTIPLE_CHOICES:
            return answer
        reason = answer.decode(errors="replace") or "refused"
        raise HTTPError(url, response.status, reason, response.headers, BytesIO(reason.encode()))

    def _connection(self, url: str, timeout_s: float) -> HTTPConnection:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return _UnixConnection(parts.netloc, timeout=timeout_s)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return HTTPSConnection(host, parts.port, timeout=timeout_s, context=self._tls)
        return HTTPConnection(host, parts.port, timeout=timeout_s)


def _request(url: str, bearer: str | None, body: object) -> bytes:
    """Return the bytes of a request."""
    parts = urlsplit(url)
    host = "localhost" if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidUsageError(f"url must be printable ASCII without spaces, got {url!r}")
    head = [f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", f"Host: {host}", "Connection: close"]
    if bearer is not None:
        head.append(f"Authorization: Bearer {bearer}")
    data = b"" if body is None else json.dumps(body).encode()
    if data:
        head.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*head, "", ""]).encode() + data


def fetch(url: str, token: str | None = None, *, timeout_s: float = 5.0) -> bytes:
    """Return the answer of a control plane.

    Args:
        url: `Server.url` and a path.
        token: `Server.token`; by default the one derived from ``DIST2_SECRET``, where that is set.
        timeout_s: Limit of each wait for the server.

    Raises:
        InvalidUsageError: The URL or the token cannot be one, or the URL leaves this host unencrypted.
        urllib.error.HTTPError: The control plane refused; 401 for a wrong token.
        OSError: It cannot be reached.

    Examples:
        >>> with observability.start(pg, announce=False) as server:
        ...     answer = observability.fetch(server.url + "/healthz", server.token)
        >>> answer.startswith(b"{")
        True
    """
    require_http(url)
    return Asker().ask(url, token, timeout_s=timeout_s)


def require_http(url: str) -> None:
    """Raise for a URL that cannot be one of a control plane."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://", "unix://")):
        raise InvalidUsageError(f"url must start with http://, https:// or unix://, got {url!r}")
