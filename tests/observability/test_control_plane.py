"""The control plane over real HTTP: access, answers, and no leftovers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import attrs
import httpx
import pytest
import torch
from support.fake_groups import FakeGroup, info_of, metas

import dist2
import observability
from dist2.errors import BackendUnavailableError, InvalidUsageError, PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.signature import GroupInfo
from observability.flight_recorder import FlightRecorder
from observability.metrics import Metrics
from observability.scrape import DURATIONS, parse_metrics
from observability.server import reading_limit
from observability.server.app import app_of
from observability.server.serving import Serving

TOKEN = "a-token-for-tests"


@attrs.define(eq=False)
class Plane:
    """A control plane that serves instruments which nothing else feeds."""

    metrics: Metrics
    recorder: FlightRecorder
    port: int
    client: httpx.Client

    def group(self, rank: int = 0, world_size: int = 2, **fields: Any) -> FakeGroup:
        """Open a group that its instruments see."""
        return FakeGroup(info_of(rank, world_size, **fields), self.metrics, self.recorder)

    def get(self, path: str) -> httpx.Response:
        """Ask with the token."""
        return self.client.get(path)


def serve(metrics: Metrics, recorder: FlightRecorder, info: GroupInfo | None = None) -> Iterator[Plane]:
    """Serve these instruments until the generator is closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = Serving(app_of(metrics, recorder, token=TOKEN, port=port, info=info), listener)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False) as client:
            yield Plane(metrics, recorder, port, client)
    finally:
        serving.stop()


@pytest.fixture
def plane() -> Iterator[Plane]:
    """A control plane of its own."""
    yield from serve(Metrics(), FlightRecorder())


PATHS = ["/metrics", "/healthz", "/groups", "/works", "/flight_recorder", "/trace", "/summary"]


@pytest.fixture
def stranger(plane: Plane) -> Iterator[httpx.Client]:
    """A client without the token."""
    with httpx.Client(base_url=f"http://127.0.0.1:{plane.port}", trust_env=False) as client:
        yield client


# How often a client may ask


def test_a_client_that_reads_too_often_is_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_limit, "BURST_UNITS", 4.0)
    monkeypatch.setattr(reading_limit, "UNITS_A_SECOND", 0.1)
    monkeypatch.setattr(reading_limit, "HEAVY_UNITS", 2.0)
    for plane in serve(Metrics(), FlightRecorder()):
        assert [plane.get("/groups").status_code for _ in range(2)] == [200, 200]
        assert plane.get("/flight_recorder").status_code == 200, "counts as two"
        refused = plane.get("/groups")
        assert refused.status_code == 429
        assert refused.json()["error"] == "too_many_requests"
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        for path in ("/metrics", "/healthz", "/livez", "/readyz", "/"):
            assert plane.get(path).status_code == 200, "Prometheus, probes and pages are not counted"


def test_who_asks_by_fetch_waits_as_long_as_the_limit_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_limit, "BURST_UNITS", 1.0)
    monkeypatch.setattr(reading_limit, "UNITS_A_SECOND", 0.5)
    paused_s: list[float] = []

    def pause(seconds: float) -> None:
        paused_s.append(seconds)
        monkeypatch.setattr(reading_limit, "BURST_UNITS", 100.0)

    monkeypatch.setattr(observability.client, "sleep", pause)
    for plane in serve(Metrics(), FlightRecorder()):
        for _ in range(2):
            assert observability.fetch(f"http://127.0.0.1:{plane.port}/groups", TOKEN)
        assert paused_s == [2]


