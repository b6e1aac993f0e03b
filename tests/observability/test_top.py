"""``dist2 top``: the frame as a function of answers, the command on a real job, keys and a lost server."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from support.documents import output_of
from support.fake_groups import FakeGroup, info_of
from support.job_frames import SOON_S, WIDTH, job, operation, rank, read_until, text_of
from support.programs import environment, run
from support.ranks import Tenant, run_ranks
from support.warm_interpreter import warm_python

import observability
from dist2 import ProcessGroup
from dist2.cli.app import cli
from dist2.cli.bench.sizes import rate_text
from observability.commands.control_plane import NO_ANSWER, ControlPlane, NoAnswerError
from observability.commands.job_table import Frame
from observability.commands.top import JobFeed
from observability.flight_recorder import FlightRecorder
from observability.metrics import Metrics
from observability.server.app import app_of
from observability.server.serving import Serving

TOKEN = "a-token-for-tests"


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": str(WIDTH)}).invoke(cli, arguments)


# The frame


@pytest.mark.parametrize("width", [150, 110, 80, 60, 50])
def test_a_narrow_terminal_leaves_out_columns_and_cuts_reasons(width: int) -> None:
    reason = "its control plane is gone: " + 20 * "why "
    silent = {"rank": 0, "state": "silent", "url": None, "silence": reason}
    step = {"number": 5, "step_s": 0.5, "groups": {}}
    late = rank(10, 1.0, 5, 100, state="waited for", steps=[{"latest": [step]}])
    whole = job(silent, late, rank(11, 1.0, 5, 100, state="waiting"))
    lines = text_of(Frame("http://x", whole), width=width).splitlines()
    (head,) = [line for line in lines if line.lstrip().startswith("rank")]
    rows = {line.split()[0]: line for line in lines if line.lstrip()[:2] in ("0 ", "10", "11")}
    assert head.split()[:2] == ["rank", "state"]
    assert rows["10"].split()[1:3] == ["waited", "for"]
    assert rows["0"].split()[1] == "silent"
    assert ("its control" in rows["0"]) == (width >= 80)
    assert all("\N{HORIZONTAL ELLIPSIS}" not in line for line in (head, *rows.values()))
    assert ("bus" in head, "ops/s" in head) == (width >= 150, width >= 80)
    assert all(len(line) <= width for line in lines)


def test_a_terminal_of_40_columns_shows_whom_it_is_about() -> None:
    late = rank(10, 1.0, 5, 100, state="waited for")
    waiting = rank(11, 1.0, 5, 100, state="waiting")
    ranked = {"rank": 10, "group": "a group of a long name", "late_s": 0.9, "share": 0.04}
    stragglers = {"ranking": [ranked], "stragglers": []}
    frame = Frame("http://x", job(late, waiting), stragglers=stragglers)
    lines = text_of(frame, width=40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    rows = [" ".join(line.split()) for line in lines]
    assert {"10 waited for", "11 waiting", "10 a group of a long name 4.0%"} <= set(rows), lines


def test_a_rank_is_cleared_only_once_it_is_judged() -> None:
    late = {"group": "tp", "late_s": 0.05, "share": 0.8}
    ranking = [{**late, "rank": 1, "judged": True}, {**late, "rank": 2, "judged": False}, {**late, "rank": 3}]
    stragglers = {"ranking": ranking, "stragglers": []}
    lines = text_of(Frame("http://x", job(rank(0, 1.0, 5, 100)), stragglers=stragglers)).splitlines()
    verdicts = [line.split("ms")[1].strip() for line in lines if "80.0%" in line]
    assert verdicts == ["within the noise", "too early to say", "within the noise"]


def row_of(frame: Frame, number: int) -> str:
    rows = [line for line in text_of(frame).splitlines() if line.split()[:1] == [str(number)]]
    assert len(rows) == 1
    return rows[0]


def test_rates_are_differences_on_the_clock_of_the_rank() -> None:
    before = job(rank(0, 100.0, 10, 1000), rank(1, 500.0, 10, 1000), rank(2, 100.0, 10, 1000))
    now = job(
        rank(0, 102.0, 50, 4_001_000), rank(1, 501.0, 30, 1_001_000), rank(2, 102.0, 50, 4_001_000, pid=5)
    )
    frame = Frame("http://h", now, before)
    assert "20" in row_of(frame, 0).split()
    assert "2 MB/s" in row_of(frame, 0)
    assert "4 MB/s" in row_of(frame, 0)
    assert "1 MB/s" in row_of(frame, 1)
    told = [rate_text(rate) for rate in (0, 90.3, 999.7, 15_800)]
    assert told == ["0 B/s", "90.3 B/s", "1 kB/s", "15.8 kB/s"]
    assert "MB/s" not in row_of(frame, 2), "another process took the place of this rank"
    assert "MB/s" not in text_of(Frame("http://h", now)), "one answer has no rate"


def test_ranks_in_trouble_come_first() -> None:
    ranks = [rank(number, 1.0, 1, 1) for number in range(40)]
    ranks[30] = {"rank": 30, "state": "silent", "url": None, "silence": "connection refused"}
    ranks[33]["state"] = "waiting"
    shown = text_of(Frame("http://h", job(*ranks, verdict=["rank 30: gone"])), most_rows=3)
    numbers = [line.split()[0] for line in shown.splitlines() if " dp " in line or "silent" in line]
    assert numbers == ["30", "33", "0"]
    assert "37 more rows" in shown
    assert "rank 30: gone" in shown
    ranks[35]["state"] = "waited for"
    shown = text_of(Frame("http://h", job(*ranks)))
    numbers = [line.split()[0] for line in shown.splitlines() if " dp " in line or "silent" in line]
    assert numbers == ["35", "30", "33", *[str(each) for each in range(40) if each not in (30, 33, 35)]]
    assert "more rows" not in shown


def test_text_of_the_job_cannot_control_the_terminal() -> None:
    name = "dp\x1b]0;owned\x07[red]"
    shown = text_of(Frame("http://h", job(rank(0, 1.0, 1, 1, name=name), verdict=["\x1b[2J is waited for"])))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "owned" in shown
    assert "[red]" in shown, "and none of it is markup"


def test_an_answer_that_is_old_says_so() -> None:
    shown = text_of(Frame("http://h", job(rank(0, 1.0, 1, 1)), trouble="h is gone", age_s=7.2))
    assert "No answer: h is gone; the data below is 7 s old" in shown


def test_the_documented_frame() -> None:
    barrier = {**operation(378, 9.7), "op": "barrier"}
    ranks = [
        rank(number, 1.0, 1, 1, name="training", in_flight=[barrier][: number < 2]) for number in range(3)
    ]
    for each, state in zip(ranks, ["waiting", "waiting", "waited for"], strict=True):
        each["state"] = state
        each["groups"][0]["last"] = each["in_flight"][0] if each["in_flight"] else operation(377)
    shown = output_of("docs/metrics.md", "dist2 top --once http://127.0.0.1:40123").splitlines()
    waiting = [{**barrier, "caller": -1, "missing": [{"rank": 2}], "more": 0}]
    before = job(*({**each, "at_s": 0.0} for each in ranks))
    frame = Frame("http://127.0.0.1:40123", job(*ranks, verdict=[shown[1]], waiting=waiting), before)
    printed = [line.rstrip() for line in text_of(frame, width=240).splitlines()]
    assert printed == shown


# The command on a real job


def test_one_frame_of_a_job_that_waits(tmp_path: Path) -> None:
    planes: dict[int, observability.Server] = {}
    all_there = threading.Barrier(3)
    results: dict[str, Result] = {}

    def observe() -> None:
        url, token = planes[0].url, planes[0].token
        deadline = time.monotonic() + SOON_S
        while not json.loads(observability.fetch(f"{url}/job", token))["verdict"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        file = tmp_path / "token"
        file.write_text(f"{token}\n")
        results["top"] = invoke("top", url, "--token-file", str(file), "--once", "--interval", "0.3")
        (tmp_path / "wrong").write_text("wrong")
        for command in ("top", "why", "trace"):
            results[command + " wrong"] = invoke(command, url, "--token-file", str(tmp_path / "wrong"))

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg, waiting_after_s=0.3) as server:
            planes[pg.rank()] = server
            all_there.wait(SOON_S)
            for _ in range(50):
                pg.all_reduce(torch.ones(1024))
            if pg.rank() == 2:
                observe()
            pg.all_reduce(torch.ones(2))
            pg.barrier()

    run_ranks(3, body, Tenant("inproc", "socket", {"transport": "inproc"}))
    top = results["top"]
    assert top.exit_code == 0, top.output
    assert "3 of 3 ranks answer" in top.output
    assert "rank 2 (last seen: all_reduce #50" in top.output, "the banner has the culprit"
    (waiting,) = [line for line in top.output.splitlines() if line.split()[:2] == ["0", "waiting"]]
    assert "all_reduce #51" in waiting
    assert "rank 2" in waiting
    assert "0 B/s" in waiting
    lines = top.output.splitlines()
    (culprit,) = [line for line in lines if line.split()[:2] == ["2", "waited"]]
    assert lines.index(culprit) < lines.index(waiting)
    assert "all_reduce #50" in culprit
    assert "\x1b" not in top.output
    for command in ("top", "why", "trace"):
        refused = results[command + " wrong"]
        assert refused.exit_code == NO_ANSWER
        assert "refuses the token: give --token" in refused.output
        assert len(refused.output.splitlines()) == 1


class NotDist2(BaseHTTPRequestHandler):
    """Another web server."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize("command", ["top", "why", "trace"])
