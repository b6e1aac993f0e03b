"""The whole job from any rank: which rank is missing, while it is; on real groups with ranks as threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.captured_logs import logged
from support.ranks import Tenant, run_ranks

import dist2
import observability
from dist2 import HashStore, ProcessGroup
from dist2.cli.app import cli
from dist2.errors import GroupAbortedError, InvalidUsageError, StoreError
from dist2.runtime.other_process import Process
from dist2.runtime.secret import Secret
from dist2.security.authenticator import Credentials
from dist2.store import PrefixStore
from observability.client import Asker
from observability.flight_recorder import FlightRecorder
from observability.job.answer import RANK_S, Answer
from observability.job.diagnosis import diagnose
from observability.job.directory import Directory, Entry
from observability.job.lines import encoded
from observability.job.member import Member, Notice
from observability.job.peers import Peers
from observability.metrics import Metrics

TENANTS = (Tenant("gloo", "gloo"), Tenant("inproc", "socket", {"transport": "inproc"}))
AFTER_S = 0.3
SOON_S = 20.0


def get(server: observability.Server, path: str) -> tuple[int, Any]:
    """Return status and JSON of an answer."""
    try:
        return 200, json.loads(observability.fetch(server.url + path, server.token))
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def until(look: Callable[[], Any]) -> Any:
    """Return the findings of a look, as soon as there are any."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("nothing was found in time")


class Stage:
    """State shared by the ranks of a test: their control planes, and an event once all are there."""

    def __init__(self, world_size: int) -> None:
        self.servers: dict[int, observability.Server] = {}
        self.all_there = threading.Barrier(world_size)

    def enter(self, pg: ProcessGroup, server: observability.Server) -> None:
        self.servers[pg.rank()] = server
        self.all_there.wait(SOON_S)


def is_waiting(server: observability.Server) -> bool:
    """Whether rank 0 waits, by an answer about the job."""
    return bool(get(server, "/job")[1]["ranks"][0]["state"] == "waiting")


@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_a_missing_rank_is_named_everywhere_while_it_is_missing(tenant: Tenant) -> None:
    stage = Stage(3)
    seen: dict[str, Any] = {}

    def observe(mine: observability.Server) -> None:
        victim = stage.servers[0]
        until(lambda: "rank 2" in str(get(victim, "/healthz")[1]["reasons"]))
        until(lambda: get(mine, "/healthz")[1]["reasons"])
        for path in ("/healthz", "/livez", "/readyz"):
            seen[path] = get(victim, path)
            seen[f"mine{path}"] = get(mine, path)
        seen["metrics"] = observability.read_metrics(victim.url, victim.token)
        seen["desync"] = get(mine, "/desync?after_ms=100")[1]
        servers = stage.servers.values()
        for each in servers:  # a rank may have come a moment later than another
            until(partial(is_waiting, each))
        seen["job"] = [get(server, "/job")[1] for server in servers]
        seen["stacks"] = get(victim, "/stacks?rank=2")[1]["ranks"]

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg, waiting_after_s=AFTER_S) as server:
            stage.enter(pg, server)
            pg.barrier()
            if pg.rank() == 2:
                observe(server)
            pg.all_reduce(torch.ones(2))
            until(lambda: get(server, "/healthz")[1]["status"] == "ok")
            pg.barrier()

    with logged() as records:
        run_ranks(3, body, tenant)
    status, health = seen["/healthz"]
    assert (status, health["status"], health["ok"]) == (200, "degraded", False)
    (reason,) = health["reasons"]
    assert "all_reduce #2 of group" in reason
    assert "waits for rank 2 (last seen: barrier #1 at test_job.py:" in reason
    assert seen["/livez"][0] == seen["mine/livez"][0] == 200
    assert seen["/readyz"][0] == seen["mine/readyz"][0] == 503
    (told,) = seen["mine/healthz"][1]["reasons"]
    assert told.startswith("ranks 0, 1 wait for this rank in all_reduce #2 of group")
    assert "test_job.py:" in told
    (sample,) = seen["metrics"].samples("dist2_waiting_seconds")
    assert (sample.labels["op"], sample.labels["missing_rank"]) == ("all_reduce", "2")
    assert sample.value >= AFTER_S
    assert seen["desync"]["culprits"] == [2]
    for job in seen["job"]:
        assert [row["state"] for row in job["ranks"]] == ["waiting", "waiting", "waited for"]
        assert all(abs(row["clock_offset_s"]) <= row["clock_error_s"] for row in job["ranks"])
    (of_culprit,) = seen["stacks"]
    assert any(
        frame["name"].endswith("observe") for thread in of_culprit["threads"] for frame in thread["frames"]
    )
    waiting = [each for each in records if each["name"] == "dist2.waiting"]
    of_job = [each for each in waiting if each["levelname"] == "WARNING" and "the job waits" in each["event"]]
    assert len(of_job) == 1, "one line for the job"
    assert of_job[0]["culprits"] == [2]
    assert "rank 2 (last seen: barrier #1 at test_job.py:" in of_job[0]["event"]
    lines = [each for each in waiting if {"missing", "waiting_ranks"} & set(each)]
    assert sorted(each["rank"] for each in lines) == [0, 1, 2], "at INFO, one line on each rank"
    by_rank = {each["rank"]: each for each in lines}
    assert by_rank[0]["missing"] == [2]
    assert by_rank[2]["waiting_ranks"] == [0, 1]
    assert by_rank[2]["event"].startswith("rank 2 is waited for by ranks 0, 1 in all_reduce #2 of group")


