"""`Peers`: GET requests to the control planes whose addresses the directory of a rank has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dist2.errors import Dist2Error
from observability.client import fetch
from observability.clocks import ClockOffset, Offset, clock_id
from observability.job.answer import Answer
from observability.job.fan_out import ask_each
from observability.job.member import Member
from observability.tracing import Timeline, merged

ANSWER_S = 5.0
CLOCK_SAMPLES = 5

MOST_SLICES = 200_000
"""Operations of a trace of all ranks: viewers get slow beyond."""

T = TypeVar("T")

FAILURES = (OSError, Dist2Error, ValueError, KeyError, TypeError)
"""Errors of a request to a rank: no answer, or an answer of another form."""


class Peers:
    """The control planes of the job.

    Args:
        member: This rank, which has the directory and the token.
        url: Its own control plane.
        ask: Sends a request, as `fetch` does.
    """

    def __init__(self, member: Member, url: str, ask: Callable[..., bytes] = fetch) -> None:
        self._member = member
        self._url = url
        self._fetch = ask

    @property
    def rank(self) -> int:
        """The calling rank."""
        return self._member.rank

    def find(self) -> None:
        """Look for control planes that are not known yet."""
        self._member.find()

    def urls(self) -> dict[int, str]:
        """Return all addresses that are known by rank, that of the calling rank included."""
        entries = dict(self._member.directory.entries)
        return {**{rank: entry.url for rank, entry in entries.items()}, self.rank: self._url}

    def ranks(self) -> list[int]:
        """Return the ranks whose address is known."""
        return sorted(self.urls())

    def ask(self, rank: int, path: str) -> bytes:
        """Return the answer of a rank at a path.

        Raises:
            OSError, Dist2Error: It does not.
        """
        url = self.urls().get(rank)
        if url is None:
            raise ConnectionError(f"no control plane of rank {rank} is known")
        return self._fetch(f"{url}{path}", self._member.token, timeout_s=ANSWER_S)

    def entries(self, after_ns: Mapping[int, int], most: int) -> dict[int, Answer]:
        """Return the times of the calls of ranks: see `Member.entries`."""
        return self._member.entries(after_ns, most, ANSWER_S)

    def ask_all(
        self, read: Callable[[int], T], ranks: Iterable[int] | None = None
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Return the results of a function by rank, and for the other ranks the reason for none."""
        silent: dict[int, str] = {}

        def read_one(rank: int) -> T | None:
            try:
                return read(rank)
            except FAILURES as error:
                silent[rank] = f"{type(error).__name__}: {error}"[:200]
                return None

        answers = ask_each(self.ranks() if ranks is None else list(ranks), read_one)
        return {rank: answer for rank, answer in answers.items() if answer is not None}, silent

    def offset(self, rank: int) -> Offset:
        """Measure how far the clock of a rank is off."""
        clock = ClockOffset()
        for _ in range(CLOCK_SAMPLES):
            sent_ns = monotonic_ns()
            document = json.loads(self.ask(rank, "/clock"))
            clock.add(sent_ns, int(document["now_ns"]), monotonic_ns(), str(document["clock"]))
            if document["clock"] == clock_id():
                break  # one clock
        known = clock.at(monotonic_ns())
        assert known is not None  # there is a sample
        return known

    def trace(self, seconds: float, ranks: Iterable[int] | None = None) -> dict[str, Any]:
        """Return one trace of the last seconds of all ranks that answer."""
        self.find()
        wanted = self.ranks() if ranks is None else list(ranks)
        most = max(100, MOST_SLICES // max(1, len(wanted)))

        def read(rank: int) -> tuple[Timeline, Offset]:
            text = self.ask(rank, f"/timeline?ms={round(seconds * 1000)}&most={most}")
            return Timeline.read(json.loads(text)), self.offset(rank)

        answers, silent = self.ask_all(read, wanted)
        return merged(answers.values(), silent)

    def targets(self) -> list[dict[str, Any]]:
        """Return the control planes as Prometheus's service discovery has them, over HTTP or in a file."""
        self.find()
        found = []
        for rank, url in sorted(self.urls().items()):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https"):
                continue  # a Unix socket, which Prometheus does not scrape
            labels = {"dist2_rank": str(rank), "__scheme__": parts.scheme}
            found.append({"targets": [parts.netloc], "labels": labels})
        return found
