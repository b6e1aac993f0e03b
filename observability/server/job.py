"""The endpoints about the whole job, and those by which control planes ask each other.

They ask other ranks, which takes up to some seconds: so they run on threads, and the rest goes on being
answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from observability.job.answer import RANK_S
from observability.job.gathering import read_request
from observability.job.member import AFTER_S, Member
from observability.server.answers import Endpoint, as_json, body_of, number
from observability.server.threads import Together, on_thread

T = TypeVar("T")


class JobEndpoints:
    """The answers of each path.

    Args:
        member: This rank's part in the job.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._job = Together(member.job)
        self._diagnosis = Together(member.diagnosis)
        self._waiting = Together(member.waiting)

    def reading(self) -> dict[str, Endpoint]:
        """Return the answers to GET, by path."""
        return {"/job": self.job, "/desync": self.desync, "/stacks": self.stacks}

    def posting(self) -> dict[str, Endpoint]:
        """Return the answers to POST, by path."""
        return {
            "/job/gather": self.gather,
            "/job/waiting": self.waiting,
            "/job/notices": self.notices,
            "/job/incident": self.incident,
        }

    async def job(self, request: Request) -> Response:
        """All ranks: host, process, operations, clock; ``?limit_ms=`` is the time limit of each rank."""
        return as_json(await self._job(_limit_s(request)))

    async def desync(self, request: Request) -> Response:
        """Which operations wait for which ranks, and why; ``?after_ms=`` leaves out younger ones."""
        after_s = number(request, "after_ms", round(AFTER_S * 1000), 3_600_000) / 1000
        found = await self._diagnosis(after_s, _limit_s(request))
        return as_json(found.document())

    async def stacks(self, request: Request) -> Response:
        """The Python threads of all ranks, or of ``?rank=``."""
        wanted = number(request, "rank", 0, 1 << 31) if "rank" in request.query_params else None
        if wanted is not None and wanted not in self._member.world():
            raise HTTPException(404, f"no rank {wanted} in this job of {len(self._member.world())} ranks")
        return as_json({"ranks": await on_thread(self._member.stacks, wanted, _limit_s(request))})

    async def gather(self, request: Request) -> Response:
        """The answers of this rank, and of the ranks in the request."""
        body = await body_of(request)
        entries, wanted, limit_s = _read(lambda: read_request(body))
        if not entries:  # waits for no other rank: it needs no thread, which others may have taken
            return Response(self._member.part(entries, wanted, limit_s))
        part = await on_thread(self._member.part, entries, wanted, limit_s)
        return Response(part)

    async def waiting(self, request: Request) -> Response:
        """A diagnosis for a rank that waits; the missing ranks are notified."""
        body = await body_of(request)
        limits = _read(lambda: (float(body["max_age_s"]), float(body["after_s"])))
        found = await self._waiting(*limits)
        return as_json(found.document())

    async def notices(self, request: Request) -> Response:
        """Take note that others wait for this rank."""
        body = await body_of(request)
        _read(lambda: self._member.take_notices(body["notices"]))
        return as_json({})

    async def incident(self, request: Request) -> Response:
        """Write the part of this rank in an incident, and carry out the policy for hangs."""
        body = await body_of(request)
        hang = self._member.hang
        if hang is None:
            raise HTTPException(404, "this control plane writes no incidents")
        try:
            await on_thread(hang.take_part, body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HTTPException(400, f"the body cannot be read: {type(error).__name__}: {error}") from error
        return as_json({})


def _limit_s(request: Request) -> float:
    """Return how long a rank may take to answer."""
    return max(1, number(request, "limit_ms", round(RANK_S * 1000), 10_000)) / 1000


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise HTTPException(400, f"the body cannot be read: {type(error).__name__}: {error}") from error