def test_an_answer_is_shared_by_those_that_ask_meanwhile_and_never_older_than_its_question() -> None:
    asked: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()
    come = threading.Semaphore(0)

    class Turn:
        """A lock that tells who has come to it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            come.release()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    class Asked(Member):
        def everyone(self, limit_s: float = RANK_S, **wanted: object) -> dict[int, Answer]:
            asked.append(len(asked))
            begun.set()
            goes_on.wait(SOON_S)
            return {0: self.own_answer({})}

    member: Any = Asked(Metrics(), FlightRecorder())
    member._asking = Turn()
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(member.job())) for _ in range(5)]
    threads[0].start()
    assert begun.wait(SOON_S)
    for thread in threads[1:]:
        thread.start()
    for _ in threads:
        assert come.acquire(timeout=SOON_S)
    goes_on.set()
    for thread in threads:
        thread.join(SOON_S)
    assert len(answers) == 5
    assert len(asked) == 2, "one before the four asked, and one for all four"
    member.job()
    assert len(asked) == 3, "what has happened since must be seen"


@pytest.mark.parametrize("token", [None, "given-token", "silent"])
def test_the_first_rank_says_where_it_is(token: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    """On standard error, since logs hide it by default; with the token only if no other user can read it."""

    def body(pg: ProcessGroup) -> tuple[str, str, str]:
        announce = token != "silent"
        with observability.start(pg, token=token, announce=announce) as server:
            pg.barrier()
            return server.url, server.token, server.page_url

    with logged() as records:
        planes = run_ranks(2, body, TENANTS[1])
    (line,) = [each for each in records if each["name"] == "dist2.control_plane"]
    url, of_job, page_url = planes[0]
    assert line["event"] == f"the control plane of the job is at {url}"
    assert of_job == planes[1][1], "one token a job"
    assert of_job not in line["event"]
    shown = [each for each in capfd.readouterr().err.splitlines() if "control plane" in each]
    said = "dist2: the control plane of this job is at"
    assert shown == {None: [f"{said} {page_url}"], "given-token": [f"{said} {url}"], "silent": []}[token]


def test_ranks_that_never_answer_are_told_apart() -> None:
    """Of four ranks one never starts a control plane, one has closed it, and one has another version."""
    stage = Stage(4)
    jobs: list[Any] = []

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 0:
            with observability.start(pg) as server:
                until(lambda: len(server._member.directory.entries) == 3)  # else they may come too late
                stage.all_there.wait(SOON_S)
                jobs.append(get(server, "/job")[1])
                stage.all_there.wait(SOON_S)
            return
        if pg.rank() == 1:
            stage.all_there.wait(SOON_S)
            stage.all_there.wait(SOON_S)
        elif pg.rank() == 2:
            with observability.start(pg) as server:
                until(lambda: server._member.rank in server._member.directory.entries)
                until(lambda: 0 in _roll(pg))
            stage.all_there.wait(SOON_S)
            stage.all_there.wait(SOON_S)
        else:
            with _another_version() as url:
                directory = Directory(pg.spec.store, Credentials(), pg.info.uid)
                directory.publish(Entry(3, url, Process.here()))
                stage.all_there.wait(SOON_S)
                stage.all_there.wait(SOON_S)

    run_ranks(4, body, TENANTS[1])
    (job,) = jobs
    assert job["world_size"] == 4
    assert job["answered"] == 1
    by_rank = {row["rank"]: row for row in job["ranks"]}
    assert "never called observability.start" in by_rank[1]["silence"]
    assert "connection refused" in by_rank[2]["silence"]
    assert "another version: dist2 9.9" in by_rank[3]["silence"]
    assert job["took_s"] < 10


def _roll(pg: ProcessGroup) -> dict[int, Entry]:
    directory = Directory(pg.spec.store, Credentials(), pg.info.uid)
    directory.refresh(range(pg.size()))
    return directory.entries


class _Stranger(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = encoded({"protocol": 99, "version": "9.9"}, {})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _another_version:  # noqa: N801 - a context manager
    def __enter__(self) -> str:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Stranger)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_neighbour_looks_at_a_silent_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, as if on another host, asks rank 1 about the process of rank 2, which has ended."""
    stage = Stage(2)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    of_gone = attrs.evolve(Process.here(), pid=gone.pid, started=1)
    gone.wait()
    jobs: list[Any] = []

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg) as server:
            if pg.rank() == 1:
                Directory(pg.spec.store, Credentials()).publish(Entry(2, "http://127.0.0.1:9", of_gone))
            stage.enter(pg, server)
            member = server._member
            if pg.rank() == 0:
                monkeypatch.setattr(member, "world", lambda: (0, 1, 2))

                def found_all() -> bool:
                    member.find()
                    return len(member.directory.entries) == 3

                until(found_all)
                monkeypatch.setattr("observability.job.member.seen_from_outside", lambda entry: None)
                jobs.append(member.job())
            stage.all_there.wait(SOON_S)

    run_ranks(2, body, TENANTS[1])
    silent = jobs[0]["ranks"][2]
    assert silent["state"] == "silent"
    assert f"process {gone.pid} has ended" in silent["silence"]
    assert silent["host"] == of_gone.host


