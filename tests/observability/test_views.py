"""The sources of the live page: the last hour of a process, and the job as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import torch
from support.fake_groups import FakeGroup, info_of
from support.ranks import Tenant, run_ranks
from support.time_limits import in_time

import dist2
import observability
from dist2.errors import PeerLostError
from dist2.operation.kinds import OpKind
from observability.job.verdict import Diagnosis, Missing, Waiting
from observability.metrics import Metrics
from observability.server import events, history
from observability.server.history import History

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


# History


def test_a_point_is_what_happened_since_the_one_before() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(0, 4), metrics)
    group.run(group.signature(OpKind.BARRIER))
    kept = History(metrics)
    for _ in range(5):
        group.run()
    pair = FakeGroup(info_of(0, 2, uid="pair"), metrics)
    for _ in range(5):
        pair.run()
    group.run(error=PeerLostError("lost", ranks=[1]))
    group.begin()
    kept.sample()
    kept.sample()
    document = kept.document()
    assert document["in_flight"] == [1, 1]
    assert document["oldest_s"][1] >= document["oldest_s"][0] >= 0
    assert abs(document["at_s"][-1] - time.time()) < 60
    assert set(document["operations"]) == {"all", "all_reduce"}  # the barrier was before
    for columns in document["operations"].values():
        assert columns["failed"] == [1, 0]
        assert columns["per_s"][0] == pytest.approx(columns["bytes_per_s"][0] / 8 * 1.1, rel=0.01)
        assert columns["bus_bytes_per_s"][0] == pytest.approx(columns["bytes_per_s"][0] * 1.25, rel=0.01)
        assert columns["per_s"][1] == columns["bytes_per_s"][1] == 0
        assert 0 < columns["p50_s"][0] <= columns["p99_s"][0]
        assert columns["p50_s"][1] is columns["p99_s"][1] is None
    json.dumps(document, allow_nan=False)


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    group, kept = FakeGroup(info_of(), metrics), History(metrics)
    for kind in [each for each in OpKind if not each.is_p2p][: history.MAX_OPS + 2]:
        group.run(group.signature(kind))
    for _ in range(history.POINTS + 5):
        kept.sample()
    document = kept.document()
    assert len(document["at_s"]) == history.POINTS
    assert len(document["operations"]) == 1 + history.MAX_OPS


# Over HTTP


@pytest.fixture
def server() -> Iterator[observability.Server]:
    """A control plane of a group of one rank."""
    with (
        dist2.new_group("fake", 20, rank=0, world_size=1, name="shown") as pg,
        observability.start(pg) as running,
    ):
        yield running


def client_of(server: observability.Server) -> httpx.Client:
    headers = {"Authorization": f"Bearer {server.token}"}
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=20)


def events_of(lines: Iterator[str], count: int) -> list[tuple[str, Any]]:
    """Return the next events of a stream."""
    found: list[tuple[str, Any]] = []
    name = ""
    for line in lines:
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            found.append((name, json.loads(value)))
            if len(found) == count:
                break
    return found


def test_the_stream_tells_of_the_job_until_the_server_stops(server: observability.Server) -> None:
    with client_of(server) as client, client.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in stream.headers
        lines = stream.iter_lines()
        told = events_of(lines, 4)
        assert [name for name, _ in told] == ["summary", "job"] * 2
        assert told[0][1]["identity"]["rank"] == 0
        assert [rank["state"] for rank in told[1][1]["ranks"]] == ["ok"]
        began = time.monotonic()
        server.close()
        in_time(time.monotonic() - began, 0.8)  # uvicorn waits a second for connections that do not end
        assert len(events_of(lines, 100)) < 3  # the stream ends, and without an error


def test_the_stream_has_each_line_about_a_wait_once(
    server: observability.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "EVERY_S", 0.01)
    log = server._member.waiting_log
    assert log is not None
    missing = (Missing(2, "", "it sleeps", answers=True),)
    waiting = Waiting(("uid", 7, False, -1), "g", "barrier", "barrier()", "", (0,), 6.0, missing)
    log.diagnosed(0, Diagnosis(verdict=("it sleeps",), culprits=(2,), waiting=(waiting,)))
    with client_of(server) as client, client.stream("GET", "/events") as stream:
        lines = stream.iter_lines()
        told = events_of(lines, 5)
        log.diagnosed(0, Diagnosis())
        told += events_of(lines, 10)
        logged = [line["message"] for name, line in told if name == "log"]
        assert logged == [
            "the job waits for 6.0 s: it sleeps",
            "the job goes on, after a wait of about 6.0 s",
        ]
        assert [name for name, _ in told[:3]] == ["summary", "job", "log"], "also what was before"
        assert client.get("/job").json()["events"] == [line for name, line in told if name == "log"]


def test_listeners_are_authenticated_and_few(
    server: observability.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LISTENERS", 2)
    with client_of(server) as client:
        assert httpx.get(f"{server.url}/events", trust_env=False).status_code == 401
        with ExitStack() as open_streams:
            for _ in range(2):
                stream = open_streams.enter_context(client.stream("GET", "/events"))
                assert stream.status_code == 200
            refused = client.get("/events")
            assert refused.status_code == 503
            assert "poll /job" in refused.json()["reason"]
        status = 503
        while status == 503:  # until the server has noticed that they left
            with client.stream("GET", "/events") as stream:
                status = stream.status_code
        assert status == 200


def test_any_rank_is_shown_by_any_other() -> None:
    def body(pg: dist2.ProcessGroup) -> None:
        with observability.start(pg) as server:
            pg.all_reduce(torch.ones(2))
            with client_of(server) as client:
                client.get("/job")  # finds the others
                for rank in range(2):
                    summary = client.get(f"/summary?rank={rank}")
                    assert summary.json()["identity"]["rank"] == rank
                    assert client.get(f"/history?rank={rank}").json()["most"] == history.POINTS
                assert client.get("/summary?rank=7").status_code == 404
            pg.barrier()

    run_ranks(2, body, INPROC)


def test_a_line_is_told_once_though_the_rank_that_logged_it_is_silent_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "EVERY_S", 0.0)
    monkeypatch.setattr(events, "REST", 0.0)
    one, two, three = ({"at_s": float(each), "message": "the job waits"} for each in range(3))
    rounds = iter([[one, two], [], [one, two], [two, three], [one]])

    async def told() -> list[dict[str, Any]]:
        ending = asyncio.Event()

        def job() -> dict[str, Any]:
            lines = next(rounds, None)
            if lines is None:
                loop.call_soon_threadsafe(ending.set)
            return {"events": lines or []}

        loop = asyncio.get_running_loop()
        stream = events.Events(job, lambda: None)._stream(ending)
        texts = [text async for text in stream]
        return [json.loads(text.partition("data: ")[2]) for text in texts if text.startswith("event: log")]

    assert asyncio.run(asyncio.wait_for(told(), 20)) == [one, two, three]
