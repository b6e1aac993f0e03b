"""The endpoints: each reads what the instruments hold and answers; nothing is computed between requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from dist2.operation.signature import GroupInfo
from observability import tracing
from observability.exposition import registry_of
from observability.flight_recorder import FlightRecorder, encode
from observability.metrics import Metrics
from observability.server.auth import PAGE_HEADERS, TokenAuth
from observability.server.documents import Source
from observability.server.health import health_of

PAGES = Path(__file__).parent / "pages"

MAX_WORKS = 10_000

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

log = logging.getLogger("dist2.control_plane")


def app_of(
    metrics: Metrics,
    recorder: FlightRecorder,
    *,
    token: str,
    port: int,
    info: GroupInfo | None,
) -> TokenAuth:
    """Return the control plane as an ASGI application.

    Args:
        metrics: Counts.
        recorder: Remembers.
        token: What requests must bear.
        port: Where it will listen.
        info: The group whose rank names this process.
    """
    endpoints = _Endpoints(Source(metrics, recorder, info), registry_of(metrics))
    answers: dict[str, Endpoint] = {
        "/metrics": endpoints.metrics,
        "/healthz": endpoints.healthz,
        "/groups": endpoints.groups,
        "/works": endpoints.works,
        "/flight_recorder": endpoints.flight_recorder,
        "/trace": endpoints.trace,
        "/summary": endpoints.summary,
    }
    answers |= {_path_of(page): _page(page) for page in sorted(PAGES.glob("*.html"))}
    app = Starlette(
        routes=[Route(path, _guarded(answer)) for path, answer in answers.items()],
        exception_handlers={HTTPException: _http_error},
    )
    return TokenAuth(app, token, port)


class _Endpoints:
    """What each path answers."""

    def __init__(self, source: Source, registry: CollectorRegistry) -> None:
        self._source = source
        self._registry = registry

    async def metrics(self, request: Request) -> Response:
        """Every metric, in the text format that the client prefers."""
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(self._registry), headers={"Content-Type": content_type})

    async def healthz(self, request: Request) -> Response:
        """200 where all is well; 503, and why, where not."""
        health = health_of(self._source.metrics)
        status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
        return _json({**health.document(), **self._source.identity()}, status)

    async def groups(self, request: Request) -> Response:
        """The groups of this process."""
        return _json(self._source.groups())

    async def works(self, request: Request) -> Response:
        """Operations in flight, and those that ended last; ``?group=`` and ``?limit=`` narrow them."""
        group = request.query_params.get("group")
        known = [status.info.name for status in self._source.metrics.board.groups()]
        if group is not None and group not in known:
            raise HTTPException(404, f"no group {group!r} in this process; there are: {', '.join(known)}")
        return _json(self._source.works(group, _number(request, "limit", 100, MAX_WORKS)))

    async def flight_recorder(self, request: Request) -> Response:
        """The dump that ``torchfrtrace`` reads; ``?format=json`` for its JSON variant."""
        form = request.query_params.get("format", "pickle")
        if form not in ("pickle", "json"):
            raise HTTPException(400, f"format must be 'pickle' or 'json', got {form!r}")
        recording = self._source.recorder.recording(self._rank(request))
        if form == "json":
            return Response(encode(recording, "json"), media_type="application/json")
        return _file(encode(recording), f"flight_{recording.rank}", "application/octet-stream")

    async def trace(self, request: Request) -> Response:
        """A timeline for Perfetto."""
        recording = self._source.recorder.recording(self._rank(request))
        return _file(tracing.encode(recording), f"trace_rank{recording.rank}.json", "application/json")

    async def summary(self, request: Request) -> Response:
        """What the live page shows."""
        return _json(self._source.summary())

    def _rank(self, request: Request) -> int | None:
        """Return the rank in the job that is asked about; that of this process by default."""
        if "rank" in request.query_params:
            return _number(request, "rank", 0, 1 << 31)
        rank: int | None = self._source.identity()["rank"]
        return rank


def _page(file: Path) -> Endpoint:
    text = file.read_text()

    async def answer(request: Request) -> Response:
        return HTMLResponse(text, headers=PAGE_HEADERS)

    return answer


def _path_of(page: Path) -> str:
    return "/" if page.stem == "index" else f"/{page.stem}"


def _guarded(answer: Endpoint) -> Endpoint:
    """Turn an unexpected exception into an answer and a log line, instead of a closed connection."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except HTTPException:
            raise
        except Exception as error:
            log.exception("no answer to %s", request.scope["path"])
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    reason = error.detail
    if status is HTTPStatus.NOT_FOUND and reason == status.phrase:
        reason = f"nothing at {request.scope['path']!r}"
    return _error(status, reason, dict(error.headers or {}))


def _error(status: HTTPStatus, reason: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": status.name.lower(), "reason": reason}, status, headers)


def _json(
    document: dict[str, Any], status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
) -> Response:
    """Answer with ASCII JSON, which any text survives, also half a surrogate pair."""
    return Response(
        json.dumps(document, allow_nan=False),
        status_code=status,
        headers={"Cache-Control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def _file(body: bytes, name: str, media_type: str) -> Response:
    disposition = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return Response(body, headers=disposition, media_type=media_type)


def _number(request: Request, name: str, default: int, most: int) -> int:
    """Return a query parameter that counts."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= most):
        raise HTTPException(400, f"{name} must be a number from 0 to {most}, got {text!r}")
    return int(text)
