"""Control planes without a line of code: by the environment, of a launcher; and the list of jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch
from click.testing import CliRunner
from support.captured_logs import logged
from support.programs import run, start, torchrun
from support.ranks import Tenant, run_ranks
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

import observability
from dist2 import ProcessGroup
from dist2.cli.app import cli
from dist2.run import main as run_main
from dist2.runtime.config import Config
from dist2.runtime.other_process import Process
from observability import token_files
from observability.automatic import AutomaticStart
from observability.client import Asker
from observability.server import job_page, running
from observability.token_files import ControlPlaneFile

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})

TRAINING = """
import os, signal, sys, time
import torch, dist2

pg = dist2.new_group("socket", 30, name="training")
pg.all_reduce(torch.ones(4))
if pg.rank() == 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
pg.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", None),
        ("0", None),
        ("no", None),
        ("1", "127.0.0.1"),
        ("True", "127.0.0.1"),
        ("/run/x", "/run/x"),
        ("unix:///run/x", "/run/x"),
    ],
)
def test_the_variable_is_a_flag_an_address_or_a_folder(text: str, where: str | None) -> None:
    assert Config.from_environment({"DIST2_CONTROL_PLANE": text}).control_plane == where


def test_the_first_group_of_a_process_starts_one(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    starter = AutomaticStart(str(folder))
    before = set(running())

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            starter.opened(pg)
            starter.opened(pg)
            (server,) = set(running()) - before
            try:
                assert [path.name[:7] for path in folder.iterdir()] == ["rank-0-"]
                answer = json.loads(observability.fetch(f"{server.url}/job", server.token))
                assert answer["world_size"] == 2
                starter.give_way()
                assert server.closed
            finally:
                server.close()

    run_ranks(2, body, INPROC)
    assert set(running()) == before
    assert not list(folder.iterdir())


def test_an_address_that_cannot_be_used_is_a_warning_of_one_rank() -> None:
    def body(pg: ProcessGroup) -> None:
        AutomaticStart("0.0.0.0").opened(pg)
        pg.all_reduce(torch.ones(1))

    with logged() as records:
        run_ranks(3, body, INPROC)
    (warning,) = [each["event"] for each in records if each["levelname"] == "WARNING"]
    assert warning.startswith("DIST2_CONTROL_PLANE=0.0.0.0: no control plane is started: ")
    assert "DIST2_TLS_CERT" in warning


def answer(url: str, path: str) -> Any:
    """Return the answer of the page of a launcher."""
    base, _, token = url.partition("/#token=")
    return json.loads(observability.fetch(base + path, token))


def until(url: str, text: str) -> dict[str, Any]:
    """Return the state of the job as soon as it has a text."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        job: dict[str, Any] = answer(url, "/job")
        if text in json.dumps(job):
            return job
        time.sleep(0.1)
    raise AssertionError(f"{text!r} did not appear: {job}")


def test_the_page_of_a_launcher_outlives_the_ranks(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    warm_executable()
    options: list[str | Path] = ["-n", "2", "--page", "--linger", "60", program, tmp_path / "seen"]
    process = start([*warm_python(), CHILDREN, "-m", "dist2.run", *options])
    assert process.stderr is not None
    try:
        link = re.search(r"http://\S+#token=\S+", process.stderr.readline())
        assert link
        url = link[0]
        until(url, "training")  # the page has seen the ranks
        (tmp_path / "seen").touch()
        ended = until(url, "was killed by SIGKILL")
        assert ended["headline"].startswith("The job has ended: rank 1 was killed by SIGKILL")
        assert [rank["groups"][0]["name"] for rank in ended["ranks"] if rank["state"] != "silent"]
        assert answer(url, "/summary")["identity"]["world_size"] == 2
        listed = CliRunner().invoke(cli, ["ps", "--json"])
        (job,) = [each for each in json.loads(listed.output) if each["url"] == url.partition("/#")[0]]
        assert (job["name"], job["ranks"], job["program"]) == ("training", 2, "train.py")
        assert url.partition("=")[2] not in listed.output, "a token"
        with pytest.raises(HTTPError) as refused:
            observability.fetch(url.partition("/#")[0] + "/job", "wrong")
        refused.value.close()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL, errors
    assert "the ranks have ended; their last state stays at " in errors
    with pytest.raises(URLError):
        answer(url, "/job")


def test_the_page_of_a_launcher_does_not_wait_for_a_rank_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks the next rank, and if there is none it says how old the state is that it shows."""
    monkeypatch.setattr(job_page, "ANSWER_S", 0.2)
    asked: list[int] = []
    answers: dict[int, bytes] = {
        1: json.dumps({"ranks": [{"rank": 1, "url": "unix://x"}], "verdict": []}).encode()
    }

    def ask(url: str, *_: object, **__: object) -> bytes:
        asked.append(int(url[7]))
        if asked[-1] not in answers:
            raise TimeoutError("stopped")
        return answers[asked[-1]]

    jobs = [token_files.Job("uid", "job", rank, 2, meeting="here") for rank in range(2)]
    planes = [ControlPlaneFile(f"http://{job.rank}", "t", Process.here(), job) for job in jobs]
    monkeypatch.setattr(token_files, "control_planes", lambda: planes)
    monkeypatch.setattr(job_page, "EVERY_S", 1000.0)
    page = job_page.JobPage("train.py", 2)
    page.starts("here")
    try:
        monkeypatch.setattr(page._asker, "ask", ask)
        page._look()
        assert page._job["ranks"] == [{"rank": 1, "url": ""}], "a browser would send the token there"
        assert asked[:2] == [0, 1]
        assert set(asked[2:]) == {1}, "rank 0 is stopped"
        answers.clear()
        page._look()
        assert re.fullmatch(r"No rank answers: this is their state of \d+ s ago", page._job["headline"])
        answers[0] = b'{"ranks": [], "verdict": []}'
        monkeypatch.setattr(job_page, "SILENT_S", 0.0)
        page._look()
        assert "headline" not in page._job
    finally:
        page.close()


class Ranks:
    """Ranks of a launcher's job that answer as a test says; their page looks only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.asked: list[tuple[int, str]] = []
        self.answers: dict[Any, Any] = {"/job": {"ranks": [], "verdict": []}}
        jobs = [token_files.Job("uid", "job", rank, count, meeting="here") for rank in range(count)]
        planes = [ControlPlaneFile(f"http://{job.rank}", "t", Process.here(), job) for job in jobs]
        monkeypatch.setattr(token_files, "control_planes", lambda: planes)
        monkeypatch.setattr(job_page, "EVERY_S", 1000.0)
        self.page = job_page.JobPage("train.py", count)
        self.page.starts("here")
        monkeypatch.setattr(self.page._asker, "ask", self._ask)

    def _ask(self, url: str, *_: object, **__: object) -> bytes:
        rank, path = int(url[7]), url[8:]
        self.asked.append((rank, path))
        answer = self.answers.get((rank, path), self.answers.get(path, {}))
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()

    def request(self, path: str, body: object = None) -> bytes:
        """Ask the page, as a client does."""
        base, _, token = self.page.url.partition("/#token=")
        return Asker().ask(base + path, token, body=body)

    def refusal(self, path: str, body: object = None) -> tuple[int, str]:
        """Return the status and the reason with which the page refuses a request."""
        with pytest.raises(HTTPError) as refused:
            self.request(path, body)
        refused.value.close()
        return refused.value.code, json.loads(str(refused.value.reason))["reason"]


def refuse(code: int, reason: str) -> HTTPError:
    """Return the refusal of a rank."""
    text = json.dumps({"error": "x", "reason": reason})
    return HTTPError("http://0", code, text, Message(), BytesIO(text.encode()))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two ranks and the page of their launcher."""
    made = Ranks(monkeypatch)
    yield made
    made.page.close()


def test_the_page_of_a_launcher_asks_for_evidence_once_in_a_hang(ranks: Ranks) -> None:
    wait = {"uid": "u", "seq": 7, "p2p": False, "caller": -1}

    def evidence(age_s: float, seq: int) -> int:
        waiting, sentence = [{**wait, "seq": seq, "age_s": age_s}], f"rank 1 sleeps for {age_s} s"
        ranks.answers["/job"] = {"ranks": [], "verdict": [sentence], "culprits": [1], "waiting": waiting}
        ranks.page._look()
        return [path for _, path in ranks.asked].count("/desync")

    assert [evidence(6.0, 7), evidence(7.0, 7), evidence(8.0, 7)] == [1, 1, 1]
    assert evidence(1.0, 9) == 2, "another operation"


def test_a_rank_whose_answer_takes_long_because_of_others_is_not_silent(ranks: Ranks) -> None:
    ranks.answers[0, "/trace?seconds=60"] = URLError(TimeoutError("rank 3 is stopped"))
    ranks.request("/trace?seconds=60")
    ranks.asked.clear()
    ranks.page._look()
    assert ranks.asked[0] == (0, "/job")
    assert "headline" not in ranks.page._job


def test_the_page_of_a_launcher_sends_an_act_once(ranks: Ranks) -> None:
    ranks.answers["/acts/dump"] = URLError(TimeoutError("its disk is slow"))
    told = "no rank answers: it is not known whether one has carried it out"
    assert ranks.refusal("/acts/dump", {}) == (502, told)
    assert ranks.asked == [(0, "/acts/dump")]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [("/acts/abort", {"group": "x"}, 404), ("/acts/dump", {}, 500), ("/desync?after_ms=x", None, 400)],
)
def test_the_page_of_a_launcher_passes_a_refusal_on(path: str, body: object, code: int, ranks: Ranks) -> None:
    ranks.answers[path] = refuse(code, "so it is")
    assert ranks.refusal(path, body) == (code, "so it is")