def test_the_limit_follows_the_clock_and_counts_requests_at_once() -> None:
    now, inside, go_on = [100.0], [0], asyncio.Event()
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        inside[0] += 1
        if scope["path"] == "/slow":
            await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    limit = reading_limit.ReadingLimit(app, clock=lambda: now[0])

    async def ask(path: str, host: str = "10.0.0.1", method: str = "GET") -> None:
        scope = {"type": "http", "method": method, "path": path, "client": (host, 5), "headers": []}
        await limit(scope, None, send)  # type: ignore[arg-type]  # nothing is received

    async def scenario() -> None:
        burst = int(reading_limit.BURST_UNITS)
        for _ in range(burst + 1):
            await ask("/groups")
        assert statuses == [200] * burst + [429]
        await ask("/groups", host="10.0.0.2")
        assert statuses[-1] == 200, "another client"
        await ask("/job/gather", method="POST")
        assert statuses[-1] == 200, "another rank"
        for number, path in enumerate(("/handler/fr_trace_json", "/torch/x/handler/pyspy_dump")):
            for _ in range(int(burst / reading_limit.HEAVY_UNITS) + 1):
                await ask(path, f"10.0.1.{number}", "POST")
            assert statuses[-2:] == [200, 429]
        now[0] += 1.0
        for _ in range(int(reading_limit.UNITS_A_SECOND) + 1):
            await ask("/groups")
        assert statuses[-2:] == [200, 429]
        now[0] += 1000.0
        slow = [asyncio.ensure_future(ask("/slow")) for _ in range(reading_limit.AT_ONCE)]
        await asyncio.sleep(0)
        await ask("/groups")
        assert statuses[-1] == 429
        go_on.set()
        await asyncio.gather(*slow)
        await ask("/groups")
        assert statuses[-1] == 200

    asyncio.run(scenario())


# Access


WRONG: list[dict[Any, Any]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {TOKEN}x"},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": TOKEN},
    {"Authorization": b"Bearer \xff\xfe"},
    {"Cookie": f"dist2_0={TOKEN}"},
]


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
def test_who_does_not_know_the_token_gets_nothing(stranger: httpx.Client, path: str) -> None:
    for headers in WRONG:
        refused = stranger.get(path, headers=headers)
        assert refused.status_code == 401, headers
        assert refused.json()["error"] == "unauthorized"
        assert "Bearer" in refused.headers["www-authenticate"]
        assert "dist2_" not in refused.text


def test_the_page_is_empty_without_the_token(stranger: httpx.Client) -> None:
    page = stranger.get("/")
    assert page.status_code == 200
    assert "<title>dist2</title>" in page.text
    assert stranger.get("/session.js").status_code == 200
    for path in ("/", "/session.js"):
        assert stranger.post(path).status_code == 401


def test_a_page_trades_the_token_for_one_that_is_good_here_for_reading_only(
    plane: Plane, stranger: httpx.Client
) -> None:
    signed_in = plane.client.get("/page-token")
    assert "set-cookie" not in signed_in.headers, "a browser sends cookies to all ports of a host"
    of_page = {"Authorization": f"Bearer {signed_in.json()['token']}"}
    assert TOKEN not in of_page["Authorization"]
    assert stranger.get("/metrics", headers=of_page).status_code == 200
    assert stranger.post("/acts/dump", headers=of_page).status_code == 401
    assert stranger.get("/page-token", headers=of_page).status_code == 401
    for other in serve(Metrics(), FlightRecorder()):
        url = f"http://127.0.0.1:{other.port}/metrics"
        assert stranger.get(url, headers=of_page).status_code == 401


def test_no_request_is_signed_in_by_its_query_or_a_cookie(plane: Plane, stranger: httpx.Client) -> None:
    linked = stranger.get(f"/metrics?token={TOKEN}")
    assert (linked.status_code, linked.headers.get("set-cookie")) == (401, None)
    page_token = plane.client.get("/page-token").json()["token"]
    for value in (TOKEN, page_token):
        cookies = {"Cookie": f"dist2_{plane.port}={value}"}
        assert stranger.get("/metrics", headers=cookies).status_code == 401


def test_a_refusal_says_what_to_send(stranger: httpx.Client) -> None:
    assert "Server.page_url" in stranger.get("/job").json()["reason"]
    wrong = {"Authorization": "Bearer wrong"}
    assert "DIST2_SECRET" in stranger.get("/job", headers=wrong).json()["reason"]