def test_a_rank_that_the_others_have_gone_on_without_is_no_part_of_the_job() -> None:
    stage = Stage(3)
    seen: dict[str, Any] = {}

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg) as server:
            stage.enter(pg, server)
            until(lambda: get(server, "/job")[1]["answered"] == 3)
            stage.all_there.wait(SOON_S)
            if pg.rank() == 2:
                server.close()
            stage.all_there.wait(SOON_S)
            smaller = pg.shrink(exclude=[2]) if pg.rank() != 2 else None
            if pg.rank() == 0:
                seen["before"] = get(server, "/job")[1], get(server, "/desync")[1]
            stage.all_there.wait(SOON_S)
            if smaller is not None:
                pg.abort()
                smaller.barrier()
            stage.all_there.wait(SOON_S)
            if pg.rank() == 0:
                seen["after"] = get(server, "/job")[1], get(server, "/desync")[1]
            stage.all_there.wait(SOON_S)

    run_ranks(3, body, TENANTS[1])
    job, desync = seen["before"]
    assert [rank["state"] for rank in job["ranks"]] == ["ok", "ok", "silent"]
    assert (desync["culprits"], desync["left"]) == ([2], [])
    job, desync = seen["after"]
    assert [(rank["rank"], rank["state"]) for rank in job["ranks"]] == [(0, "ok"), (1, "ok")]
    assert (job["world_size"], job["verdict"], job["culprits"]) == (2, [], [])
    assert (desync["verdict"], desync["culprits"], desync["left"]) == ([], [], [2])


