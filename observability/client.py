"""Ask a control plane: with proof of the job's secret where one is set, else with the token."""

from __future__ import annotations

from email.message import Message
from io import BytesIO
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

import attrs

from dist2.config import Config
from dist2.errors import AuthenticationError, InvalidUsageError
from dist2.secret import Secret
from dist2.security.entrance import Credentials
from dist2.security.web import STALE, Visitor

_ATTEMPTS = 3
"""A challenge may have become too old on its way."""
_UNAUTHORIZED = 401


@attrs.frozen
class _Answer:
    status: int
    headers: Message
    body: bytes


@attrs.frozen
class _Asker:
    url: str
    opener: OpenerDirector
    timeout_s: float

    def ask(self, authorization: str | None) -> _Answer:
        headers = {} if authorization is None else {"Authorization": authorization}
        try:
            with self.opener.open(Request(self.url, headers=headers), timeout=self.timeout_s) as response:
                return _Answer(response.status, response.headers, response.read())
        except HTTPError as error:
            with error:
                return _Answer(error.code, error.headers, error.read())


def fetch(url: str, token: str | None = None, *, timeout_s: float = 5.0) -> bytes:
    """Return what a control plane answers.

    Where ``DIST2_SECRET`` is set here, request and answer are authenticated with it, and the token is not
    sent: an impostor in the place of the control plane would learn it.

    Args:
        url: `Server.url` and a path.
        token: `Server.token`; used where no secret is set.
        timeout_s: Limit of each wait for the server.

    Raises:
        InvalidUsageError: The URL or the token cannot be one.
        AuthenticationError: One side does not know the secret that the other has.
        urllib.error.HTTPError: It refused; 401 for a wrong token.
        OSError: It cannot be reached.
    """
    require_http(url)
    # The error does not quote it, as errors get into logs.
    if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable()):
        raise InvalidUsageError("token must be a str of printable ASCII, as Server.token is")
    credentials = Credentials.of(Config.from_environment())
    asker = _Asker(url, _opener(credentials), timeout_s)
    if credentials.secret is not None:
        try:
            answer = _prove(asker, credentials.secret, credentials.job_id)
        except AuthenticationError as error:
            raise AuthenticationError(f"the control plane at {url}: {error}", reason=error.reason) from error
    else:
        answer = asker.ask(None if token is None else f"Bearer {token}")
    if answer.status >= 400:
        reason = answer.body.decode(errors="replace") or "refused"
        raise HTTPError(url, answer.status, reason, answer.headers, BytesIO(answer.body))
    return answer.body


def require_http(url: str) -> None:
    """Raise for what is no URL of a web server."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidUsageError(f"url must start with http:// or https://, got {url!r}")


def _prove(asker: _Asker, secret: Secret, job_id: str) -> _Answer:
    """Return the answer to a request that proves the secret, from a server that proves it, too."""
    visitor = Visitor(secret, job_id, "GET", Request(asker.url).selector)
    answer = asker.ask(Visitor.opener)
    for _ in range(_ATTEMPTS):
        challenge = answer.headers.get("WWW-Authenticate", "")
        answer = asker.ask(visitor.prove(challenge))
        if answer.status != _UNAUTHORIZED:
            visitor.check(answer.headers.get("Authentication-Info", ""), answer.status, answer.body)
            return answer
    visitor.prove(answer.headers.get("WWW-Authenticate", ""))  # it says why
    raise AuthenticationError("it takes no answer to its challenges", reason=STALE)


def _opener(credentials: Credentials) -> OpenerDirector:
    """Return what makes requests: without the proxy of the environment, which is not for our own ranks."""
    handlers: list[HTTPSHandler | ProxyHandler] = [ProxyHandler({})]
    if credentials.tls is not None:
        handlers.append(HTTPSHandler(context=credentials.tls.context(False)))
    return build_opener(*handlers)
