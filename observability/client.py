"""Ask a control plane, with its token."""

from __future__ import annotations

from io import BytesIO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from dist2.errors import InvalidUsageError
from dist2.runtime.config import Config
from dist2.security.entrance import Credentials
from observability.access import NEEDS_TLS, is_loopback, job_token


def fetch(url: str, token: str | None = None, *, timeout_s: float = 5.0) -> bytes:
    """Return what a control plane answers.

    Args:
        url: `Server.url` and a path.
        token: `Server.token`; by default what is derived from ``DIST2_SECRET``, where that is set.
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
    credentials = Credentials.of(Config.from_environment())
    bearer = job_token(credentials) if token is None else token
    host = urlsplit(url).hostname or ""
    if bearer is not None and url.startswith("http://") and not is_loopback(host):
        raise InvalidUsageError(f"{url!r} is not encrypted and {host!r} is not this host: {NEEDS_TLS}")
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    try:
        with _opener(credentials).open(Request(url, headers=headers), timeout=timeout_s) as response:
            body: bytes = response.read()
            return body
    except HTTPError as error:
        with error:
            body = error.read()
        reason = body.decode(errors="replace") or "refused"
        raise HTTPError(url, error.code, reason, error.headers, BytesIO(body)) from None


def require_http(url: str) -> None:
    """Raise for what is no URL of a web server."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidUsageError(f"url must start with http:// or https://, got {url!r}")


def _opener(credentials: Credentials) -> OpenerDirector:
    """Return what makes requests: without the proxy of the environment, which is not for our own ranks."""
    handlers: list[HTTPSHandler | ProxyHandler] = [ProxyHandler({})]
    if credentials.tls is not None:
        handlers.append(HTTPSHandler(context=credentials.tls.context(False)))
    return build_opener(*handlers)