def test_the_page_needs_nothing_from_elsewhere(plane: Plane) -> None:
    page = plane.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text
    assert "access-control-allow-origin" not in plane.get("/job").headers, "only files without data have it"
    assert "innerHTML" not in page.text, "what groups are called must not become markup"


# Answers


def test_metrics_are_served_in_the_format_that_is_asked_for(plane: Plane) -> None:
    plane.group().run()
    plain = plane.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert parse_metrics(plain.text).value("dist2_operations_total", op="all_reduce") == 1
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    assert plane.client.get("/metrics", headers=accept).text.endswith("# EOF\n")


def test_read_metrics_reads_a_running_control_plane(plane: Plane) -> None:
    plane.group().run(took_ns=3_000)
    url = f"http://127.0.0.1:{plane.port}"
    for spelling in (url, f"{url}/", f"{url}/metrics"):
        seen = observability.read_metrics(spelling, TOKEN)
        assert 2e-6 < seen.quantile(0.5, op="all_reduce") < 4.1e-6
    with pytest.raises(HTTPError, match="401") as refused:
        observability.read_metrics(url, "wrong")
    refused.value.close()


def test_health_is_good_until_an_operation_is_past_its_deadline(plane: Plane) -> None:
    group = plane.group()
    operation = group.begin(timeout_s=60)
    assert (plane.get("/healthz").status_code, plane.get("/healthz").json()["ok"]) == (200, True)
    operation.deadline_ns = time.monotonic_ns() - 2_000_000_000
    ill = plane.get("/healthz")
    assert ill.status_code == 503
    (reason,) = ill.json()["reasons"]
    assert "all_reduce(float32[2], op=sum) #1" in reason
    assert "past its deadline" in reason
    group.end(operation)
    assert plane.get("/healthz").status_code == 200


def test_a_broken_group_is_unhealthy_until_the_job_goes_on_without_it(plane: Plane) -> None:
    group = plane.group()
    group.run(error=InvalidUsageError("an argument is wrong"))
    assert plane.get("/healthz").status_code == 200, "the group is still usable"
    group.run(error=PeerLostError("rank 1 died", ranks=[1]))
    (reason,) = plane.get("/healthz").json()["reasons"]
    assert "PeerLostError" in reason
    assert "rank 1 died" in reason
    group.close()
    assert plane.get("/healthz").status_code == 503, "nothing goes on"
    plane.group(0, 1, uid="world/shrink#0")
    assert plane.get("/healthz").status_code == 200


def test_groups_are_listed_with_their_ranks(plane: Plane) -> None:
    world = plane.group(1, 4, uid="9f3a", name="world", desc="everyone")
    pair = plane.group(uid="world/split#0", global_ranks=[1, 3])
    world.run()
    world.begin()
    pair.close()
    first, second = plane.get("/groups").json()["groups"]
    assert (first["name"], first["uid"]) == ("world", "9f3a")
    assert (first["rank"], first["world_size"], first["global_ranks"]) == (1, 4, [0, 1, 2, 3])
    assert (first["state"], first["in_flight"], first["last_seq"], first["desc"]) == (
        "open",
        1,
        1,
        "everyone",
    )
    assert (second["state"], second["global_ranks"]) == ("closed", [1, 3])
    assert plane.get("/healthz").json()["rank"] == 1


