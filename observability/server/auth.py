"""Who may ask: who proves the secret, who sends the token, and browsers that once opened a link with it."""

from __future__ import annotations

import hmac
import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dist2.errors import AuthenticationError
from dist2.security.handshake import Reason
from dist2.security.refusals import refusals
from dist2.security.web import STALE, Admission, Doorkeeper, is_proof, refusal
from observability.server.reach import is_loopback, peer_name

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

_ASK_FOR_TOKEN = "send the token of this control plane: 'Authorization: Bearer <token>' or '?token=<token>'"
_ASK_FOR_PROOF = "prove that you know the secret of the job, as observability.read_metrics does"


class ControlAuth:
    """An ASGI application that lets only authenticated requests through to another.

    A request proves that it knows the secret of the job (see `dist2.security.web`), or bears the token:
    in ``Authorization: Bearer`` or the query ``?token=``. A browser that opens the live page with
    ``?token=`` is sent on to the page without it, with a cookie that is good for reading only: the token
    stays out of the address bar and of the history.

    Args:
        app: Answers what is let through.
        token: What those bear that cannot prove anything.
        port: Names the cookie, as cookies do not keep the ports of a host apart.
        door: Checks proofs; None where no secret is set.
        tokens_from_afar: Whether the token counts from other hosts, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        port: int,
        door: Doorkeeper | None = None,
        tokens_from_afar: bool = True,
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._port = port
        self._door = door
        self._tokens_from_afar = tokens_from_afar
        self._cookie = f"dist2_{port}"
        self._cookie_value = hmac.new(self._token, b"dist2 control plane page", sha256).hexdigest()
        self._sign_in = SIGN_IN.read_text()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        try:
            app = self._let_in(request)
        except AuthenticationError as error:
            refusals.note("control", error.reason, peer_name(request.client), str(error), port=self._port)
            app = self._refusal(request, error)
        await app(scope, receive, send)

    def _let_in(self, request: Request) -> ASGIApp:
        """Return what answers a request.

        Raises:
            AuthenticationError: Nothing is to be answered.
        """
        if is_proof(request.headers.get("authorization", "")):
            return self._proved(request)
        sent = self._sent_tokens(request)
        if not any(map(self._is_token, sent)) and not self._has_cookie(request):
            if sent:
                raise AuthenticationError("its token is wrong", reason="wrong_token")
            raise AuthenticationError("it sends neither token nor proof", reason="no_token")
        if not self._tokens_from_afar and not _is_near(request):
            why = "its token counts on this host only: start the control plane with token=..., or with TLS"
            raise AuthenticationError(why, reason="token_from_afar")
        if request.scope["path"] == "/" and any(map(self._is_token, _tokens_in_query(request))):
            return self._with_cookie()
        return self._app

    def _proved(self, request: Request) -> ASGIApp:
        if self._door is None:
            why = "it wants to authenticate by a secret, and none is set here: set the same DIST2_SECRET"
            raise AuthenticationError(why, reason=Reason.NO_SECRET_HERE.label)
        header = request.headers["authorization"]
        admission = self._door.admit(header, request.method, _target(request))
        if admission is None:
            headers = {"WWW-Authenticate": self._door.challenge(), **PAGE_HEADERS}
            return Response(status_code=401, headers=headers)
        return _attested(self._app, admission)

    @staticmethod
    def _sent_tokens(request: Request) -> list[str]:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        bearer = [sent.strip()] if scheme.lower() == "bearer" else []
        return bearer + _tokens_in_query(request)

    def _has_cookie(self, request: Request) -> bool:
        cookie = request.cookies.get(self._cookie, "")
        reads_only = request.method in ("GET", "HEAD")
        return reads_only and hmac.compare_digest(_bytes(cookie), self._cookie_value.encode())

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(_bytes(text), self._token)

    def _with_cookie(self) -> Response:
        response = RedirectResponse("/", status_code=303, headers=PAGE_HEADERS)
        response.set_cookie(self._cookie, self._cookie_value, httponly=True, samesite="lax")
        return response

    def _refusal(self, request: Request, error: AuthenticationError) -> Response:
        bearer = self._tokens_from_afar or _is_near(request)
        ways = ["Bearer"] if bearer else []
        if is_proof(request.headers.get("authorization", "")) and error.reason != STALE:
            ways.append(refusal(error.reason))
        elif self._door is not None:
            ways.append(self._door.challenge())
        headers = {"WWW-Authenticate": ", ".join(ways), **PAGE_HEADERS}
        if bearer and request.scope["path"] == "/" and "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(self._sign_in, status_code=401, headers=headers)
        asked = [_ASK_FOR_TOKEN] * bearer + [_ASK_FOR_PROOF] * (self._door is not None)
        body = json.dumps({"error": "unauthorized", "refused": error.reason, "reason": "; or ".join(asked)})
        return Response(body, status_code=401, headers=headers, media_type="application/json")


def _attested(app: ASGIApp, admission: Admission) -> ASGIApp:
    """Return an application whose answers prove who they come from."""

    async def attested(scope: Scope, receive: Receive, send: Send) -> None:
        started: Message = {}
        body = bytearray()

        async def attest(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            said = b"" if scope["method"] == "HEAD" else bytes(body)
            info = admission.attest(started["status"], said).encode()
            await send({**started, "headers": [*started["headers"], (b"authentication-info", info)]})
            await send({"type": "http.response.body", "body": bytes(body)})

        await app(scope, receive, attest)

    return attested


def _target(request: Request) -> str:
    """Return path and query as they were sent."""
    path, query = request.scope["raw_path"], request.scope["query_string"]
    sent: bytes = path + b"?" + query if query else path
    return sent.decode("latin-1")


def _tokens_in_query(request: Request) -> list[str]:
    return parse_qs(request.scope["query_string"].decode("latin-1")).get("token", [])


def _is_near(request: Request) -> bool:
    """Whether a request comes from this host, so that nobody else has seen the token that it bears."""
    return request.client is not None and is_loopback(request.client.host)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