@pytest.mark.parametrize(("limit_s", "asked_s"), [(None, 1.0), (5.0, 1.0), (0.2, 0.2)])
def test_job_says_that_an_operation_waits_as_soon_as_why_does(
    limit_s: float | None, asked_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []

    def diagnosed(answers: Any, after_s: float) -> Any:
        used.append(after_s)
        return diagnose(answers, after_s)

    monkeypatch.setattr("observability.job.member.diagnose", diagnosed)
    member: Any = Member(Metrics(), FlightRecorder())
    if limit_s is not None:
        member.watch = SimpleNamespace(after_s=limit_s)
    member.job()
    assert used == [asked_s]


def test_a_group_that_nobody_waits_in_any_more_is_told_as_broken() -> None:
    """All ranks have left the operation, so `/desync` has no verdict."""
    stage = Stage(2)

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg, announce=False) as server:
            stage.enter(pg, server)
            if pg.rank() == 0:
                with pytest.raises(dist2.OperationTimeoutError):
                    pg.all_reduce(torch.ones(2), timeout=0.05)
                told = CliRunner().invoke(cli, ["why", server.url])
                assert told.exit_code == 1, told
                assert "  rank 0 failed: OperationTimeoutError: all_reduce(float32[2]" in told.output
            stage.all_there.wait(SOON_S)

    run_ranks(2, body, TENANTS[1])


def test_an_act_is_carried_out_on_all_ranks(tmp_path: Path) -> None:
    stage = Stage(3)
    answers: list[Any] = []

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg, dumps=tmp_path) as server:
            stage.enter(pg, server)
            if pg.rank() == 1:
                until(lambda: len(server._member.directory.entries) == 3)
                act = f"{server.url}/acts/dump"
                answers.append(json.loads(Asker().ask(act, server.token, body={"everywhere": True})))
            stage.all_there.wait(SOON_S)

    run_ranks(3, body, TENANTS[1])
    assert sorted(answers[0]["ranks"]) == ["0", "1", "2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight_0", "flight_1", "flight_2"]


def test_an_act_that_the_asked_rank_refuses_is_carried_out_on_the_others() -> None:
    """A group that only the others are in is aborted through any rank."""
    stage = Stage(3)
    answers: dict[str, Any] = {}

    def body(pg: ProcessGroup) -> None:
        half = pg.split_by(color=1 if pg.rank() else None, name="half")
        with observability.start(pg) as server:
            stage.enter(pg, server)
            if pg.rank() == 0:
                until(lambda: len(server._member.directory.entries) == 3)
                act = {"group": "half", "everywhere": True}
                answers.update(
                    json.loads(Asker().ask(f"{server.url}/acts/abort", server.token, body=act))["ranks"]
                )
            stage.all_there.wait(SOON_S)
            if half is not None:
                with pytest.raises(GroupAbortedError):
                    half.barrier()

    run_ranks(3, body, TENANTS[1])
    assert answers["0"]["error"].startswith("404 no open group 'half' on this rank; there are: ")
    assert [answers[rank]["aborted"] for rank in "12"] == [["half"], ["half"]]


def test_reports_that_hold_no_more_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to ask for them."""
    monkeypatch.setattr("observability.job.member.MAX_NOTICES", 2)
    monkeypatch.setattr("observability.job.member.NOTICE_S", 0.0)
    member = Member(Metrics(), FlightRecorder(4))
    with logged() as records:
        for seq in range(4):
            notice = {"key": ["u", seq, False, -1], "title": f"barrier #{seq}", "by": [1], "age_s": 6.0}
            member.take_notices([notice])
    told = [each["waited_for_in"] for each in records if each["name"] == "dist2.waiting"]
    assert told == [f"barrier #{seq}" for seq in range(4)]


# The directory


def entry(rank: int, url: str = "http://127.0.0.1:9") -> Entry:
    return Entry(rank, url, Process.here())


SECRET = Credentials(Secret(b"0123456789abcdef", "a test"), "job")


@pytest.fixture(params=["appends", "keys"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixStore]:
    """A store that can append, and one that cannot."""
    below = PrefixStore("group", HashStore())
    if request.param == "keys":
        monkeypatch.setattr(PrefixStore, "has_extended_api", lambda self: False)
    yield below


def member_of(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> Member:
    """Return rank 0 of two, which knows where the others are, and replaces their control planes."""
    directory = Directory(store, Credentials())
    for rank in range(2):
        directory.publish(entry(rank))
    member = Member(Metrics(), FlightRecorder(4), directory=directory)
    monkeypatch.setattr(member, "world", lambda: (0, 1))
    return member


def test_prometheus_is_told_of_a_control_plane_that_was_replaced(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `observability.start`, where the environment had started one."""
    monkeypatch.setattr("observability.job.member.MOVES_S", 0.0)
    peers = Peers(member_of(store, monkeypatch), "http://127.0.0.1:9")
    Directory(store, Credentials()).publish(entry(1, "http://127.0.0.1:10"))
    assert [each["targets"] for each in peers.targets()] == [["127.0.0.1:9"], ["127.0.0.1:10"]]


