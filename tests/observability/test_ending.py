"""Commands and a job that ends: told by the page of its launcher, or by its processes on this host."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest
from click.testing import CliRunner
from support.job_frames import SOON_S, job, rank, read_until, text_of
from support.programs import environment

import observability
from dist2.cli.app import cli
from dist2.runtime.other_process import Process as ProcessId
from observability import automatic, token_files
from observability.commands import top as top_module
from observability.commands.control_plane import NO_ANSWER, ControlPlane, NoAnswerError
from observability.commands.top import JobFeed
from observability.incidents import folders
from observability.incidents.recording import Recording
from observability.job.directory import Entry
from observability.job.verdict import Diagnosis
from observability.server import job_page
from observability.server.job_page import JobPage

RANK = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from dist2.runtime.other_process import Process as ProcessId
from observability import token_files

number, job = int(sys.argv[1]), sys.argv[2].encode()

class ControlPlane(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/job" else 404)
        self.end_headers()
        self.wfile.write(job)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), ControlPlane)
url = f"http://127.0.0.1:{server.server_address[1]}"
file = token_files.write(url, "t", token_files.Job("uid-of-the-job", "job", number, 2, "train.py"))
threading.Thread(target=server.serve_forever, daemon=True).start()
print(url, flush=True)
code = int(sys.stdin.readline())
server.shutdown()
server.server_close()
token_files.remove(file)
sys.exit(code)
"""