def test_works_lists_what_waits_for_its_turn(plane: Plane) -> None:
    with dist2.new_group("fake", rank=0, world_size=2, name="waiting") as pg:
        lane = pg._runner.queue
        assert lane.enter()  # another operation is inside
        works = [pg.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        queued = plane.get("/works").json()["queued"]
        assert [(each["op"], each["seq"], each["state"]) for each in queued] == [
            ("all_reduce", 2, "queued"),
            ("all_reduce", 3, "queued"),
        ]
        assert queued[0]["queued_s"] > 0
        lane.leave()
        for work in works:
            work.wait()
        assert plane.get("/works").json()["queued"] == []


def test_works_lists_what_runs_and_what_ended(plane: Plane) -> None:
    world, pair = plane.group(), plane.group(uid="world/split#0")
    for _ in range(5):
        world.run()
    pair.run(pair.signature(OpKind.BROADCAST, metas([3]), root=1), error=PeerLostError("gone"))
    world.begin()
    everything = plane.get("/works").json()
    (running,) = everything["in_flight"]
    assert (running["op"], running["seq"], running["state"], running["overdue"]) == (
        "all_reduce",
        6,
        "started",
        False,
    )
    assert running["where"].rpartition(":")[0].endswith("fake_groups.py")
    assert [work["seq"] for work in everything["finished"]] == [1, 5, 4, 3, 2, 1]
    assert everything["finished"][0]["error"] == "PeerLostError: gone"
    only = plane.client.get("/works", params={"group": "world/split#0"}).json()
    assert only["in_flight"] == []
    assert [work["op"] for work in only["finished"]] == ["broadcast"]
    assert len(plane.get("/works?limit=2").json()["finished"]) == 2


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/works?group=nobody", 404, "nobody"),
        ("/works?limit=-1", 400, "limit"),
        ("/works?limit=" + "9" * 5000, 400, "limit"),
        ("/works?limit=\u0661", 400, "limit"),
        ("/flight_recorder?format=yaml", 400, "'yaml'"),
        ("/flight_recorder?rank=x", 400, "rank"),
        ("/nothing", 404, "/nothing"),
    ],
)
def test_errors_are_json_with_a_reason(plane: Plane, path: str, status: int, words: str) -> None:
    plane.group()
    refused = plane.get(path)
    assert refused.status_code == status
    assert words in refused.json()["reason"]


def test_an_endpoint_that_fails_says_so_and_the_next_works(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane.metrics.statuses, "groups", lambda: 1 / 0)
    failed = plane.get("/groups")
    assert failed.status_code == 500
    assert failed.json()["reason"] == "ZeroDivisionError: division by zero"
    monkeypatch.undo()
    assert plane.get("/groups").status_code == 200


def test_hostile_names_reach_the_page_as_text(plane: Plane) -> None:
    uid = 'a"}\n<script>\ud800'
    plane.group(uid=uid, desc="</table>").run()
    assert plane.get("/groups").json()["groups"][0]["uid"] == uid
    assert plane.get("/metrics").status_code == 200
    assert plane.get("/summary").status_code == 200
    assert plane.get("/trace").status_code == 200


def test_the_flight_recorder_and_the_trace_are_downloads(plane: Plane) -> None:
    plane.group(1).run()
    dump = plane.get("/flight_recorder")
    assert dump.headers["content-disposition"] == 'attachment; filename="flight_1"'
    assert len(pickle.loads(dump.content)["entries"]) == 1
    assert len(plane.get("/flight_recorder?format=json").json()["entries"]) == 1
    assert plane.get("/flight_recorder?format=json&rank=0").json()["entries"] == []
    trace = plane.get("/trace")
    assert trace.headers["content-disposition"] == 'attachment; filename="trace_rank1.json"'
    assert any(event["ph"] == "X" for event in trace.json()["traceEvents"])


def test_the_summary_adds_up(plane: Plane) -> None:
    group = plane.group()
    for _ in range(3):
        group.run(took_ns=3_000)
    group.run(error=PeerLostError("gone"))
    group.begin()
    summary = plane.get("/summary").json()
    (row,) = summary["operations"]
    assert (row["op"], row["count"], row["failed"], row["bytes"]) == ("all_reduce", 3, 1, 24)
    assert row["durations"] == [[12, 3]]  # 2 us < 3 us <= 4 us
    assert summary["in_flight_count"] == len(summary["in_flight"]) == 1
    assert [failure["error"] for failure in summary["failures"]] == ["PeerLostError"]
    assert summary["identity"]["pid"] == os.getpid()
    assert not summary["health"]["ok"]