def test_what_cannot_be_asked_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    other = ThreadingHTTPServer(("127.0.0.1", 0), NotDist2)
    thread = threading.Thread(target=other.serve_forever, args=(0.01,))
    thread.start()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        urls = {
            f"http://127.0.0.1:{unused.getsockname()[1]}": "does not answer: [Errno 111]",
            "127.0.0.1:80": "url must start with http://",
            f"http://127.0.0.1:{other.server_address[1]}": "",
            f"unix://{str(tmp_path / 'none').replace('/', '%2F')}": "does not answer",
        }
        for url, reason in urls.items():
            ended = invoke(command, url)
            assert ended.exit_code == NO_ANSWER, ended.output
            assert reason in ended.output
            assert len(ended.output.splitlines()) == 1
    other.shutdown()
    thread.join()
    other.server_close()


def test_an_invalid_variable_is_one_line(tmp_path: Path) -> None:
    absent = str(tmp_path / "secret")
    command = [*warm_python(), "-m", "dist2", "top", "http://127.0.0.1:9"]
    ended = run(command, variables={"DIST2_SECRET_FILE": absent})
    assert ended.code == NO_ANSWER
    assert ended.errors == f"DIST2_SECRET_FILE: {absent!r} cannot be read: No such file or directory\n"


@contextmanager
def served() -> Iterator[tuple[Serving, str]]:
    """Serve a job of two ranks, of which the second does not exist."""
    metrics, recorder = Metrics(), FlightRecorder()
    group = FakeGroup(info_of(0, 2), metrics, recorder)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = Serving(app_of(metrics, recorder, token=TOKEN, port=port), listener)
    try:
        yield serving, f"http://127.0.0.1:{port}"
    finally:
        serving.stop()
        group.close()