@attrs.frozen
class Process:
    """A process with a control plane that answers for a job of two ranks."""

    popen: subprocess.Popen[str]
    url: str

    def exit(self, code: int) -> None:
        """End it with an exit code, and wait until it has; its parent asks for the code later."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{code}\n")
        self.popen.stdin.flush()
        self.wait()

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self.popen.kill()
        self.wait()

    def wait(self) -> None:
        """Wait for its end, which the kernel then tells to others too."""
        os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Process]]:
    """Start a process of a job; all are ended afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("DIST2_INCIDENTS", raising=False)
    started: list[subprocess.Popen[str]] = []

    def started_process(number: int) -> Process:
        answer = json.dumps(job(rank(0, 1.0, 1, 1), rank(1, 1.0, 1, 1)))
        popen = subprocess.Popen(
            [sys.executable, "-c", RANK, str(number), answer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(TMPDIR=str(tmp_path)),
        )
        started.append(popen)
        assert popen.stdout is not None
        return Process(popen, popen.stdout.readline().strip())

    yield started_process
    for each in started:
        each.kill()
        each.communicate(timeout=SOON_S)


def fed(process: Process) -> JobFeed:
    feed = JobFeed(ControlPlane.of(process.url, None, None))
    feed.ask()
    return feed


def unanswered(feed: JobFeed) -> str:
    """Ask in vain; return the frame."""
    with pytest.raises(NoAnswerError):
        feed.ask()
    return text_of(feed.frame(), width=400)


def test_a_job_whose_ranks_exit_without_an_error_has_ended_well(start: Callable[[int], Process]) -> None:
    ranks = [start(0), start(1)]
    feed = fed(ranks[0])
    ranks[0].exit(0)
    feed.ask()
    assert feed.frame().base == ranks[1].url, "found by its file: no answer has named it"
    assert feed.status() is None
    ranks[1].exit(0)
    shown = unanswered(feed)
    assert "The job has ended: ranks 0, 1 exited with code 0\n" in shown
    assert "all_reduce #7" in shown, "the last table stays"
    assert feed.status() == 0
    feed.close()


def test_a_job_that_was_killed_may_be_started_again_for_a_while(
    start: Callable[[int], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [start(0), start(1)]
    feed = fed(ranks[0])
    for each in ranks:
        each.kill()
    shown = unanswered(feed)
    assert "The job has ended: ranks 0, 1 were killed by SIGKILL. Trying 15 s more: a launcher may" in shown
    assert feed.status() is None
    again = start(0)
    feed.ask()
    assert feed.frame().base == again.url
    assert feed.status() is None
    again.kill()
    unanswered(feed)
    monkeypatch.setattr(top_module, "RESTART_S", 0.0)
    assert feed.status() == 1
    assert "Trying" not in text_of(feed.frame(), width=400)
    feed.close()


def test_the_incident_of_the_job_is_named(start: Callable[[int], Process], tmp_path: Path) -> None:
    root = token_files.folder() / "incidents"
    feed = fed(process := start(0))
    mine = folders.joined(root, "uid-of-the-job", "job").path
    folders.joined(root, "uid-of-another", "other")
    process.exit(1)
    assert f"rank 0 exited with code 1; incident: dist2 why {mine}" in unanswered(feed)
    feed.close()


def test_a_launcher_that_has_ended_starts_no_rank_again(start: Callable[[int], Process]) -> None:
    page, only = start(-1), start(0)
    feed = fed(page)
    only.kill()
    page.exit(137)
    shown = unanswered(feed)
    assert "The job has ended: the launcher exited with code 137; rank 0 was killed by SIGKILL\n" in shown
    assert feed.status() == 1
    feed.close()


def test_a_job_that_does_not_answer_is_given_up(
    start: Callable[[int], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = start(0), start(1)
    feed = fed(first)
    first.exit(0)
    os.kill(other.popen.pid, signal.SIGSTOP)
    monkeypatch.setattr(top_module, "JOB_S", 0.2)
    shown = unanswered(feed)
    assert "Trying again for " in shown
    assert feed.status() is None
    monkeypatch.setattr(top_module, "GIVE_UP_S", 0.0)
    assert feed.status() == NO_ANSWER
    assert "Giving up." in text_of(feed.frame(), width=400)
    feed.close()


@pytest.mark.parametrize("code", [0, 3])
def test_a_terminal_keeps_the_last_table(start: Callable[[int], Process], code: int, tmp_path: Path) -> None:
    page, only = start(-1), start(0)
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "dist2", "top", page.url, "--interval", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm", LINES="40", COLUMNS="160", TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    os.close(theirs)
    read_until(ours, "2 of 2 ranks answer")
    only.exit(code)
    page.exit(code)
    rest = read_until(ours, "").partition("\x1b[?1049l")[2]
    os.close(ours)
    assert f"The job has ended: the launcher exited with code {code}" in rest, (
        "after the screen before is back"
    )
    assert "all_reduce #7" in rest
    assert program.wait(SOON_S) == (1 if code else 0)


def test_the_page_of_a_launcher_tells_how_the_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    page = JobPage("train.py", 2)
    try:
        base = page.url.partition("/#")[0]
        starting = CliRunner().invoke(cli, ["top", base, "--once", "--interval", "0.2"])
        assert (starting.exit_code, "none has made a group yet" in starting.output) == (0, True)
        page.ended("rank 1 was killed by SIGKILL", 137, "/incidents/of this")
        told = "The job has ended: rank 1 was killed by SIGKILL; incident: dist2 why '/incidents/of this'"
        for command, code in ((["top", base], 1), (["why", base], 2), (["query", base, "select 1"], 2)):
            ended = CliRunner(env={"COLUMNS": "300"}).invoke(cli, command)
            assert (ended.exit_code, told in ended.output) == (code, True), ended.output
            assert command[0] == "top" or len(ended.output.splitlines()) == 1
    finally:
        page.close()


def test_a_diagnosis_of_the_time_before_is_none_of_a_job_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    waits = {**Diagnosis().document(), "verdict": ["rank 1 sleeps"]}
    answers = {"/job": job(rank(0, 1.0, 1, 1)), "/desync": waits}

    def ask(url: str, *_: object, **__: object) -> bytes:
        path = urlsplit(url).path
        if path not in answers:
            raise OSError("not asked here")
        return json.dumps(answers[path]).encode()

    page = JobPage("train.py", 2)
    plane = token_files.ControlPlaneFile("http://rank", "t", ProcessId.here(), token_files.Job())
    monkeypatch.setattr(page, "_planes", lambda: [plane] if answers else [])
    monkeypatch.setattr(page._asker, "ask", ask)
    try:
        base = page.url.partition("/#")[0]
        live = CliRunner().invoke(cli, ["why", base])
        assert (live.exit_code, "rank 1 sleeps" in live.output) == (1, True), live.output
        page.ended("all ranks, without an error", 0, "")
        answers.clear()
        told = f"The job has ended: all ranks, without an error. Its last state: dist2 top {base}\n"
        assert unanswered_at(base, ["why"]) == told
    finally:
        page.close()


COMMANDS = [["top"], ["why"], ["query", "select 1"], ["trace"]]


def unanswered_at(url: str, command: list[str]) -> str:
    """Ask a control plane that is gone by a command; return its line."""
    ended = CliRunner().invoke(cli, [command[0], url, *command[1:]])
    assert ended.exit_code == NO_ANSWER
    assert len(ended.output.splitlines()) == 1
    return ended.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_url_that_is_gone_leads_to_the_incident_of_its_job(
    command: list[str], start: Callable[[int], Process]
) -> None:
    root, killed, failed = token_files.folder() / "incidents", start(0), start(1)
    killed.kill()
    mine = folders.joined(root, "uid-of-the-job", "job").path
    failed.exit(1)
    folders.joined(root, "uid-of-another", "other")
    for each in killed, failed:
        told = unanswered_at(each.url.replace("127.0.0.1", "localhost"), command)
        assert "or, if the job has ended, its incident, " in told
        assert told.endswith(f" old: dist2 why {mine}\n")
    assert " t\n" not in (mine / folders.URLS).read_text()
    assert "no incident here is of a job with this URL" in unanswered_at("http://127.0.0.1:1", command)


def test_an_incident_is_not_of_a_later_job_at_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("DIST2_INCIDENTS", raising=False)
    root, local, remote = token_files.folder() / "incidents", "unix://%2Fa", "http://10.0.0.1:1234"
    first = folders.joined(root, "a", "first").path
    folders.add_urls(first, [local, remote])
    assert folders.latest_at(root, local, 0.0) == first
    assert str(first) in unanswered_at(local, ["why"])
    token_files.write(local, "t")  # by a job that was killed
    os.utime(token_files._path_of(local), (2**32, 2**32))
    assert "no incident here is of a job with this URL" in unanswered_at(local, ["why"])
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert folders.latest_at(root, local, 0.0) is None, "it is an address of another host"
    assert folders.latest_at(root, remote.replace("http", "https"), 0.0) == first
    second = folders.joined(root, "b", "second").path
    folders.add_urls(second, [remote])
    assert folders.latest_at(root, remote, 0.0) == second


def test_an_incident_is_of_a_job_whose_control_plane_starts_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("DIST2_INCIDENTS", raising=False)
    url = "http://127.0.0.1:1"
    made = folders.joined(token_files.folder() / "incidents", "a", "job").path
    token_files.write(url, "t")  # of a rank that starts it while another one has failed, and that is killed
    os.utime(token_files._path_of(url), (time.time() + 1, time.time() + 1))
    folders.add_urls(made, [url])
    os.utime(made / folders.URLS, (time.time() + 2, time.time() + 2))
    assert str(made) in unanswered_at(url, ["why"])


def test_an_incident_is_found_by_the_url_of_a_rank_that_writes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, remote = Recording(tmp_path), "http://10.0.0.7:1234"
    monkeypatch.setattr(automatic._parts, "recording", recording)
    with observability.start(announce=False) as server:
        assert recording.known is server._member.directory.entries
    elsewhere = attrs.evolve(ProcessId.here(), host="node-7")
    recording.known = {7: Entry(7, remote, elsewhere)}
    for _ in range(2):
        recording.note(folders.joined(tmp_path, "a", "job"))
    assert folders.latest_at(tmp_path, remote, 0.0) == recording.latest
    assert recording.latest is not None
    assert (recording.latest / folders.URLS).read_text().count(f"node-7 {remote}\n") == 1


def test_ranks_add_their_control_planes_to_an_incident_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(token_files, "_here", [])
    root = token_files.folder() / "incidents"
    made = folders.joined(root, "a", "job").path
    closed = token_files.write("http://127.0.0.1:1", "t")
    assert closed is not None
    token_files.remove(closed)  # as an error leaves a block, before the interpreter has ended
    for _ in range(2):
        assert folders.joined(root, "a", "job").path == made
        folders.named(root, made.name, "a", "job")
    assert [line.split()[1] for line in (made / folders.URLS).read_text().splitlines()] == [
        "http://127.0.0.1:1"
    ]
    page = JobPage("train.py", 2)
    try:
        page.ended("rank 1 failed", 1, str(made))
        assert folders.latest_at(root, page.url.partition("/#")[0], 0.0) == made
    finally:
        page.close()


def test_a_page_that_knows_no_answer_says_so_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take a rank that no launcher has started for one of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token_files.write("http://127.0.0.1:1", "t", token_files.Job("uid", "of another job"))
    page = JobPage("train.py", 2)
    try:
        assert page._planes() == []
        told = CliRunner().invoke(cli, ["why", page.url]).output
    finally:
        page.close()
    assert " refuses: 502 no rank answers, and nothing is kept of '/desync?" in told, told


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_that_has_left_nothing_leads_to_ps(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "dist2 ps lists the jobs that run here" in unanswered_at("http://127.0.0.1:1", command)


def test_the_page_of_a_launcher_tells_of_a_wait_in_the_first_new_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank has a control plane yet; the incident is found by the meeting."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(job_page, "EVERY_S", 1000.0)
    for name, value in (("DIST2_INCIDENTS", tmp_path / "i"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "7")):
        monkeypatch.setenv(name, str(value))
    verdict = "rank 0 is in dist2's new_group; rank 1: it has not registered for the group"
    found = attrs.evolve(Diagnosis(), verdict=(verdict,), culprits=(1,)).document()
    page = JobPage("train.py", 2)
    try:
        page.starts("here:7")
        page._look()
        assert page._job["headline"].startswith("The ranks are starting")
        folder = folders.joined(tmp_path / "i", "uid", "new_group").path
        page._look()
        assert page._job["headline"].startswith("The ranks are starting"), "it is being written"
        (folder / "desync.json").write_text(json.dumps(found))
        page._look()
        assert page._job["headline"] == f"No rank has made a group yet: {verdict}"
        told = CliRunner().invoke(cli, ["why", page.url.partition("/#")[0]])
        assert (told.exit_code, verdict in told.output) == (1, True), told.output
        page.ended("rank 1 failed", 1, str(folder))
        told = CliRunner().invoke(cli, ["why", page.url.partition("/#")[0]])
        assert "The job has ended: rank 1 failed" in told.output
    finally:
        page.close()
