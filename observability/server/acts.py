"""Acts of this process on behalf of a client: ``POST /acts/<name>``. Each act is written to the audit log.

Acts need the token in the header ``Authorization``. A page of another origin cannot send that header, and the
token that a page of ours has permits reading only: so a browser cannot be led to act.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dist2.errors import Dist2Error, GroupAbortedError, InvalidUsageError
from dist2.group.open_groups import open_groups
from dist2.rendezvous.liveness import abort_building
from dist2.runtime.torch_versions import profiling_all_threads
from observability.access import peer_name
from observability.flight_recorder import FlightRecorder, global_rank
from observability.job.member import Member
from observability.server.answers import as_json, body_of
from observability.server.threads import on_thread
from observability.tracing import record_parts

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
ACTS_A_SECOND = 5
PROFILE_S = 60.0
"""A profile that is not stopped ends after this."""

EVERYWHERE = ("dump", "abort", "log_level", "record_parts")
"""Acts that ``{"everywhere": true}`` carries out on all ranks of the job."""

audit = logging.getLogger("dist2.audit")

Body = Mapping[str, Any]
Outcome = dict[str, Any] | Response


class Acts:
    """Carries out acts for one rank.

    Args:
        member: The rank.
        recorder: The recorder to dump.
        folder: Where dumps are written.
    """

    def __init__(self, member: Member, recorder: FlightRecorder, folder: str | Path) -> None:
        self._member = member
        self._recorder = recorder
        self._folder = Path(folder)
        self._profile: _Profile | None = None
        self._recent: deque[float] = deque(maxlen=ACTS_A_SECOND)
        self._acts: dict[str, Callable[[Body], Outcome]] = {
            "dump": self._dump,
            "abort": self._abort,
            "log_level": self._log_level,
            "record_parts": self._record_parts,
            "profile_start": self._profile_start,
            "profile_stop": self._profile_stop,
        }

    async def act(self, request: Request) -> Response:
        """Act: ``dump``, ``abort``, ``log_level``, ``record_parts``, ``profile_start`` ``profile_stop``."""
        name = request.path_params["name"]
        act = self._acts.get(name)
        if act is None:
            raise HTTPException(404, f"no act {name!r}; there are: {', '.join(self._acts)}")
        self._ration()
        body = await body_of(request)
        if not isinstance(body, dict):
            raise HTTPException(400, f"the body must be a JSON object, got {type(body).__name__}")
        everywhere = bool(body.get("everywhere")) and name in EVERYWHERE
        try:
            outcome = await self._done(request, name, act, body)
        except HTTPException as error:
            if not everywhere:
                raise
            outcome = {"error": f"{error.status_code} {error.detail}"}
        if everywhere:
            mine = {key: value for key, value in body.items() if key != "everywhere"}
            others = await on_thread(self._member.ask_others, f"/acts/{name}", mine)
            outcome = {"ranks": {self._member.rank: outcome, **others}}
        return outcome if isinstance(outcome, Response) else as_json(outcome)

    async def _done(self, request: Request, name: str, act: Callable[[Body], Outcome], body: Body) -> Outcome:
        """Carry out an act on this rank, and note it.

        Raises:
            HTTPException: It is refused, or fails.
        """
        try:
            outcome = await on_thread(act, body)
        except HTTPException as error:
            self._note(request, name, body, f"refused: {error.detail}")
            raise
        except (Dist2Error, OSError, RuntimeError) as error:
            self._note(request, name, body, f"failed: {error}")
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        self._note(request, name, body, "done")
        return outcome

    def _ration(self) -> None:
        now = time.monotonic()
        if len(self._recent) == ACTS_A_SECOND and now - self._recent[0] < 1.0:
            headers = {"Retry-After": "1"}
            raise HTTPException(429, f"more than {ACTS_A_SECOND} acts a second", headers=headers)
        self._recent.append(now)

    def _note(self, request: Request, name: str, body: Body, outcome: str) -> None:
        peer, asked = peer_name(request.client), str(dict(body))[:300]
        audit.warning(
            "act %s of %s on rank %d, %s: %s",
            *(name, peer, self._member.rank, asked, outcome),
            extra={"act": name, "peer": peer, "rank": self._member.rank, "asked": asked, "outcome": outcome},
        )

    def _dump(self, body: Body) -> Outcome:
        """Write the flight recorder to the folder that `start` was given."""
        rank = self._member.rank
        path = self._recorder.dump(self._folder / "flight_{rank}", rank=rank)
        return {"path": str(path.absolute()), "rank": rank}

    def _abort(self, body: Body) -> Outcome:
        """Abort a group of this rank, by name; also one that is being built."""
        name, rank = body.get("group"), self._member.rank
        if not isinstance(name, str) or not name:
            raise HTTPException(400, f"group must be the name or uid of a group, got {name!r}")
        mine = [each for each in open_groups() if global_rank(each.info) == rank]
        named = [each for each in mine if name in (each.info.name, each.info.uid)]
        built = abort_building(lambda: GroupAbortedError("a client of the control plane aborted it"), name)
        if not named and not built:
            there = ", ".join(sorted(each.info.name for each in mine))
            raise HTTPException(404, f"no open group {name!r} on this rank; there are: {there}")
        for group in named:
            group.abort()
        return {"aborted": [each.info.name for each in named] or [name], "rank": rank}

    def _log_level(self, body: Body) -> Outcome:
        """Set the level of a logger of dist2."""
        level, name = str(body.get("level", "")).upper(), str(body.get("logger", "dist2"))
        if level not in LEVELS:
            raise HTTPException(400, f"level must be one of {', '.join(LEVELS)}, got {body.get('level')!r}")
        if name != "dist2" and not name.startswith("dist2."):
            raise HTTPException(400, f"logger must be dist2 or below, got {name!r}")
        logger = logging.getLogger(name)
        before = logging.getLevelName(logger.level)
        logger.setLevel(level)
        return {"logger": name, "level": level, "before": before}

    def _record_parts(self, body: Body) -> Outcome:
        """Record the parts of operations for some seconds: `/trace` shows them."""
        try:
            record_parts(body.get("seconds", 0))
        except InvalidUsageError as error:
            raise HTTPException(400, str(error)) from error
        return {"seconds": body.get("seconds", 0), "rank": self._member.rank}

    def _profile_start(self, body: Body) -> Outcome:
        """Start torch's profiler on all threads."""
        if self._profile is not None and self._profile.runs:
            raise HTTPException(409, "a profile is running: stop it first")
        limit_s = body.get("limit_s", PROFILE_S)
        if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not 0 < limit_s <= PROFILE_S:
            raise HTTPException(400, f"limit_s must be from 0 to {PROFILE_S:g} seconds, got {limit_s!r}")
        self._profile = _Profile(limit_s)
        return {"running": True, "limit_s": limit_s}

    def _profile_stop(self, body: Body) -> Outcome:
        """Stop it, and answer with its trace for Perfetto."""
        if self._profile is None:
            raise HTTPException(409, "no profile was started")
        profile, self._profile = self._profile, None
        name = f"profile_rank{self._member.rank}.json"
        disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(profile.trace(), headers=disposition, media_type="application/json")

    def close(self) -> None:
        """End a profile that runs."""
        if self._profile is not None:
            self._profile.trace()
            self._profile = None


class _Profile:
    """torch's profiler in a thread of its own, which starts and stops it."""

    def __init__(self, limit_s: float) -> None:
        self._enough = threading.Event()
        self._started = threading.Event()
        self._limit_s = limit_s
        self._trace = b""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="dist2-profile", daemon=True)
        self._thread.start()
        self._started.wait(PROFILE_S)
        if self._error is not None:
            raise RuntimeError(f"the profiler does not start: {self._error}")

    @property
    def runs(self) -> bool:
        """Whether it still records."""
        return self._thread.is_alive()

    def trace(self) -> bytes:
        """Stop; return the trace.

        Raises:
            RuntimeError: The profiler failed.
        """
        self._enough.set()
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"the profiler failed: {self._error}")
        return self._trace

    def _run(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        try:
            # All threads, as the one that does the work is not this one.
            profiled = profile(activities=[ProfilerActivity.CPU], **profiling_all_threads())
            with profiled as running:
                self._started.set()
                self._enough.wait(self._limit_s)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                running.export_chrome_trace(str(path))
                self._trace = path.read_bytes()
        except Exception as error:  # noqa: BLE001 - told to the client that starts or stops it
            self._error = error
        finally:
            self._started.set()
