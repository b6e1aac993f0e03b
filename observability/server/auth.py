"""Who may ask: clients that send the token, and browsers that once opened a link with it."""

from __future__ import annotations

import hmac
import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SIGN_IN = Path(__file__).parent / "pages" / "_sign_in.html"

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""A page loads nothing from elsewhere, is framed by nobody and tells nobody its address."""


class TokenAuth:
    """An ASGI application that lets only authenticated requests through to another.

    The token is taken from ``Authorization: Bearer`` or the query ``?token=``. A browser that opens the
    live page with ``?token=`` is sent on to the page without it, with a cookie that is good for reading
    only: the token stays out of the address bar and of the history.

    Args:
        app: Answers what is let through.
        token: The secret.
        port: Names the cookie, as cookies do not keep the ports of a host apart.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"dist2_{port}"
        self._cookie_value = hmac.new(self._token, b"dist2 control plane page", sha256).hexdigest()
        self._sign_in = SIGN_IN.read_text()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        if self._has_token_in_query(request) and request.scope["path"] == "/":
            await self._with_cookie()(scope, receive, send)
        elif self._is_allowed(request):
            await self._app(scope, receive, send)
        else:
            await self._refusal(request)(scope, receive, send)

    def _is_allowed(self, request: Request) -> bool:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(sent.strip()):
            return True
        if self._has_token_in_query(request):
            return True
        cookie = request.cookies.get(self._cookie, "")
        reads_only = request.method in ("GET", "HEAD")
        return reads_only and hmac.compare_digest(_bytes(cookie), self._cookie_value.encode())

    def _has_token_in_query(self, request: Request) -> bool:
        query = parse_qs(request.scope["query_string"].decode("latin-1"))
        return any(self._is_token(sent) for sent in query.get("token", []))

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(_bytes(text), self._token)

    def _with_cookie(self) -> Response:
        response = RedirectResponse("/", status_code=303, headers=PAGE_HEADERS)
        response.set_cookie(self._cookie, self._cookie_value, httponly=True, samesite="lax")
        return response

    def _refusal(self, request: Request) -> Response:
        headers = {"WWW-Authenticate": "Bearer", **PAGE_HEADERS}
        if request.scope["path"] == "/" and "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(self._sign_in, status_code=401, headers=headers)
        reason = "send the token of this control plane: 'Authorization: Bearer <token>' or '?token=<token>'"
        body = json.dumps({"error": "unauthorized", "reason": reason})
        return Response(body, status_code=401, headers=headers, media_type="application/json")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