def test_calls_are_asked_for_where_a_control_plane_is_by_now(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = member_of(store, monkeypatch)
    Directory(store, Credentials()).publish(entry(1, "http://127.0.0.1:10"))
    assert member.entries({1: 0}, 10, 5.0)[1].state is None
    assert member.directory.entries[1].url == "http://127.0.0.1:10"


@pytest.mark.parametrize("credentials", [Credentials(), SECRET], ids=["open", "sealed"])
def test_entries_are_read_back_and_the_last_counts(store: PrefixStore, credentials: Credentials) -> None:
    first, second = Directory(store, credentials, "g"), Directory(store, credentials, "g")
    first.publish(entry(0))
    first.publish(entry(0, "http://127.0.0.1:10"))
    second.publish(entry(1))
    for directory in (first, second):
        directory.refresh(range(3))
        assert {rank: each.url for rank, each in directory.entries.items()} == {
            0: "http://127.0.0.1:10",
            1: "http://127.0.0.1:9",
        }
    second.close()
    second.refresh(range(3))
    assert len(second.entries) == 2, "what was read outlives the store"


def test_an_entry_that_no_member_sealed_is_not_taken(store: PrefixStore) -> None:
    Directory(store, Credentials(), "g").publish(entry(1, "http://127.0.0.1:6666"))
    ours = Directory(store, SECRET, "g")
    ours.refresh(range(2))
    assert ours.entries == {}


def test_ranks_agree_on_the_token_of_the_first(store: PrefixStore) -> None:
    assert Directory(store, SECRET, "g").agreed_token("first") == "first"
    assert Directory(store, SECRET, "g").agreed_token("second") == "first"
    assert Directory(None, SECRET, "g").agreed_token("alone") == "alone"


def test_without_a_store_that_works_each_rank_has_a_token_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Directory, mine: str) -> str:
        raise StoreError("the server is gone")

    monkeypatch.setattr(Directory, "agreed_token", fails)
    with logged() as records, observability.start() as server:
        assert len(server.token) >= 32
    assert any("cannot agree on a token" in each["event"] for each in records)


def test_the_first_open_group_is_where_ranks_meet_by_default() -> None:
    with dist2.new_group("fake", 20, rank=1, world_size=2) as pg, observability.start() as server:
        assert server._member.rank == pg.rank() == 1
        until(lambda: 1 in _roll(pg))


# Notices of other ranks


def test_a_notice_is_forgotten_once_nobody_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(Metrics(), FlightRecorder())
    notice = {"key": ["world", 3, False, -1], "title": "all_reduce #3 of group g", "by": [1], "age_s": 2.0}
    with logged() as records:
        for _ in range(3):
            member.take_notices([notice])
    assert len(records) == 1, "the log has it once"
    (held,) = member.notices()
    assert isinstance(held, Notice)
    monkeypatch.setattr("observability.job.member.NOTICE_S", 0.0)
    assert member.notices() == []


def test_waiting_after_must_be_a_time() -> None:
    with pytest.raises(InvalidUsageError, match="waiting_after_s"):
        observability.start(waiting_after_s=-1)


def test_a_control_plane_that_took_the_place_of_another_one_is_found() -> None:
    known, replaced, asked = threading.Event(), threading.Event(), threading.Event()
    states: list[list[str]] = []

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            with observability.start(pg, announce=False) as server:
                until(lambda: all(each["state"] == "ok" for each in get(server, "/job")[1]["ranks"]))
                known.set()
                assert replaced.wait(SOON_S)
                states.append([each["state"] for each in get(server, "/job")[1]["ranks"]])
                asked.set()
        else:
            with observability.start(pg, announce=False):
                assert known.wait(SOON_S)
            with observability.start(pg, announce=False) as server:
                until(lambda: len(get(server, "/job")[1]["ranks"]) == 2)
                until(lambda: server._member.watch._published)  # type: ignore[union-attr]  # it watches
                replaced.set()
                assert asked.wait(SOON_S)

    run_ranks(2, body, TENANTS[1])
    assert states == [["ok", "ok"]]
