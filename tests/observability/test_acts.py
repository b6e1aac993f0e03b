"""Actions of a control plane for clients, torch's worker protocol, and limits on both."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest
import torch
from click.testing import CliRunner
from support.captured_logs import logged
from support.documents import READ

import dist2
import observability
from dist2.cli.app import cli
from dist2.errors import GroupAbortedError, InvalidUsageError
from dist2.runtime.deadline import Deadline
from observability.server import acts, answers
from observability.server.handlers import capability

DOCUMENTED = sorted(
    {command for path in READ for command in re.findall(r"curl [^`\n]*http[^`\n]+", path.read_text())}
)
"""All commands of curl in the documents."""
ANSWERS = {
    "/metrics": "dist2_build_info{",
    "/sd": '"dist2_rank": "0"',
    "/acts/abort": '"aborted": ["training"]',
}


@pytest.fixture
def pg() -> Iterator[dist2.ProcessGroup]:
    """A group of one rank whose operations all succeed."""
    with dist2.new_group("fake", 20, rank=0, world_size=1, name="acted-on") as group:
        yield group


@pytest.fixture
def server(pg: dist2.ProcessGroup, tmp_path: Path) -> Iterator[observability.Server]:
    """A control plane of that group."""
    with observability.start(pg, dumps=tmp_path) as running:
        yield running


@pytest.fixture
def client(server: observability.Server) -> Iterator[httpx.Client]:
    """A client with the token."""
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=20) as made:
        yield made


def audited(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["act"], each["outcome"]) for each in records if each["name"] == "dist2.audit"]


def test_a_dump_is_written_where_the_program_said(
    client: httpx.Client, pg: dist2.ProcessGroup, tmp_path: Path
) -> None:
    pg.barrier()
    with logged() as records:
        answer = client.post("/acts/dump", json={"path": "/etc/passwd"})
    assert Path(answer.json()["path"]) == tmp_path / "flight_0"
    assert (tmp_path / "flight_0").stat().st_size > 100
    assert audited(records) == [("dump", "done")]


def test_a_group_is_aborted_by_name(client: httpx.Client, pg: dist2.ProcessGroup) -> None:
    for nameless in {}, {"group": ""}, {"group": 7}:
        told = client.post("/acts/abort", json=nameless)
        assert (told.status_code, "name or uid" in told.json()["reason"]) == (400, True)
    with logged() as records:
        assert client.post("/acts/abort", json={"group": "nobody"}).status_code == 404
        assert client.post("/acts/abort", json={"group": "acted-on"}).json()["aborted"] == ["acted-on"]
    with pytest.raises(GroupAbortedError):
        pg.barrier()
    outcomes = [outcome for _, outcome in audited(records)]
    assert outcomes[0].startswith("refused: no open group 'nobody'")
    assert outcomes[1] == "done"


@pytest.mark.parametrize("command", DOCUMENTED)
def test_a_documented_command_of_curl_has_its_answer(command: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with (
        dist2.new_group("fake", 20, rank=0, world_size=1, name="training") as group,
        observability.start(group) as server,
    ):
        line = re.sub(r"http://127\.0\.0\.1:\w+", server.url, command)
        options = "curl --noproxy '*' --silent --show-error --fail "
        ended = subprocess.run(
            ["sh", "-c", line.replace("curl ", options, 1)],
            cwd=tmp_path,
            env={**os.environ, "TOKEN": server.token},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    written = "".join(each.read_text() for each in tmp_path.iterdir())
    assert ended.returncode == 0, ended.stderr
    (path,) = re.findall(rf"{server.url}(/\S+)", line)
    assert ANSWERS[path] in ended.stdout + written


def test_the_documents_name_curl_for_each_of_these() -> None:
    assert len(DOCUMENTED) == len(ANSWERS)


def test_a_group_that_is_built_is_aborted_by_name(client: httpx.Client) -> None:
    with ThreadPoolExecutor() as pool:
        building = pool.submit(
            dist2.new_group, "socket", 60, store=dist2.HashStore(), rank=0, world_size=2, name="half"
        )
        for _ in Deadline.after(20).tries(0.2, 0.5):  # five acts a second
            if client.post("/acts/abort", json={"group": "half"}).status_code == 200:
                break
        with pytest.raises(GroupAbortedError, match="'half' cannot be built: a client of the control plane"):
            building.result(20)


def test_the_log_level_is_set_for_loggers_of_dist2_only(client: httpx.Client) -> None:
    logger = logging.getLogger("dist2.acts-test")
    answer = client.post("/acts/log_level", json={"level": "debug", "logger": "dist2.acts-test"})
    assert answer.json() == {"logger": "dist2.acts-test", "level": "DEBUG", "before": "NOTSET"}
    assert logger.level == logging.DEBUG
    for wrong in ({"level": "debug", "logger": "root"}, {"level": "loud"}, {}):
        assert client.post("/acts/log_level", json=wrong).status_code == 400


def test_a_profile_has_what_other_threads_did(client: httpx.Client) -> None:
    assert client.post("/acts/profile_stop").status_code == 409
    assert client.post("/acts/profile_start", json={"limit_s": 1e9}).status_code == 400
    assert client.post("/acts/profile_start", json={"limit_s": 20}).json()["running"]
    assert client.post("/acts/profile_start").status_code == 409
    torch.ones(100) @ torch.ones(100)
    with dist2.new_group("fake", 20, rank=0, world_size=2) as group:
        group.all_reduce(torch.ones(2))
    time.sleep(1.1)  # acts are rationed by the second
    trace = client.post("/acts/profile_stop")
    assert trace.headers["content-disposition"] == 'attachment; filename="profile_rank0.json"'
    names = {event.get("name") for event in trace.json()["traceEvents"]}
    assert "aten::dot" in names
    assert "dist2:all_reduce" in names


def test_a_browser_cannot_be_led_to_act(client: httpx.Client, server: observability.Server) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as browser:
        page_token = client.get("/page-token").json()["token"]
        browser.headers["Authorization"] = f"Bearer {page_token}"
        assert browser.get("/livez").status_code == 200, "it is signed in"
        for path in ("/acts/dump", "/handler/ping", "/job/gather"):
            assert browser.post(path, json={}).status_code == 401
            assert browser.post(f"{path}?token={server.token}", json={}).status_code == 401
    assert client.get("/acts/dump").status_code == 405


def test_acts_are_rationed(client: httpx.Client) -> None:
    codes = [client.post("/acts/log_level", json={}).status_code for _ in range(acts.ACTS_A_SECOND + 1)]
    assert codes == [400] * acts.ACTS_A_SECOND + [429]


def test_bodies_are_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BODY", 100)
    monkeypatch.setattr(answers, "BODY_S", 0.2)
    assert client.post("/acts/dump", content=b"x" * 101).status_code == 413
    assert client.post("/handler/ping", content=b"x" * 101).status_code == 413
    assert client.post("/acts/dump", content=b"{").status_code == 400
    assert client.post("/acts/dump", content=b"[]").status_code == 400
    assert client.post("/acts/nothing", json={}).status_code == 404

    def slow() -> Iterator[bytes]:
        yield b"{"
        threading.Event().wait(0.5)  # longer than it may take
        yield b"}"

    assert client.post("/acts/dump", content=slow()).status_code == 408


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"protocol": 2},
        {"protocol": 1, "what": {}, "limit_s": 1, "entries": [["x"]]},
        {"protocol": 1, "what": {}, "limit_s": 1e9, "entries": []},
        [],
        3,
    ],
)
def test_requests_of_other_ranks_are_checked(client: httpx.Client, wrong: Any) -> None:
    assert client.post("/job/gather", json=wrong).status_code == 400
    assert client.post("/job/notices", json=wrong).status_code == 400
    assert client.post("/job/waiting", json=wrong).status_code == 400


# torch's worker protocol


def test_handlers_are_our_own_those_of_the_program_and_those_of_torch(
    client: httpx.Client, pg: dist2.ProcessGroup
) -> None:
    pg.barrier()
    remove = observability.register_handler("queue_length", lambda parameters: {"of": parameters["queue"]})
    try:
        names = client.get("/handler/").json()["handlers"]
        assert {"dump_traceback", "fr_trace_json", "queue_length", "ping"} <= set(names)
        assert client.post("/handler/queue_length?queue=input").json() == {"of": "input"}
    finally:
        remove()
    assert client.post("/handler/queue_length").status_code == 404
    assert client.post("/handler/ping").text == "pong"
    stacks = client.post("/handler/dump_traceback").text
    assert "Thread MainThread" in stacks
    assert "test_handlers_are_our_own" in stacks
    dump = client.post("/handler/fr_trace_json?onlyactive=true").json()
    mine = [each for each in dump["entries"] if each["process_group"][0] == pg.info.uid][-1]
    assert mine["profiling_name"].endswith("barrier")
    of_torch = client.post("/handler/dump_nccl_trace_json").json()["entries"]
    assert mine not in of_torch  # perhaps groups of other tests


@pytest.mark.parametrize("exit_code", [None, 0, 1], ids=["none", "works", "refused"])
def test_stacks_come_from_py_spy_where_it_works(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exit_code: int | None
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # one beside it is found, too
    if exit_code is not None:
        program = tmp_path / "py-spy"
        program.write_text(f'#!/bin/sh\necho "asked: $*"\necho not permitted >&2\nexit {exit_code}\n')
        program.chmod(0o700)
    answer = client.post("/handler/pyspy_dump?nonblocking=1&native=1&subprocesses=0")
    assert answer.status_code == 200
    assert "pyspy_dump" in client.get("/handler/").json()["handlers"]
    if exit_code == 0:
        assert answer.text == f"asked: dump --pid {os.getpid()} --native --nonblocking\n"
        return
    assert answer.text.startswith(f"Process {os.getpid()}: ")
    missing = "py-spy is not installed: pip install 'dist2[stacks]'"
    why = missing if exit_code is None else "py-spy failed: not permitted"
    assert f"{why}; Python frames only" in answer.text
    assert f'Thread {threading.main_thread().native_id}: "MainThread"' in answer.text
    assert "    test_stacks_come_from_py_spy_where_it_works (test_acts.py:" in answer.text


def test_a_handler_must_have_a_name_of_its_own() -> None:
    for name in ("fr_trace_json", "a/b", "", 3):
        with pytest.raises(InvalidUsageError, match="name"):
            observability.register_handler(name, dict)  # type: ignore[arg-type]  # 3 is no name
    with pytest.raises(InvalidUsageError, match="handler must be callable"):
        observability.register_handler("fine", None)  # type: ignore[arg-type]  # no handler


def test_the_capability_opens_the_handlers_and_nothing_else(server: observability.Server) -> None:
    opened = f"/torch/{capability(server.token)}"
    with httpx.Client(base_url=server.url, trust_env=False) as stranger:
        assert stranger.post(f"{opened}/handler/ping").text == "pong"
        for path in (f"{opened}/acts/dump", "/torch/wrong/handler/ping", f"{opened}/../acts/dump"):
            assert stranger.post(path).status_code in (401, 404), path
        assert stranger.get(f"{opened}/handler/ping").status_code == 405


def test_torchs_debug_server_lists_our_ranks(
    pg: dist2.ProcessGroup, server: observability.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of torch's own frontend, rendered from the answers of our control planes."""
    pytest.importorskip("jinja2")
    pytest.importorskip("tabulate", reason="torch's debug server needs it")
    pytest.importorskip("requests")
    frontend = pytest.importorskip("torch.distributed.debug._frontend", reason="of torch 2.12")
    if "timeout" not in inspect.signature(frontend.fetch_all).parameters:
        pytest.skip("torch's debug server takes no limit before torch 2.12")
    handlers = pytest.importorskip("torch.distributed.debug._debug_handlers")
    pg.barrier()
    pg.all_reduce(torch.ones(3))
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", store.port), ("WORLD_SIZE", 1)):
            monkeypatch.setenv(name, str(value))
        server.offer_to_torch()
        monkeypatch.setattr(frontend, "fetch_aiohttp", frontend.fetch_thread_pool)
        addresses, (stacks,) = frontend.fetch_all("dump_traceback", timeout=10)
        assert addresses[0].startswith(server.url)
        assert server.token not in addresses[0]
        assert "test_torchs_debug_server_lists_our_ranks" in stacks.text
        _, (spied,) = frontend.fetch_all("pyspy_dump", "nonblocking=1", timeout=10)
        assert spied.text.startswith(f"Process {os.getpid()}: ")
        table = handlers.FlightRecorderHandler()
        table.fetch_timeout = 10
        shown = table.dump()
    finally:
        store.close()
    assert "all_reduce" in shown
    assert "barrier" in shown


