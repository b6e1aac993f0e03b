"""The requests that are answered: those with the token, and those of pages that have signed in with it.

Theory of operation. A browser sends a cookie to every port of a host, so a server of another user on
127.0.0.1 would receive it and could use it here. Therefore nothing here sets or reads cookies. The link to
the page has the token in its fragment, which browsers send to no server and to no other page. The script of
the page exchanges it at `SIGN_IN` for a *page token*, keeps that in its session storage, which belongs to one
scheme, host and port, and sends it in the header ``Authorization``. A page token is random, permits reading
only, and is of no use at another control plane. The files of the page contain no data and need no token.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from dist2.security.refusals import refusals
from observability.access import peer_name
from observability.server.answers import as_json
from observability.server.handlers import PREFIX, capability

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SIGN_IN = "/page-token"
"""Answers a request that bears the token with the page token."""

_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'{others}; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY.format(others=""),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""A page loads nothing from elsewhere, runs no inline script, is framed by nobody and hides its address."""

OTHER_RANKS = {"http": " http://127.0.0.1:*", "https": " https:"}
"""Where the pages of other ranks are: a page asks them for a file before it goes there."""

_REASONS = {
    "no_token": "send the token: 'Authorization: Bearer <token>'; in a browser, open Server.page_url",
    "wrong_token": "the token is wrong: one that is derived needs the job's DIST2_SECRET and DIST2_JOB_ID",
}


class TokenAuth:
    """An ASGI application that lets only requests with the token through to another.

    Args:
        app: Answers the requests that are let through.
        token: The token that requests must bear.
        port: Where it listens, for the log.
        public: Paths that are answered without a token: the files of the page.
    """

    def __init__(self, app: ASGIApp, token: str, port: int, public: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._page_token = secrets.token_urlsafe(24)
        self._port = port
        self._public = frozenset(public)
        self._capability = capability(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> ASGIApp:
        path, reads = request.scope["path"], request.method in ("GET", "HEAD")
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        bears = scheme.lower() == "bearer"
        if bears and _equal(sent.strip(), self._token):
            return self._app if path != SIGN_IN else as_json({"token": self._page_token})
        if self._is_for_torch(path) or (reads and path in self._public):
            return self._app
        if reads and bears and path != SIGN_IN and _equal(sent.strip(), self._page_token):
            return self._app
        return self._refusal(request, "wrong_token" if bears else "no_token")

    def _is_for_torch(self, path: str) -> bool:
        """Whether a path bears the capability for the handlers, and leads to one."""
        if not path.startswith(PREFIX):
            return False
        sent, _, rest = path.removeprefix(PREFIX).partition("/")
        return _equal(sent, self._capability) and rest.startswith("handler/")

    def _refusal(self, request: Request, reason: str) -> Response:
        why = _REASONS[reason]
        refusals.note("control", reason, peer_name(request.client), why, port=self._port)
        body = json.dumps({"error": "unauthorized", "refused": reason, "reason": why})
        headers = {"WWW-Authenticate": "Bearer", **PAGE_HEADERS}
        return Response(body, status_code=401, headers=headers, media_type="application/json")


def file_headers(scheme: str) -> dict[str, str]:
    """Return the headers of the files of the page, which have no data: pages of other ranks may read them."""
    policy = _POLICY.format(others=OTHER_RANKS.get(scheme, ""))
    return {**PAGE_HEADERS, "Content-Security-Policy": policy, "Access-Control-Allow-Origin": "*"}


def _equal(sent: str, expected: str) -> bool:
    """Whether two texts are equal; takes as long wherever they differ."""
    return hmac.compare_digest(sent.encode("utf-8", "surrogatepass"), expected.encode())