def test_the_group_that_was_given_names_the_process() -> None:
    metrics, recorder = Metrics(), FlightRecorder()
    FakeGroup(info_of(0, 2), metrics, recorder)
    other = FakeGroup(info_of(1, uid="mine", global_ranks=[5, 7]), metrics, recorder)
    for plane in serve(metrics, recorder, other.info):
        identity = plane.get("/summary").json()["identity"]
    assert (identity["rank"], identity["group_rank"], identity["group"]) == (7, 1, "mine")


def test_scrapes_during_operations_are_consistent_and_lose_nothing(plane: Plane) -> None:
    group = plane.group()
    signature = group.signature()
    enough = threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        while not enough.is_set():
            group.run(signature)
            done += 1

    worker = threading.Thread(target=work)
    worker.start()
    seen, problems = [], []

    def ask() -> None:
        with httpx.Client(headers=plane.client.headers, trust_env=False) as client:
            last = 0.0
            for _ in range(10):
                scrape = parse_metrics(client.get(f"http://127.0.0.1:{plane.port}/metrics").text)
                counts = [count for _, count in scrape.buckets(DURATIONS)]
                total = scrape.value("dist2_operations_total")
                if counts != sorted(counts) or (counts and counts[-1] != total) or total < last:
                    problems.append((counts, total, last))
                last = total
            seen.append(last)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    enough.set()
    worker.join()
    assert problems == []
    assert len(seen) == 3
    assert parse_metrics(plane.get("/metrics").text).value("dist2_operations_total") == done > 0


# Starting and stopping


def plane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dist2-control-plane"]


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_start_and_close_leave_no_thread_and_no_socket() -> None:
    observability.start().close()  # the first leaves the handler of a signal, which writes to /dev/null
    gc.collect()  # garbage of earlier tests must not be collected meanwhile
    descriptors = open_descriptors()
    with observability.start() as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert len(plane_threads()) == 1
        with httpx.Client(trust_env=False) as client:
            assert client.get(server.url + "/metrics").status_code == 401
            client.headers["Authorization"] = f"Bearer {server.token}"
            assert client.get(server.url + "/metrics").status_code == 200
            server.close()  # with a connection kept alive
        assert server.closed
    server.close()
    assert plane_threads() == []
    assert open_descriptors() == descriptors
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_tokens_are_random_and_several_servers_may_run() -> None:
    with observability.start() as first, observability.start(token="chosen") as second:
        assert len(first.token) >= 32
        assert second.token == "chosen"
        assert first.url != second.url
        assert second.page_url == f"{second.url}/#token=chosen"
        assert observability.read_metrics(second.url, "chosen").value("dist2_build_info") == 1


def test_start_takes_up_a_group_that_no_instrument_knows() -> None:
    group: Any = FakeGroup(info_of(uid="opened before"))
    with observability.start(group) as server:
        seen = observability.read_metrics(server.url, server.token)
    assert seen.value("dist2_group_info", group="opened before") == 1
    for instrument in (observability.metrics.instrument, observability.flight_recorder.instrument):
        instrument.group_closed(group)