def test_without_torchs_variables_the_error_names_them(
    server: observability.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InvalidUsageError, match="MASTER_ADDR"):
        server.offer_to_torch()


# A Unix socket


def test_a_unix_socket_is_an_alternative(pg: dist2.ProcessGroup, tmp_path: Path) -> None:
    path = tmp_path / "control"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # its file stays
    with observability.start(pg, unix_socket=path) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.url.startswith("unix://")
        health = json.loads(observability.fetch(f"{server.url}/healthz", server.token))
        assert health["status"] == "ok", health
        assert CliRunner().invoke(cli, ["why", str(path)]).output.startswith("Nothing waits")
        assert observability.read_metrics(server.url, server.token).value("dist2_build_info") == 1
        with pytest.raises(HTTPError, match="401") as refused:
            observability.fetch(f"{server.url}/healthz", "wrong")
        refused.value.close()
        with pytest.raises(InvalidUsageError, match="unix_socket"):
            observability.start(pg, unix_socket=path)
    assert not path.exists()


# The document


def test_the_openapi_document_has_every_endpoint(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.")
    assert {"/healthz", "/job", "/acts/{name}", "/handler/{name}"} <= set(described["paths"])
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], path
            if method == "get" and path != "/events":  # a stream
                assert client.get(path).status_code in (200, 503), path
    assert json.dumps(described)
