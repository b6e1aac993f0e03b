"""The endpoints: each answers from the data of the instruments; nothing is computed between requests."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dist2.operation.signature import GroupInfo
from observability.exposition import registry_of
from observability.flight_recorder import FlightRecorder, Format, encode
from observability.job.member import Member
from observability.job.watch import WaitingCollector
from observability.metrics import Metrics
from observability.server.acts import Acts
from observability.server.answers import Endpoint, as_json, guarded, heavy_answer, http_error, number
from observability.server.auth import TokenAuth, file_headers
from observability.server.documents import Source
from observability.server.handlers import PREFIX, HandlerEndpoints
from observability.server.health import Status
from observability.server.history import History
from observability.server.job import JobEndpoints
from observability.server.openapi import Operation, document
from observability.server.performance import Performance, performance_of
from observability.server.reading_limit import ReadingLimit
from observability.server.threads import GZIP_LEVEL, Heavy, Together
from observability.server.views import Views
from observability.steps import StepCollector, steps
from observability.text_format import text_of

DUMPS = "dumps"
"""The folder that dumps are written to if nothing else is said."""
PAGES = Path(__file__).parent / "pages"

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
"""Suffixes of the files of that folder that are served."""

NOT_COMPRESSED = frozenset({"/events", "/flight_recorder", "/trace", "/timeline", "/works", "/job/gather"})
"""Paths without the middleware: a stream would wait until its buffer is full; `heavy_answer` compresses some
on a thread; ranks that gather do not ask for it."""

MAX_WORKS = 10_000


def app_of(
    metrics: Metrics,
    recorder: FlightRecorder,
    *,
    token: str,
    port: int,
    info: GroupInfo | None = None,
    member: Member | None = None,
    acts: Acts | None = None,
    performance: Performance | None = None,
    history: History | None = None,
) -> TokenAuth:
    """Return the control plane as an ASGI application.

    Args:
        metrics: Counts.
        recorder: Remembers.
        token: The token that requests must bear.
        port: Where it will listen.
        info: The group whose rank names this process.
        member: This rank's part in the job; by default a job of one.
        acts: The acts that clients may request.
        performance: Answers about the speed of the job.
        history: The last hour; by default one without points, as nothing samples it.
    """
    member = member or Member(metrics, recorder, info, token=token)
    registry = registry_of(metrics)
    registry.register(StepCollector(steps))
    if member.watch is not None:
        registry.register(WaitingCollector(member.watch, member))
    performance = performance or performance_of(recorder, member, f"http://127.0.0.1:{port}")
    performance.show_in(registry)
    source = Source(metrics, recorder, member)
    views = Views(source, history or History(metrics), performance.peers)
    operations = _operations(source, registry, member, acts or Acts(member, recorder, DUMPS))
    operations += [Operation(path, "GET", answer) for path, answer in views.reading().items()]
    operations += [Operation(path, "GET", answer) for path, answer in performance.reading().items()]
    operations.append(Operation("/openapi.json", "GET", _openapi(operations)))
    compressed = _compression()
    files, public = page_routes()
    app = Starlette(
        routes=[
            *(
                Route(
                    each.path,
                    guarded(each.answer),
                    methods=[each.method],
                    middleware=[] if each.path in NOT_COMPRESSED else compressed,
                )
                for each in operations
            ),
            *files,
        ],
        exception_handlers={HTTPException: http_error},
        middleware=[Middleware(ReadingLimit, pages=tuple(public))],
    )
    return TokenAuth(app, token, port, public=public)


def page_routes() -> tuple[list[Route], list[str]]:
    """Return the files of the page, and their paths, which need no token."""
    files = sorted(path for path in PAGES.rglob("*") if path.suffix in MEDIA_TYPES)
    routes = [Route(_path_of(file), guarded(_page(file)), middleware=_compression()) for file in files]
    return routes, list(map(_path_of, files))


def _compression() -> list[Middleware]:
    return [Middleware(GZipMiddleware, minimum_size=1024, compresslevel=GZIP_LEVEL)]


def _operations(source: Source, registry: CollectorRegistry, member: Member, acts: Acts) -> list[Operation]:
    """Return the table of all endpoints but the pages."""
    endpoints, of_job = _Endpoints(source, registry), JobEndpoints(member)
    handlers = HandlerEndpoints(lambda: source.recorder.recording(source.rank))
    read = {
        "/metrics": endpoints.metrics,
        "/healthz": endpoints.healthz,
        "/livez": endpoints.livez,
        "/readyz": endpoints.readyz,
        "/groups": endpoints.groups,
        "/works": endpoints.works,
        "/flight_recorder": endpoints.flight_recorder,
        **of_job.reading(),
        "/handler/": handlers.names,
    }
    posted = {
        **of_job.posting(),
        "/acts/{name}": acts.act,
        "/handler/{name}": handlers.handle,
        PREFIX + "{capability}/handler/{name}": handlers.handle,
    }
    return [  # looked through in this order: first the request of each rank for an answer about the job
        *(Operation(path, "POST", answer) for path, answer in posted.items()),
        *(Operation(path, "GET", answer) for path, answer in read.items()),
    ]


def _openapi(operations: list[Operation]) -> Endpoint:
    described = document([each for each in operations if not each.path.startswith(PREFIX)])

    async def openapi(request: Request) -> Response:
        """This document."""
        return as_json(described)

    return openapi


class _Endpoints:
    """The answer of each path."""

    def __init__(self, source: Source, registry: CollectorRegistry) -> None:
        self._source = source
        self._registry = registry
        self._heavy = Heavy()
        self._encoded = Together(self._encode)

    async def metrics(self, request: Request) -> Response:
        """Every metric, in the text format that the client prefers."""
        body, content_type = await self._encoded(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    def _encode(self, accept: str) -> tuple[bytes, str]:
        _, content_type = choose_encoder(accept)
        text = text_of(self._registry.collect(), content_type.startswith("application/openmetrics-text"))
        return text.encode(), content_type

    async def healthz(self, request: Request) -> Response:
        """200 where nothing failed, though operations may wait; 503, and why, where something did."""
        health = self._source.health()
        failing = health.status is Status.FAILING
        status = HTTPStatus.SERVICE_UNAVAILABLE if failing else HTTPStatus.OK
        return as_json({**health.document(), **self._source.identity()}, status)

    async def livez(self, request: Request) -> Response:
        """200 as long as this process answers: a rank that waits for another must not be restarted."""
        return as_json({"status": "alive", **self._source.identity()})

    async def readyz(self, request: Request) -> Response:
        """200 where operations end in time; 503, and why, where some wait or failed."""
        health = self._source.health()
        status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
        return as_json({**health.document(), **self._source.identity()}, status)

    async def groups(self, request: Request) -> Response:
        """The groups of this process."""
        return as_json(self._source.groups())

    async def works(self, request: Request) -> Response:
        """Operations in flight, and the last that ended; ``?group=`` and ``?limit=`` narrow them."""
        group = request.query_params.get("group")
        known = [status.info.name for status in self._source.metrics.statuses.groups()]
        if group is not None and group not in known:
            raise HTTPException(404, f"no group {group!r} in this process; there are: {', '.join(known)}")
        limit = number(request, "limit", 100, MAX_WORKS)
        return await heavy_answer(request, self._heavy, self._works, group, limit)

    def _works(self, group: str | None, limit: int) -> bytes:
        return json.dumps(self._source.works(group, limit), allow_nan=False).encode()

    async def flight_recorder(self, request: Request) -> Response:
        """The dump that ``torchfrtrace`` reads; ``?format=json`` for its JSON variant."""
        form = request.query_params.get("format", "pickle")
        if form not in ("pickle", "json"):
            raise HTTPException(400, f"format must be 'pickle' or 'json', got {form!r}")
        rank = self._rank(request)
        if rank is None:
            rank = next(iter(self._source.recorder.ranks()), 0)
        of_file = {"name": f"flight_{rank}", "media_type": "application/octet-stream"}
        return await heavy_answer(
            request, self._heavy, self._dump, rank, form, **({} if form == "json" else of_file)
        )

    def _dump(self, rank: int, form: Format) -> bytes:
        return encode(self._source.recorder.recording(rank), form)

    def _rank(self, request: Request) -> int | None:
        """Return the rank in the job that is asked about; that of this process by default."""
        if "rank" in request.query_params:
            return number(request, "rank", 0, 1 << 31)
        return self._source.rank


def _page(file: Path) -> Endpoint:
    content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=file_headers(request.url.scheme))

    return answer


def _path_of(file: Path) -> str:
    if file.suffix == ".html":
        return "/" if file.stem == "index" else f"/{file.stem}"
    return f"/{file.relative_to(PAGES)}"
