"""Which requests are answered: those with the token, and those of browsers that a link with it signed in."""

from __future__ import annotations

import hmac
import json
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from dist2.security.refusals import refusals
from observability.access import peer_name
from observability.server.handlers import PREFIX, capability

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""A page loads nothing from elsewhere, runs no inline script, is framed by nobody and hides its address."""

_REASONS = {
    "no_token": "send the token: 'Authorization: Bearer <token>'; in a browser, open Server.page_url",
    "wrong_token": "the token is wrong: one that is derived needs the job's DIST2_SECRET and DIST2_JOB_ID",
}


class TokenAuth:
    """An ASGI application that lets only requests with the token through to another.

    A browser that opens a path with ``?token=`` is sent on to the path without it, with a cookie that is good
    for reading only: so the token stays out of the address bar and of the history.

    Args:
        app: Answers the requests that are let through.
        token: The token that requests must bear.
        port: Names the cookie, as cookies do not keep the ports of a host apart.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._port = port
        self._cookie = f"dist2_{port}"
        self._capability = capability(token)
        self._cookie_value = hmac.new(token.encode(), b"dist2 control plane page", sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> ASGIApp:
        linked = request.query_params.get("token")
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        bears = scheme.lower() == "bearer"
        if bears and _equal(sent.strip(), self._token):
            return self._app
        if self._is_for_torch(request.scope["path"]):
            return self._app
        if request.method in ("GET", "HEAD"):  # a browser may be led to ask for more by a page of others
            if linked is not None and _equal(linked, self._token):
                return self._signed_in(request)
            if _equal(request.cookies.get(self._cookie, ""), self._cookie_value):
                return self._app
        return self._refusal(request, "wrong_token" if bears or linked is not None else "no_token")

    def _is_for_torch(self, path: str) -> bool:
        """Whether a path bears the capability for the handlers, and leads to one."""
        if not path.startswith(PREFIX):
            return False
        sent, _, rest = path.removeprefix(PREFIX).partition("/")
        return _equal(sent, self._capability) and rest.startswith("handler/")

    def _signed_in(self, request: Request) -> Response:
        path = "/" + request.scope["path"].lstrip("/")  # two slashes would lead to another host
        rest = urlencode([item for item in request.query_params.multi_items() if item[0] != "token"])
        response = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303, headers=PAGE_HEADERS)
        encrypted = request.scope["scheme"] == "https"
        response.set_cookie(self._cookie, self._cookie_value, httponly=True, samesite="lax", secure=encrypted)
        return response

    def _refusal(self, request: Request, reason: str) -> Response:
        why = _REASONS[reason]
        refusals.note("control", reason, peer_name(request.client), why, port=self._port)
        body = json.dumps({"error": "unauthorized", "refused": reason, "reason": why})
        headers = {"WWW-Authenticate": "Bearer", **PAGE_HEADERS}
        return Response(body, status_code=401, headers=headers, media_type="application/json")


def _equal(sent: str, expected: str) -> bool:
    """Whether two texts are equal; takes as long wherever they differ."""
    return hmac.compare_digest(sent.encode("utf-8", "surrogatepass"), expected.encode())