def test_a_kept_answer_comes_before_a_rank_that_cannot_give_it(ranks: Ranks) -> None:
    """The rank that is asked for the details of another one says that this does not answer."""
    ranks.answers["/summary?rank=1"] = {"identity": 1}
    ranks.request("/summary?rank=1")
    ranks.answers["/summary?rank=1"] = refuse(502, "rank 1 does not answer")
    assert json.loads(ranks.request("/summary?rank=1")) == {"identity": 1}


def test_the_page_of_a_launcher_keeps_its_evidence_whatever_clients_ask_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_page, "KEPT_BYTES", 4000)
    for number in range(300):
        ranks.answers[f"/history?rank={number}"] = "x" * 998
        ranks.request(f"/history?rank={number}")
    ranks.answers["/stacks"] = {"ranks": []}
    ranks.request("/stacks")
    ranks.page._look()
    kept = [path for path in ranks.page._kept if path.startswith("/history?")]
    assert kept == [f"/history?rank={number}" for number in range(296, 300)]
    assert {"/stacks", "/job", "/summary"} <= ranks.page._kept.keys()


LAUNCHED = """
import sys, torch, dist2
from click.testing import CliRunner
from observability.commands.ps import ps

with dist2.new_group("socket", 30, name="launched") as pg:
    pg.all_reduce(torch.ones(4))
    if pg.rank() == 0:
        sys.stdout.write(CliRunner().invoke(ps, ["--json"]).output)
    pg.barrier()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec.hydra"])
def test_the_variable_is_enough_under_other_launchers(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "launched.py"
    program.write_text(LAUNCHED)
    variables = {"DIST2_CONTROL_PLANE": "1", "TMPDIR": str(tmp_path)}  # where the files of the planes are
    if launcher == "torchrun":
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ended = torchrun(program, 2, folder=tmp_path)
    else:
        command = shutil.which(launcher, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if command is None:
            pytest.skip(f"{launcher} is not installed: pip install 'dist2[bench-mpi]'")
        ended = run([command, "-n", "2", warm_executable(), program], variables=variables)
    assert ended.code == 0, ended
    (job,) = json.loads(ended.output)
    assert (job["name"], job["ranks"], job["program"], job["state"]) == ("launched", 2, "launched.py", "ok")


def test_a_launcher_says_how_to_install_the_page(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("dist2.run.entry_points", lambda group: ())
    with pytest.raises(SystemExit):
        run_main(["--page", "train.py"])
    assert "--page needs the package observability" in capsys.readouterr().err