def test_another_rank_is_asked_if_the_asked_one_is_gone() -> None:
    with served() as (_, second):
        with served() as (serving, first):
            feed = JobFeed(ControlPlane.of(first, TOKEN, None))
            feed.ask()
            assert feed.frame().job is not None
            feed.frame().job["ranks"][1]["url"] = second  # type: ignore[index]  # as its directory would tell
            serving.stop()
        feed.ask()
        assert feed.frame().base == second
        assert not feed.frame().trouble
    with pytest.raises(NoAnswerError, match="does not answer"):
        feed.ask()
    assert "does not answer" in feed.frame().trouble
    assert feed.frame().job is not None, "the last answer is kept"


def test_a_terminal_shows_a_lost_server_and_q_or_ctrl_c_end_it() -> None:
    with served() as (serving, url):
        ends, terminals = [], []
        for _ in range(2):
            ours, theirs = pty.openpty()
            program = subprocess.Popen(
                [sys.executable, "-m", "dist2", "top", url, "--token", TOKEN, "--interval", "0.2"],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=environment(TERM="xterm", LINES="40"),
                start_new_session=True,
            )
            os.close(theirs)
            ends.append(program)
            terminals.append(ours)
        for terminal in terminals:
            read_until(terminal, "1 of 2 ranks answer")
        serving.stop()
        for terminal in terminals:
            read_until(terminal, "No answer: ")
        os.write(terminals[0], b"q")
        ends[1].send_signal(signal.SIGINT)
        for program, terminal in zip(ends, terminals, strict=True):
            rest = read_until(terminal, "")
            assert "Traceback" not in rest
            assert "\x1b[?1049l" in rest, "the screen before is back"
            assert program.wait(SOON_S) == 0
            os.close(terminal)