def test_a_port_in_use_and_bad_arguments_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidUsageError, match=f"port={port}"):
            observability.start(port=port)
    for port in (-1, 70000):
        with pytest.raises(InvalidUsageError, match=f"port={port}"):
            observability.start(port=port)
    for host in ("203.0.113.1", ""):  # not of this machine; every address
        with pytest.raises(InvalidUsageError, match=f"{host}|empty"):
            observability.start(host=host)
    with pytest.raises(InvalidUsageError, match=r"host must be a str, got 9400 \(int\)"):
        observability.start(host=9400)  # type: ignore[arg-type]  # a port in its place
    for token in ("", "two words", "schlüssel", "new\nline", 5):
        with pytest.raises(InvalidUsageError, match="token"):
            observability.start(token=token)  # type: ignore[arg-type]  # 5 is no token
    with pytest.raises(InvalidUsageError, match="port='9400'"):
        observability.start(port="9400")  # type: ignore[arg-type]  # no number
    with pytest.raises(InvalidUsageError, match=r"pg must be .* got 'training' \(str\)"):
        observability.start("training")  # type: ignore[arg-type]  # no group
    assert plane_threads() == []


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("observability.server."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'dist2\[control-plane\]'"):
        observability.start()


def test_it_sleeps_until_somebody_asks(plane: Plane) -> None:
    assert plane.get("/healthz").status_code == 200
    (thread,) = plane_threads()

    def wakeups() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = wakeups()
    threading.Event().wait(0.5)  # a span to observe, not an event to wait for
    assert wakeups() - before <= 1


def test_a_forked_child_lets_go_of_the_port() -> None:
    """Otherwise a data loader's worker that outlives its parent would keep the port open, without answers."""
    with observability.start() as server:
        port = int(server.url.rpartition(":")[2])
        heard, say = os.pipe()
        wait, go = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks beside threads: the child just ends
            child = os.fork()
        if child == 0:  # pragma: no cover - not seen from here
            os.write(say, b"ready")
            os.read(wait, 1)
            os._exit(0)
        assert os.read(heard, 5) == b"ready"
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    finally:
        os.write(go, b"x")
        os.waitpid(child, 0)
        for descriptor in (heard, say, wait, go):
            os.close(descriptor)


def test_importing_the_package_is_cheap_and_starts_nothing() -> None:
    program = (
        "import sys, threading, json, dist2.operation.instruments; before = set(sys.modules)\n"
        "import observability, observability.metrics, observability.flight_recorder\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "from dist2.operation.instruments import dispatch\n"
        "print(json.dumps([sorted(new), threading.active_count(), len(dispatch.instruments)]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    new, threads, instruments = json.loads(ran.stdout)
    assert {"starlette", "uvicorn", "prometheus_client", "anyio"}.isdisjoint(new)
    assert (threads, instruments) == (1, 0)


def test_public_names_are_there() -> None:
    for name in observability.__all__:
        assert callable(getattr(observability, name))
    with pytest.raises(AttributeError, match="nothing"):
        observability.nothing  # noqa: B018 - looked up, not used


def test_a_client_that_does_not_read_its_answer_leaves_no_connection() -> None:
    answered = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})
        answered.set()

    listener = socket.create_server(("127.0.0.1", 0))
    serving = Serving(app, listener)
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answered.wait(10)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ResourceWarning)
            serving.stop()
            del serving
            gc.collect()
        assert not [each for each in seen if issubclass(each.category, ResourceWarning)]


def test_uvicorn_logs_errors_only_and_other_servers_of_the_process_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a program that has called ``logging.basicConfig(level="INFO")``."""
    caplog.set_level(logging.INFO)
    access, errors = logging.getLogger("uvicorn.access"), logging.getLogger("uvicorn.error")
    before = [
        (each.level, each.propagate, list(each.handlers), list(each.filters)) for each in (access, errors)
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] != "/wrong"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = Serving(app, listener)
    statuses = [httpx.get(url + path, trust_env=False).status_code for path in ("/", "/wrong")]
    access.info("a request of another server")
    errors.info("another server started")
    serving.stop()
    assert statuses == [200, 500]
    said = [(each.levelname, each.getMessage()) for each in caplog.records if each.name.startswith("uvicorn")]
    assert said == [
        ("ERROR", "Exception in ASGI application\n"),
        ("INFO", "a request of another server"),
        ("INFO", "another server started"),
    ]
    after = [
        (each.level, each.propagate, list(each.handlers), list(each.filters)) for each in (access, errors)
    ]
    assert after == before
