"""The page of a job in its launcher: it outlives the ranks, and shows the last state that they had.

Theory of operation. The ranks have control planes, found in the files that these write. A thread asks the
lowest rank that answers, once a second for the state of the job and more seldom for the rest, and keeps each
answer. A request is passed on to a rank that answers; where none does, the kept answer is given, and the page
says how old it is. So the page goes on after the death of any rank, and after the end of all. A silent rank,
which may be stopped and would hold up each request, is asked again after a while. ``dist2.run --page`` starts
the page, by an entry point of the group ``dist2.launcher_pages``.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dist2.errors import Dist2Error
from dist2.runtime.config import LOOPBACK, Config
from observability import token_files
from observability.client import Asker
from observability.incidents.folders import add_urls, latest_at, root_of
from observability.incidents.reading import Incident, NoIncidentError
from observability.server.answers import body_of, guarded, http_error
from observability.server.app import page_routes
from observability.server.auth import TokenAuth
from observability.server.events import Events
from observability.server.serving import Serving
from observability.server.threads import on_thread
from observability.token_files import ControlPlaneFile

EVERY_S, SELDOM_S = 1.0, 5.0
ANSWER_S = 5.0
"""How long a rank may take for `OFTEN`; one that takes longer is silent."""
SLOW_S = 30.0
"""How long it may take for the rest, for which it asks others: one of these may be stopped."""
ASKED = 3
"""Ranks that are asked until one answers."""
SILENT_S = 30.0
"""How long a rank that did not answer is not asked again, if there is another one."""
KEPT_BYTES = 32 << 20
"""Size of the answers to clients that are kept, beside those that the page has asked for itself."""
SUMMARIES = 16
"""Ranks whose details are kept for the time after their end."""
OFTEN = ("/job", "/summary")
SELDOM = ("/history", "/stragglers", "/sd")
EVIDENCE = ("/desync", "/stacks", "/trace?seconds=60")
"""Asked for when the job waits for other ranks or in other operations than before, besides."""

_MEDIA_TYPES = {
    "/metrics": "text/plain; version=0.0.4; charset=utf-8",
    "/flight_recorder": "application/octet-stream",
}
SERVER_ERRORS = HTTPStatus.INTERNAL_SERVER_ERROR
"""From this status on, a refusal is no answer: one that is kept is given."""
_FILES = {"/trace": "trace.json", "/flight_recorder": "flight"}
_STARTING: dict[str, Any] = {
    "headline": "The ranks are starting: none has made a group yet",
    "world_size": 0,
    "asked_rank": 0,
    "answered": 0,
    "took_s": 0.0,
    "verdict": [],
    "culprits": [],
    "waiting": [],
    "ranks": [],
}

log = logging.getLogger("dist2.control_plane")


class JobPage:
    """The page of a launcher's job.

    Args:
        program: The program, in a line.
        world_size: Number of ranks.

    Attributes:
        url: The link for a browser. It contains the token: keep it private.
    """

    def __init__(self, program: str, world_size: int) -> None:
        self._asker = Asker()
        self._kept: dict[str, bytes] = {}
        self._keeping = threading.Lock()
        self._own = {*OFTEN, *SELDOM, *EVIDENCE}
        self._trouble: list[Any] = []
        self._job: dict[str, Any] = _STARTING
        self._started_s = time.time()
        self._incident: Path | None = None
        self._at_start: dict[str, Any] = {}
        self._summary: dict[str, Any] | None = None
        self._seldom = 0.0
        self._heard = 0.0
        self._silent: dict[str, float] = {}
        self._ends = threading.Event()
        token = secrets.token_urlsafe(24)
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._base = f"http://{LOOPBACK}:{port}"
        self.url = f"{self._base}/#token={token}"
        self._token = token
        self._of = token_files.Job(rank=-1, world_size=world_size, program=program)
        self._writing = threading.Lock()
        self._file = token_files.write(self._base, token, self._of)
        self._serving = Serving(self._app(token, port), listener)
        self._thread = threading.Thread(target=self._run, name="dist2-job-page", daemon=True)
        self._thread.start()

    def starts(self, meeting: str) -> None:
        """Take note that the ranks are about to start, so that the file of the page says which are its own.

        Args:
            meeting: Where they meet, as ``MASTER_ADDR`` and ``MASTER_PORT`` have it.
        """
        self._started_s = time.time()
        with self._writing:
            self._write(attrs.evolve(self._of, uid="", meeting=meeting))

    def ended(self, words: str, code: int, incident: str) -> None:
        """Show that the ranks have ended, with their last state.

        Args:
            words: How they ended.
            code: The exit code of the job.
            incident: The folder with the evidence; empty where there is none.
        """
        self._ends.set()
        self._thread.join()
        ended = {"words": words, "code": code, "incident": incident}
        headline, tone = f"The job has ended: {words}", "bad" if code else "good"
        self._job = {**self._job, "headline": headline, "tone": tone, "ended": ended}
        self._kept["/job"] = json.dumps(self._job).encode()
        with suppress(OSError):  # the ranks may have failed before the page had found them
            if incident:
                add_urls(Path(incident), [self._base])

    def close(self) -> None:
        """Stop serving."""
        self._ends.set()
        self._thread.join()
        self._serving.stop()
        if self._file is not None:
            token_files.remove(self._file)

    def _app(self, token: str, port: int) -> TokenAuth:
        files, public = page_routes()
        events = Events(lambda: self._job, lambda: self._summary)
        routes = [
            *files,
            Route("/events", guarded(events.events), methods=["GET"]),
            Route("/{path:path}", guarded(self._answer), methods=["GET", "POST"]),
        ]
        return TokenAuth(
            Starlette(routes=routes, exception_handlers={HTTPException: http_error}), token, port, public
        )

    async def _answer(self, request: Request) -> Response:
        """Pass a request on to a rank that answers, or give the kept answer."""
        path = request.scope["path"]
        target = f"{path}?{request.url.query}" if request.url.query else path
        body = await body_of(request) if request.method == "POST" else None
        if path == "/job":
            answer: bytes | None = json.dumps(self._job).encode()
        else:
            try:
                answer, refusal = await on_thread(self._ask, target, body), None
            except HTTPException as error:
                answer, refusal = None, error
            if refusal is not None and (body is not None or refusal.status_code < SERVER_ERRORS):
                raise refusal
            if answer is None and body is not None:
                raise HTTPException(502, "no rank answers: it is not known whether one has carried it out")
            answer = self._kept.get(target) if answer is None else answer
            if answer is None and path in self._at_start and not self._ends.is_set():
                answer = json.dumps(self._at_start[path]).encode()
            if answer is None and refusal is not None:
                raise refusal
        if answer is None:
            raise HTTPException(502, f"no rank answers, and nothing is kept of {target!r}")
        headers = {"Cache-Control": "no-store"}
        if path in _FILES:
            headers["Content-Disposition"] = f'attachment; filename="{_FILES[path]}"'
        return Response(answer, headers=headers, media_type=_MEDIA_TYPES.get(path, "application/json"))

    # The ranks

    def _run(self) -> None:
        while not self._ends.wait(EVERY_S):
            try:
                self._look()
            except Exception:  # the page must outlive a single failure
                log.exception("the state of the job cannot be read; the page goes on")

    def _look(self) -> None:
        before = self._job
        job, _ = (self._read(path) for path in OFTEN)
        if job is not None:
            self._heard, self._job = time.monotonic(), _without_urls(json.loads(job))
            self._at_start.clear()
        elif self._heard == 0.0:
            self._look_at_start()
        else:
            age_s = time.monotonic() - self._heard
            headline = f"No rank answers: this is their state of {age_s:.0f} s ago"
            self._job = {**before, "headline": headline, "tone": "warn"}
        self._summary = json.loads(self._kept.get("/summary", b"null"))
        before_that, self._trouble = self._trouble, _trouble(self._job)
        if self._trouble and self._trouble != before_that:
            for path in EVIDENCE:
                self._read(path)
        if time.monotonic() >= self._seldom:
            self._seldom = time.monotonic() + SELDOM_S
            some = [f"/summary?rank={each['rank']}" for each in self._job["ranks"][:SUMMARIES]]
            self._own.update(some)
            for path in (*SELDOM, *some):
                self._read(path)

    def _look_at_start(self) -> None:
        """Show the verdict where the ranks wait in their first `new_group`, which leaves an incident."""
        root = root_of(Config.from_environment())
        path = None if root is None else latest_at(root, self._base, self._started_s)
        if path is None or path == self._incident or not (path / "desync.json").exists():
            return
        with suppress(NoIncidentError, OSError):  # it is being written, or is removed
            incident = Incident.read(path)
            found = incident.desync()
            if found["verdict"]:
                self._incident = path
                self._at_start |= {"/desync": found, "/stacks": {"ranks": incident.stacks()}}
                headline = f"No rank has made a group yet: {found['verdict'][0]}"
                self._job = {**_STARTING, "headline": headline, "tone": "bad", "culprits": found["culprits"]}

    def _read(self, path: str) -> bytes | None:
        """Return the answer of a rank, which is kept; None where none gives one."""
        with suppress(HTTPException):
            return self._ask(path)
        return None

    def _ask(self, path: str, body: object = None) -> bytes | None:
        """Return the answer of the first rank that replies; None where none does. Keeps answers to GET.

        An act is sent once, as a rank that is late may carry it out still.

        Raises:
            HTTPException: That rank refuses.
        """
        planes, is_quick = self._planes(), path in OFTEN
        for plane in planes if body is None else planes[:1]:
            limit_s = ANSWER_S if is_quick else SLOW_S
            try:
                answer = self._asker.ask(f"{plane.url}{path}", plane.token, body=body, timeout_s=limit_s)
            except HTTPError as error:
                raise _refusal(error) from error
            except (OSError, Dist2Error, ValueError) as error:
                log.debug("%s does not answer: %s", plane.url, error)
                if is_quick:  # other answers take long because of other ranks
                    self._silent[plane.url] = time.monotonic()
                continue
            # Commands ask for a diagnosis of this moment; of the time before, only `EVIDENCE` is kept.
            if body is None and not path.startswith("/desync?"):
                self._keep(path, answer)
            return answer
        return None

    def _keep(self, path: str, answer: bytes) -> None:
        """Keep an answer; forget those to clients that were kept for longest beyond `KEPT_BYTES`."""
        with self._keeping:
            self._kept.pop(path, None)
            self._kept[path] = answer  # at the end
            others = {each: len(kept) for each, kept in self._kept.items() if each not in self._own}
            size = sum(others.values())
            for each, length in others.items():
                if size <= KEPT_BYTES:
                    break
                del self._kept[each]
                size -= length

    def _planes(self) -> list[ControlPlaneFile]:
        """Return the control planes to ask: the first that answer, or that which is silent for longest."""
        with self._writing:
            of = self._of
            found = [
                each
                for each in token_files.control_planes()
                if each.job.meeting == of.meeting != "" and each.job.rank >= 0
            ]
            found.sort(key=lambda each: each.job.rank)
            if found and of.uid != found[0].job.uid:
                self._write(attrs.evolve(found[0].job, rank=-1))
        until = time.monotonic() - SILENT_S
        silent = {url: at for url, at in self._silent.copy().items() if at > until}
        well = [each for each in found if each.url not in silent]
        return well[:ASKED] or sorted(found, key=lambda each: silent[each.url])[:1]

    def _write(self, job: token_files.Job) -> None:
        self._of, self._file = job, token_files.write(self._base, self._token, job)


def _refusal(error: HTTPError) -> HTTPException:
    """Return the refusal of a rank, to be passed on."""
    with error:
        reason, pause = str(error.reason), error.headers.get("Retry-After")
    with suppress(ValueError, KeyError, TypeError):
        reason = str(json.loads(reason)["reason"])
    return HTTPException(error.code, reason, {"Retry-After": pause} if pause else None)


def _trouble(job: dict[str, Any]) -> list[Any]:
    """Return which ranks and operations a verdict is about: its sentences have ages. Empty without one."""
    if not job["verdict"]:
        return []
    operations = [[each[name] for name in ("uid", "seq", "p2p", "caller")] for each in job["waiting"]]
    return [job["culprits"], operations]


def _without_urls(job: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a job whose ranks are reached by this page alone: they have other tokens."""
    return {**job, "ranks": [{**rank, "url": ""} for rank in job["ranks"]]}


def serve(program: str, world_size: int) -> JobPage:
    """Start the page of a launcher's job, and write its link to standard error."""
    page = JobPage(program, world_size)
    sys.stderr.write(f"dist2: the page of this job is at {page.url}\n")
    return page
