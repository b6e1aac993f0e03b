"""``dist2 ps``: the state of a job in a few words, from what its control planes answer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dist2.cli.app import cli
from dist2.runtime.other_process import Process
from observability.commands.control_plane import ControlPlane
from observability.commands.ps import STATE, jobs
from observability.server import job_page
from observability.token_files import ControlPlaneFile, Job, control_planes

URL = "http://127.0.0.1:9"
PLANE = ControlPlaneFile(URL, "token", Process.here(), Job("uid", "training", 0, 3, "train.py"))
OK = {"state": "ok"}
QUIET: dict[str, Any] = {"culprits": [], "waiting": [], "ranks": [OK, OK]}


@pytest.mark.parametrize(
    ("job", "state"),
    [
        (QUIET, "ok"),
        ({**QUIET, "culprits": [2], "waiting": [{"age_s": 1.2}, {"age_s": 3.4}]}, "waits for rank 2 for 3 s"),
        ({**QUIET, "culprits": [1, 2], "waiting": [{"age_s": 61.0}]}, "waits for rank 1, 2 for 61 s"),
        ({**QUIET, "culprits": [1]}, "in trouble: rank 1"),
        ({**QUIET, "ranks": [OK, {"state": "silent"}, {"state": "broken"}]}, "broken"),
        ({**QUIET, "headline": "The job has ended: all is well"}, "The job has ended: all is well"),
    ],
)
def test_the_state_of_a_job_in_a_few_words(
    job: dict[str, Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"/job": job}
    monkeypatch.setattr(ControlPlane, "get_json", lambda self, path, timeout_s: answers[path])
    (listed,) = jobs([PLANE])
    assert listed.state == state


def test_a_long_state_leaves_the_page_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    headline = f"The job has ended: {'x' * 300}"
    monkeypatch.setattr(ControlPlane, "get_json", lambda *_: {"headline": headline})
    monkeypatch.setattr(sys.modules["observability.commands.ps"], "control_planes", lambda: [PLANE])
    monkeypatch.setenv("DIST2_INCIDENTS", "0")
    (line,) = [each for each in CliRunner().invoke(cli, ["ps"]).output.splitlines() if URL in each]
    assert line.index(URL) < STATE + 40
    (listed,) = json.loads(CliRunner().invoke(cli, ["ps", "--json"]).output)
    assert listed["state"] == headline


def test_the_page_of_a_launcher_is_of_the_job_of_its_ranks_before_it_has_found_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(job_page, "EVERY_S", 1000.0)  # it does not look by itself
    monkeypatch.setattr(ControlPlane, "get_json", lambda *_: QUIET)
    page = job_page.JobPage("train.py", 2)
    try:
        for uid in ("first", "restarted"):
            page.starts(uid)
            (listed,) = jobs(control_planes())
            assert (listed.ranks, listed.program) == (2, "train.py"), "while the ranks start"
            ranks = [Job(uid, "training", rank, 2, "train.py", meeting=uid) for rank in range(2)]
            planes = [ControlPlaneFile(f"{URL}{job.rank}", "t", Process.here(), job) for job in ranks]
            (listed,) = jobs([*control_planes(), *planes])
            assert (listed.name, listed.ranks) == ("training", 2)
            assert page.url.startswith(f"{listed.url}/")
    finally:
        page.close()
