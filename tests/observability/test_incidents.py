"""Incidents: the evidence of failures and hangs, read after all processes have ended."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner, Result
from support.captured_logs import logged
from support.processes import ENDS_ARE_TOLD
from support.programs import environment, run
from support.ranks import Tenant, run_ranks
from support.torch_analyser import analyse, complaints
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

import observability
from dist2 import GroupAbortedError, ProcessGroup
from dist2.cli.app import cli
from dist2.errors import Dist2Error, InvalidUsageError, OperationTimeoutError
from dist2.operation.signature import GroupInfo
from dist2.runtime import control_groups
from dist2.runtime.config import Config, shown_environment
from dist2.runtime.other_process import Process
from observability.flight_recorder import instrument
from observability.incidents import evidence, folders, reading
from observability.incidents import hang as hang_policy
from observability.incidents.hang import EXIT_CODE, HangRecorder
from observability.incidents.reading import Incident
from observability.incidents.recording import Recording
from observability.job.answer import Answer
from observability.job.directory import Entry
from observability.job.verdict import Diagnosis, Missing, Waiting

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


def why(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["why", str(folder), *options])


# Folders


def test_the_commands_find_what_ended_jobs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / ("long-" * 20) / "incidents"
    monkeypatch.setenv("DIST2_INCIDENTS", str(root))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert "No running job" in CliRunner().invoke(cli, ["ps"]).output
    for job, age_s, culprits in [("old", 7200.0, []), ("new", 90.0, [2])]:
        path = folders.joined(root, job, job).path
        head = json.loads((path / folders.HEAD).read_text())
        (path / folders.HEAD).write_text(json.dumps(head | {"at_s": time.time() - age_s}))
        found = {"verdict": ["it waits"], "culprits": culprits, "cycles": []}
        (path / "desync.json").write_text(json.dumps(found))
    (root / "20200101-000000-other-0").mkdir()
    (root / "20200101-000000-other-0" / folders.HEAD).write_text("{}")
    first, new, old, other = CliRunner().invoke(cli, ["ps"]).output.splitlines()[1:]
    assert first.split() == ["incident", "of", "age", "culprits", "dist2", "why"]
    assert new.split()[:-1] == ["new", "1", "min", "rank", "2"]
    assert old.split()[:-1] == ["old", "2", "h"]
    assert other.split()[0] == "?"
    assert why(Path(new.split()[-1])).exit_code == 1
    folders.add_urls(Path(old.split()[-1]), ["http://127.0.0.1:1"])
    ended = CliRunner().invoke(cli, ["why", "http://127.0.0.1:1"])
    assert (ended.exit_code, ended.stderr.split()[-1]) == (2, old.split()[-1])


@pytest.mark.parametrize(
    ("text", "on_hang", "expected"),
    [("", "", (None, "observe")), ("0", "Abort", ("0", "abort")), ("1", "exit", (None, "exit"))],
)
def test_the_variables(text: str, on_hang: str, expected: tuple[str | None, str]) -> None:
    config = Config.from_environment({"DIST2_INCIDENTS": text, "DIST2_ON_HANG": on_hang})
    assert (config.incidents, config.on_hang) == expected


def test_the_folder_of_all_incidents(tmp_path: Path) -> None:
    assert folders.root_of(Config(incidents="0")) is None
    assert folders.root_of(Config(incidents=str(tmp_path))) == tmp_path
    private = folders.root_of(Config())
    assert private is not None
    assert private.name == "incidents"
    assert private.parent.name == f"dist2-{os.getuid()}"
    with pytest.raises(InvalidUsageError, match="DIST2_ON_HANG"):
        Config.from_environment({"DIST2_ON_HANG": "kill"})


def test_parts_of_one_trouble_meet_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folders.joined(tmp_path, "a1b2", "my job/x")
    assert first.is_new
    assert re.fullmatch(r"\d{8}-\d{6}-my-job-x-a1b2", first.path.name)
    assert folders.joined(tmp_path, "a1b2", "my job/x") == folders.Folder(first.path, is_new=False)
    assert folders.joined(tmp_path, "other", "job").is_new
    monkeypatch.setattr(folders, "JOIN_S", 0.0)
    monkeypatch.setattr(time, "strftime", lambda form: "20990101-000000")
    later = folders.joined(tmp_path, "a1b2", "my job/x")
    assert later.is_new
    assert folders.named(tmp_path, later.path.name, "a1b2", "my job/x") == later.path
    for name in ("../x", "x", "20990101-000000-a/b"):
        with pytest.raises(ValueError, match="not a name of an incident"):
            folders.named(tmp_path, name, "a1b2", "my job/x")


def test_an_incident_that_another_host_began_has_the_name_of_the_job(tmp_path: Path) -> None:
    path = folders.named(tmp_path, "20990101-000000-my-job-x-a1b2", "a1b2", "my job/x")
    (path / "hang-0.json").write_text("{}")
    assert Incident.read(path).head["name"] == "my job/x"


def test_a_part_tells_the_urls_of_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, url = Recording(tmp_path), "https://10.0.0.1:9400"
    recording.known = {0: Entry(0, url, attrs.evolve(Process.here(), host="node-a"))}
    hang: Any = HangRecorder(Asked(), recording, "observe", 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(
        Asked, "info", lambda self: GroupInfo("a1b2", "job", "", "", 1, (0, 1)), raising=False
    )
    asked = {"folder": "20990101-000000-x-a1b2", "why": "it waits", "then": "observe", "acts": False}
    hang.take_part(asked)
    assert recording.latest is not None
    assert f"node-a {url}\n" in (recording.latest / folders.URLS).read_text()


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory": ("max", "current", 4096), "memory": ("max", "current", 8192)}, "4 kB"),
        ("4:memory:/x/y\n0::/\n", {"memory/memory": ("limit_in_bytes", "usage_in_bytes", 8192)}, "8 kB"),
        ("4:cpu,memory:/x\n", {"memory/x/memory": ("limit_in_bytes", "usage_in_bytes", 2**63 - 4096)}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_memory_limit_of_a_control_group_is_evidence(
    groups: str,
    files: dict[str, tuple[str, str, int]],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, (limit, used, value) in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.{limit}").write_text(f"{value}\n")
        (tmp_path / f"{name}.{used}").write_text("2048\n")
    (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(control_groups, "MEMBERSHIP", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    found = evidence._memory()
    assert "VmRSS" in found
    assert (found.get("GroupLimit"), found.get("GroupUsed")) == (expected, expected and "2 kB")


def test_parts_meet_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(time, "strftime", lambda form: "20990101-010000")
    before = folders.joined(tmp_path, "a1b2", "job").path
    clock -= 3600
    monkeypatch.setattr(time, "strftime", lambda form: "20990101-000000")
    after = folders.joined(tmp_path, "a1b2", "job")
    assert after.is_new
    assert after.path != before
    assert folders.joined(tmp_path, "a1b2", "job") == folders.Folder(after.path, is_new=False)


def test_incidents_take_a_part_of_a_small_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(total=80_000))
    first, second = (folders.joined(tmp_path, job, "x").path for job in ("job0", "job1"))
    folders.write(first / "part.json", "x" * 10_000)
    third = folders.joined(tmp_path, "job2", "x").path
    assert [first.exists(), second.exists(), third.exists()] == [False, True, True]


def test_old_incidents_are_removed_and_other_folders_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST", 2)
    monkeypatch.setattr(folders, "MOST_BYTES", 10_000)
    (tmp_path / "mine").mkdir()
    made = []
    for number in range(4):
        monkeypatch.setattr(time, "strftime", lambda form, number=number: f"20260101-00000{number}")
        made.append(folders.joined(tmp_path, f"job{number}", "x").path)
    assert [path.exists() for path in made] == [False, False, True, True]
    folders.write(made[3] / "part.json", "x" * 20_000)
    newest = folders.joined(tmp_path, "job", "x").path
    assert not made[3].exists(), "it is too large"
    assert newest.exists()
    assert (tmp_path / "mine").exists()
    folders.write(newest / "part.json", "a")
    folders.write(newest / "part.json", "b")
    folders.write(newest / "huge", b"x" * (folders.PART_BYTES + 1))
    assert (newest / "part.json").read_text() == "a"
    assert not (newest / "huge").exists()


def test_a_file_that_another_job_renames_does_not_keep_an_incident_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folders.joined(tmp_path, "other", "x").path
    (other / ".hang-0.json-7-7.part").touch()
    lstat = Path.lstat

    def renamed_meanwhile(path: Path) -> os.stat_result:
        if path.suffix == ".part":
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", renamed_meanwhile)
    assert folders.joined(tmp_path, "mine", "x").is_new


def test_an_incident_stays_that_is_made_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST", 2)
    made = [folders.joined(tmp_path, f"job{number}", "x").path for number in range(2)]
    past = time.time() - 10 * folders.MOST_AGE_S
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: past)
        latest = folders.joined(tmp_path, "job", "x").path
    assert latest.exists()
    assert [path.exists() for path in made].count(True) == 1


def test_ranks_that_are_threads_write_their_parts_at_once(tmp_path: Path) -> None:
    size, rounds = 4, 100
    with ThreadPoolExecutor(size) as pool:
        for number in range(rounds):
            parts = [tmp_path / f"failure-{rank}-{number}.json" for rank in range(size)]
            list(pool.map(lambda path: folders.write(path, path.name * 100), parts))
            assert all(path.read_text() == path.name * 100 for path in parts)
    assert len(list(tmp_path.iterdir())) == size * rounds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DIST2_CONTROL_TOKEN", "tell nobody"),
        ("MY_DATABASE", "tell nobody"),
        ("SLURM_JWT", "tell nobody"),
        ("TORCH_PW", "tell nobody"),
        ("NCCL_PROXY", "http://me:tell-nobody@host"),
        ("NCCL_STORE", "redis://:tell-nobody@host"),
        ("SLURM_JOB_COMMENT", "user=me password=tell-nobody"),
        ("RAY_JOB", '{"api_key": "tell nobody"}'),
        ("TORCH_HEADERS", "Authorization: Bearer tell-nobody"),
        ("RAY_OPTIONS", "--api-key tell-nobody"),
        ("UCX_URL", "https://bucket/x?X-Amz-Signature=tell-nobody"),
    ],
)
def test_the_environment_is_shown_without_secrets(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert "nobody" not in str(shown_environment())


def test_the_environment_is_shown_where_it_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"NCCL_DEBUG": "INFO", "RAY_ADDRESS": "http://host:80/a@b", "TORCH_LOGS": "+dynamo,tokens"}
    for name, value in plain.items():
        monkeypatch.setenv(name, value)
    assert plain.items() <= shown_environment().items()


def test_an_incident_has_no_password_of_a_url(tmp_path: Path) -> None:
    folders.write(tmp_path / "failure-0.json", json.dumps({"error": 'no route to "sql://me:pass@host/x"'}))
    assert json.loads((tmp_path / "failure-0.json").read_text())["error"] == (
        'no route to "sql://(hidden)@host/x"'
    )


# Failures


def test_a_failure_is_explained_after_the_end(tmp_path: Path) -> None:
    recording, failed = Recording(tmp_path), threading.Event()

    def body(pg: ProcessGroup) -> None:
        recording.opened(pg.info)
        pg.barrier()
        if pg.rank() == 1:
            assert failed.wait(20)
            return
        with pytest.raises(OperationTimeoutError):
            pg.all_reduce(torch.ones(2), timeout=0.3)
        failed.set()

    instrument.on_broken.append(recording.broken)
    try:
        with logged() as records:
            run_ranks(2, body, INPROC)
    finally:
        instrument.on_broken.remove(recording.broken)
    (folder,) = tmp_path.glob("2*")
    assert recording.latest == folder
    assert f"incident: {folder}" in [each["event"] for each in records]
    told = why(folder)
    assert told.exit_code == 1, told
    assert "rank 0 failed: OperationTimeoutError: all_reduce" in told.output
    assert "rank 1 is waited for by rank 0 in all_reduce" in told.output
    assert json.loads(why(folder, "--json").output)["culprits"] == [1]
    part = json.loads((folder / "failure-0.json").read_text())
    assert {"versions", "kernel", "environment", "timeline", "state"} <= set(part)
    assert part["versions"]["torch"] == torch.__version__
    for path in (folder, *folder.iterdir()):
        assert not path.stat().st_mode & 0o077 or path.parent == folder, path
    trace = tmp_path / "trace.json"
    for name, root, base in (("whole", tmp_path, folder.name), ("files", folder, ".")):
        archive = Path(shutil.make_archive(str(tmp_path / name), "zip", root, base))
        assert why(archive).output == told.output
        for command in (
            ["query", "select count(*) from waits"],
            ["report", "-o", str(tmp_path / "a.html")],
            ["trace", "-o", str(trace)],
        ):
            of_folder, of_archive = (
                CliRunner().invoke(cli, [command[0], str(place), *command[1:]]) for place in (folder, archive)
            )
            assert (of_archive.exit_code, of_archive.output) == (0, of_folder.output)
        traced = json.loads(trace.read_text())
        assert [each["rank"] for each in traced["otherData"]["ranks"]] == [0]
        assert list(traced["otherData"]["missing"]) == ["1"]
        assert {"barrier", "all_reduce"} <= {each["name"].split()[0] for each in traced["traceEvents"]}
        assert f"dist2 why {archive}" in CliRunner().invoke(cli, ["top", str(archive)]).output


@pytest.mark.parametrize("name", ["rank 2", "rank 2 (rank 1 of tp/split(1,2)#0, host a, pid 7)"])
def test_a_rank_that_aborted_its_group_without_a_part_is_told_with_its_reason(name: str) -> None:
    """It ended by `sys.exit`, or had no memory for a part; its process may have run on for a moment."""
    message = f"all_reduce #3 in group 'tp': {name} aborted the group (SystemExit: no (more) shards: left)"
    error = {"message": message, "blames": [2], "shared": True}
    part = {"error": error, "state": {}, "world_size": 3}
    running = {"state": "R", "words": "process 7 is running (state R)", "cause": "", "stands": ""}
    for seen in ({}, {"outside": {"2": running}}):
        incident = Incident(Path("no folder"), {}, {1: {**part, **seen}}, {})
        answers = incident.answers()
        assert answers[2].why_silent.endswith("; it aborted the group (SystemExit: no (more) shards: left)")
        assert answers[2].is_gone
        assert answers[0].outside is None


def test_only_the_first_failure_of_a_group_is_written(tmp_path: Path) -> None:
    """Others are consequences: they would displace it once there are too many."""
    recording = Recording(tmp_path)

    def body(pg: ProcessGroup) -> None:
        recording.opened(pg.info)
        for _ in range(2):
            with pytest.raises(OperationTimeoutError) as raised:
                pg.recv(torch.ones(1), 0, timeout=0.01)
        operation = instrument.recording(pg.rank()).operations[-1]
        operation.error = raised.value
        recording.broken(operation)
        (folder,) = tmp_path.glob("2*")
        (folder / "failure-0.json").unlink()
        recording.broken(operation)
        recording.raised(raised.value)
        assert not (folder / "failure-0.json").exists()
        recording.raised(ValueError("of the program"))
        assert json.loads((folder / "failure-0.json").read_text())["error"]["message"] == "of the program"

    run_ranks(1, body, INPROC)


def test_a_lock_that_is_not_given_back_does_not_hold_up_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "LOCK_S", 0.05)
    with folders._locked(tmp_path):  # of a process that was stopped
        assert folders.joined(tmp_path, "a1b2", "job").is_new


@pytest.mark.parametrize("command", ["why", "report", "trace", "query"])
@pytest.mark.parametrize("refuses", ["is_dir", "iterdir"])
def test_a_folder_of_another_user_is_refused_in_a_line(
    command: str, refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("duckdb")
    folder = folders.joined(tmp_path, "job", "x").path
    asked = getattr(Path, refuses)

    def refuse(path: Path, **options: Any) -> Any:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return asked(path, **options)

    monkeypatch.setattr(Path, refuses, refuse)
    sql = ["select 1"] if command == "query" else []
    told = CliRunner().invoke(cli, [command, str(folder), *sql])
    assert (told.exit_code, len(told.output.splitlines())) == (2, 1), told.output
    assert "Permission denied" in told.output


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_place_that_cannot_be_written_is_told_in_a_line(command: str, tmp_path: Path) -> None:
    folder = folders.joined(tmp_path, "job", "x").path
    told = CliRunner().invoke(cli, [command, str(folder), "-o", str(tmp_path / "none" / "x")])
    assert (told.exit_code, len(told.output.splitlines())) == (2, 1), told.output
    assert "none/x: No such file or directory" in told.output


@pytest.mark.parametrize(
    "command",
    [
        *(["why", option, text] for option in ("--after", "--limit") for text in ("nan", "inf", "-1")),
        ["top", "--interval", "nan"],
        ["trace", "--seconds", "4000"],
        ["query", "--seconds", "4000"],
    ],
    ids=" ".join,
)
def test_a_time_that_no_control_plane_takes_is_refused_at_once(command: list[str]) -> None:
    pytest.importorskip("duckdb")
    sql = ["select 1"] if command[0] == "query" else []
    told = CliRunner().invoke(cli, [command[0], "http://127.0.0.1:1", *sql, *command[1:]])
    assert told.exit_code == 2
    assert f"Invalid value for '{command[1]}'" in told.output


def test_a_folder_that_is_no_incident_is_refused(tmp_path: Path) -> None:
    for command in (["why", str(tmp_path)], ["report", str(tmp_path), "-o", str(tmp_path / "x.html")]):
        told = CliRunner().invoke(cli, command)
        assert told.exit_code == 2
        assert "is not an incident" in told.output
    (tmp_path / "incident.tgz").write_bytes(b"PK")
    shutil.make_archive(str(tmp_path / "other"), "zip", Path(__file__).parent, "monitoring")
    reasons = {"incident.tgz": "unpack", "other.zip": "is not an incident", "none": "no such folder"}
    for command in (["why"], ["query", "select 1"], ["report"], ["trace"]):
        for name, reason in reasons.items():
            told = CliRunner().invoke(cli, [command[0], str(tmp_path / name), *command[1:]])
            assert (told.exit_code, reason in told.output) == (2, True), told.output


def test_an_incident_without_a_part_is_trouble(tmp_path: Path) -> None:
    made = folders.joined(tmp_path, "a1b2", "job").path  # the disk was full from then on
    told = CliRunner().invoke(cli, ["why", str(made)])
    assert (told.exit_code, "no rank has left a part" in told.output) == (1, True), told.output
    page = tmp_path / "report.html"
    assert CliRunner().invoke(cli, ["report", str(made), "-o", str(page)]).exit_code == 0
    assert "no rank has left a part" in page.read_text()


def test_the_stacks_of_the_culprits_come_first_where_there_is_no_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "ANSWERS_BYTES", 10_000)
    thread = {"name": "MainThread", "main": True, "frames": [{"name": "f", "file": "x" * 400, "line": 1}]}
    seen = {
        "threads": [],
        "python": [thread],
        "words": "",
        "state": "S",
        "cause": "",
        "stands": "",
        "unseen": "",
    }
    answers = {rank: Answer(silence="it sleeps", outside=seen) for rank in range(9)}
    made = folders.joined(tmp_path, "a1b2", "job").path
    evidence.write_answers(made, answers, Diagnosis(culprits=(7,)), 0, 0.0)
    ranks = [row["rank"] for row in json.loads((made / "stacks.json").read_text())]
    assert ranks[:3] == [7, 0, 1]
    assert len(ranks) < 9


def test_a_zip_of_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.joined(tmp_path / "incidents", "a1b2", "job").path
    (folder / "job.json").write_bytes(bytes(1 << 20))
    archive = Path(shutil.make_archive(str(tmp_path / "incident"), "zip", folder))
    assert archive.stat().st_size < 1 << 16
    assert why(archive).exit_code == 1
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 20)
    told = why(archive)
    assert (told.exit_code, "more than 1048576 bytes" in told.output) == (2, True)


@pytest.mark.parametrize("name", ["tr\u00e4ning \u2713", "\ud800"])
def test_any_name_can_be_printed_in_any_locale(name: str, tmp_path: Path) -> None:
    path = folders.joined(tmp_path / "incidents", "a1b2", "job").path
    head = json.loads((path / folders.HEAD).read_text())
    (path / folders.HEAD).write_text(json.dumps(head | {"name": name}))
    found = {"verdict": [f"group {name} waits"], "waiting": [], "culprits": [], "chains": [], "cycles": []}
    (path / "desync.json").write_text(json.dumps(found))
    variables = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "DIST2_INCIDENTS": str(path.parent),
    }
    page = tmp_path / "report.html"
    for command, code in ((["ps"], 0), (["why", path], 1), (["report", path, "-o", page], 0)):
        arguments = [sys.executable, "-m", "dist2", *map(str, command)]
        ended = subprocess.run(
            arguments, env=environment(**variables), capture_output=True, text=True, timeout=60, check=False
        )
        assert (ended.returncode, ended.stderr) == (code, ""), ended
    assert f"Incident of {name}," in page.read_text("utf-8") or name == "\ud800"


# Hangs


def diagnosis(culprit: int, seq: int) -> Diagnosis:
    missing = Missing(culprit, "", "it sleeps", answers=True)
    waiting = Waiting(("uid", seq, False, -1), "g", "barrier", "barrier()", "", (0,), 2.0, (missing,))
    return Diagnosis(verdict=("it sleeps",), culprits=(culprit,), waiting=(waiting,))


class Asked:
    """A member of a job that waits, or no longer does, when it is asked once more."""

    rank = 0

    def __init__(self, answers: dict[int, Answer] | None = None) -> None:
        self.asked = threading.Semaphore(0)
        self.requests: list[dict[str, Any]] = []
        self.silent: list[Container[int]] = []
        self._answers = answers or {}

    def everyone(self, limit_s: float, **wanted: object) -> dict[int, Answer]:
        self.asked.release()
        return self._answers

    def ask_others(
        self, path: str, body: dict[str, Any], limit_s: float, silent: Container[int]
    ) -> dict[int, Any]:
        self.requests.append(body)
        self.silent.append(silent)
        return {}


def test_a_wait_is_confirmed_by_a_second_look() -> None:
    member = Asked()
    hang: Any = HangRecorder(member, None, "abort", 1.0)  # type: ignore[arg-type]
    for found in (diagnosis(1, 7), diagnosis(2, 7), diagnosis(2, 8), Diagnosis(), diagnosis(2, 8)):
        hang.look(found)
    assert not member.asked.acquire(blocking=False), "no two looks in a row have one wait and one culprit"
    hang.look(diagnosis(2, 8))
    assert member.asked.acquire(timeout=20)
    hang.look(diagnosis(2, 8))
    wait_for(lambda: "dist2-incident" not in {thread.name for thread in threading.enumerate()})
    assert not member.asked.acquire(blocking=False), "once for each wait"
    assert not member.requests, "the job goes on"
    with pytest.raises(ValueError, match="then must be observe, abort or exit"):
        hang.take_part({"folder": "", "why": "", "then": "reboot"})


def test_a_wait_that_has_lost_its_reason_or_given_way_to_another_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = Asked()
    hang: Any = HangRecorder(member, None, "abort", 1.0)  # type: ignore[arg-type]
    entered = attrs.evolve(diagnosis(2, 8).waiting[0], missing=())
    ended_elsewhere = Diagnosis(culprits=(2,), waiting=(entered,))
    for seq, found in enumerate((ended_elsewhere, diagnosis(2, 99))):
        monkeypatch.setattr(hang_policy, "diagnose", lambda answers, after_s, found=found: found)
        hang.look(ended_elsewhere)
        hang.look(ended_elsewhere)
        assert not member.asked.acquire(blocking=False), "no rank is to blame for that wait"
        hang.look(diagnosis(2, seq))
        hang.look(diagnosis(2, seq))
        assert member.asked.acquire(timeout=20)
        wait_for(lambda: "dist2-incident" not in {thread.name for thread in threading.enumerate()})
    assert not member.requests


def test_a_wait_that_could_not_be_confirmed_is_confirmed_at_a_later_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(answers: object, after_s: float) -> Diagnosis:
        raise RuntimeError("can't start new thread")

    member = Asked()
    hang: Any = HangRecorder(member, None, "abort", 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(hang_policy, "diagnose", refuse)
    with logged() as logs:
        for _ in range(2):
            hang.look(diagnosis(2, 8))
        for _ in range(2):
            assert member.asked.acquire(timeout=20)
            wait_for(lambda: "dist2-incident" not in {thread.name for thread in threading.enumerate()})
            hang.look(diagnosis(2, 8))
        assert member.asked.acquire(timeout=20)
        wait_for(lambda: "dist2-incident" not in {thread.name for thread in threading.enumerate()})
    assert [each["event"] for each in logs] == ["a wait of the job cannot be confirmed"] * 3


def test_a_rank_that_cannot_answer_does_not_hold_up_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    acted: list[str] = []
    monkeypatch.setattr(hang_policy, "diagnose", lambda answers, after_s: diagnosis(1, 7))
    monkeypatch.setattr(hang_policy, "act", lambda then, words, rank: acted.append(then))
    monkeypatch.setattr(instrument, "on_broken", [])
    member = Asked({1: Answer(silence="no answer within 1.0 s"), 2: Answer(state={})})
    hang: Any = HangRecorder(member, None, "abort", 1.0)  # type: ignore[arg-type]
    for _ in range(2):
        hang.look(diagnosis(1, 7))
    wait_for(lambda: len(member.requests) == 2)
    assert [each["acts"] for each in member.requests] == [False, True]
    assert member.silent == [{1}, {1}]
    wait_for(lambda: acted == ["abort"])


def test_a_rank_that_another_aborts_first_knows_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "on_broken", [])
    hang: Any = HangRecorder(Asked(), None, "abort", 1.0)  # type: ignore[arg-type]

    def body(pg: ProcessGroup) -> None:
        hang.take_part({"folder": "", "why": "rank 1 sleeps", "then": "abort", "acts": False})
        assert not pg.is_closed, "first all ranks write their parts"
        if pg.rank() == 0:
            pg.abort()
            return
        with pytest.raises(Dist2Error) as raised:
            pg.all_reduce(torch.ones(2))
        assert raised.value.__notes__ == ["DIST2_ON_HANG=abort, as the job waited: rank 1 sleeps"]

    run_ranks(2, body, INPROC)


def test_a_rank_that_loses_one_which_ends_first_ends_before_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[tuple[str, str, int]] = []
    monkeypatch.setattr(instrument, "on_broken", [])
    monkeypatch.setattr(hang_policy, "act", lambda *arguments: ended.append(arguments))
    hang: Any = HangRecorder(Asked(), None, "exit", 1.0)  # type: ignore[arg-type]
    request = {"folder": "", "why": "rank 1 sleeps", "then": "exit", "acts": False}
    hang.take_part(request, is_told=False)

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            pg.abort()
            return
        with pytest.raises(Dist2Error):
            pg.all_reduce(torch.ones(2))
        assert ended == [("exit", words, Asked.rank)]

    words = "DIST2_ON_HANG=exit, as the job waited: rank 1 sleeps"
    with logged() as records:
        run_ranks(2, body, INPROC)
    assert [(each["levelname"], each["event"]) for each in records] == [("ERROR", f"rank 0: {words}")]


def test_abort_raises_on_all_ranks_with_the_verdict(tmp_path: Path) -> None:
    recording, errors = Recording(tmp_path), dict[int, BaseException]()
    over, hooks = threading.Barrier(2), list(instrument.on_broken)

    def body(pg: ProcessGroup) -> None:
        recording.opened(pg.info)
        with observability.start(pg, announce=False, waiting_after_s=0.3) as server:
            hang = server._member.hang
            assert hang is not None
            hang._recording, hang._policy = recording, "abort"
            pg.barrier()
            if pg.rank() == 1:
                wait_for(lambda: pg.is_closed)
            with pytest.raises(Dist2Error) as raised:
                pg.all_reduce(torch.ones(2))
            errors[pg.rank()] = raised.value
            over.wait(20)

    try:
        run_ranks(2, body, INPROC)
    finally:
        instrument.on_broken[:] = hooks
    (folder,) = tmp_path.glob("2*")
    for error in errors.values():  # the whole traceback, as that of rank 1 is of a call after the abort
        told = "".join(traceback.format_exception(error))
        assert "DIST2_ON_HANG=abort, as the job waited: rank 1 " in told
        assert folder.name in told
    assert len(errors) == 2
    names = {path.name for path in folder.iterdir()}
    assert {"desync.json", "job.json", "stacks.json", "hang-0.json", "hang-1.json"} <= names
    _, said = analyse(folder)
    assert complaints(said), said
    assert json.loads(why(folder, "--json").output)["culprits"] == [1]


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Whole jobs

HANGING = """
import time
import torch, dist2

pg = dist2.new_group("socket", 60, name="training")
pg.all_reduce(torch.ones(4))
if pg.rank() == 1:
    time.sleep(600)  # line 8
pg.all_reduce(torch.ones(4))
"""

IN_NEW_GROUP = """
import time
import torch, dist2

pg = dist2.new_group("socket", 60, name="training")
if pg.rank() == 1:
    while not pg.is_closed:
        time.sleep(0.01)
else:
    try:
        dist2.new_group("socket", 60, name="second")
    except dist2.GroupAbortedError as error:
        print("hung:", error)
    except dist2.PeerLostError as error:
        assert "gave up (GroupAbortedError" in str(error), error
"""

RAISING = """
import torch, dist2

pg = dist2.new_group("socket", 60, name="training")
pg.all_reduce(torch.ones(4))
if pg.rank() == 1:
    raise ValueError("a <bad> batch")  # line 7
pg.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("program", "code", "line"), [(HANGING, EXIT_CODE, 8), (RAISING, 1, 7)], ids=["hang", "exception"]
)
def test_a_job_that_ended_is_explained_by_its_incident(
    program: str, code: int, line: int, tmp_path: Path
) -> None:
    script, root = tmp_path / "train.py", tmp_path / "incidents"
    script.write_text(program)
    warm_executable()
    variables = {"DIST2_INCIDENTS": str(root), "DIST2_ON_HANG": "exit", "DIST2_WAITING": "0.5"}
    ended = run([*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "2", script], variables=variables)
    assert ended.code == code, ended
    (folder,) = root.glob("2*")
    last = ended.errors.splitlines()[-1]
    assert last == f"incident: {folder}, read it with: dist2 why {folder}"
    told = why(folder)
    assert told.exit_code == 1
    assert f"train.py:{line} in <module>" in told.output
    assert program is RAISING or " failed: " not in told.output, (
        "a rank that lost one which ends for the policy"
    )
    found = json.loads(why(folder, "--json").output)
    assert found["culprits"] == [1]
    cause = "rank 1 failed: ValueError: a <bad> batch" if program is RAISING else "rank 1 "
    assert found["verdict"][0].startswith(cause), "the cause comes before its consequences"
    page = tmp_path / "report.html"
    assert CliRunner().invoke(cli, ["report", str(folder), "-o", str(page)]).exit_code == 0
    text = page.read_text()
    assert "Culprits: <span class=bad>1</span>" in text
    assert f"train.py:{line}" in text
    assert "<bad>" not in text
    assert "src=" not in text, "it loads nothing"


KILLED = """
import os, signal
import torch, dist2

pg = dist2.new_group("socket", 60, name="training")
part = pg.split([1, 2] if pg.rank() else [0], name="tp")
part.all_reduce(torch.ones(4))
if pg.rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
(part if pg.rank() else pg).all_reduce(torch.ones(4))
"""


def test_an_incident_begins_with_the_rank_that_was_killed(tmp_path: Path) -> None:
    script, root = tmp_path / "train.py", tmp_path / "incidents"
    script.write_text(KILLED)
    warm_executable()
    variables = {"DIST2_INCIDENTS": str(root)}
    ended = run([*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "3", script], variables=variables)
    assert ended.code == 128 + signal.SIGKILL, ended
    (folder,) = root.glob("2*")
    found = json.loads(why(folder, "--json").output)
    assert found["culprits"] == [2]
    first, *others = found["verdict"]
    assert first.startswith("rank 2 is waited for by "), found["verdict"]
    assert "rank 1 in all_reduce #2 of group tp" in first, first
    assert not ENDS_ARE_TOLD or first.endswith(" was killed by SIGKILL"), first
    assert any(each.startswith("rank 1 failed: PeerLostError") for each in others), others


def test_abort_ends_the_wait_for_a_rank_that_does_not_make_a_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_NEW_GROUP)
    warm_executable()
    variables = {"DIST2_INCIDENTS": "0", "DIST2_ON_HANG": "abort", "DIST2_WAITING": "0.5"}
    ended = run([*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "3", script], variables=variables)
    assert ended.code == 0, ended
    found = (
        "group 'second' cannot be built: DIST2_ON_HANG=abort, as the job waited: ranks 0, 2 are in dist2's"
    )
    assert f"hung: {found} new_group, called at train.py:11 in <module>; rank 1: " in ended.output, ended


def test_an_abort_of_the_program_is_no_incident(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.raised(ValueError("before the first group"))

    def body(pg: ProcessGroup) -> None:
        recording.opened(pg.info)
        recording.raised(GroupAbortedError("on purpose"))
        recording.raised(SystemExit(1))

    run_ranks(1, body, INPROC)
    assert not list(tmp_path.iterdir())


def test_ranks_that_end_because_of_a_deadlock_are_no_culprits(tmp_path: Path) -> None:
    """With ``DIST2_ON_HANG=exit`` a rank may still see others end."""
    error = {"type": "PeerLostError", "message": "rank 1 exited", "blames": [1], "shared": True}
    part = {"rank": 0, "world_size": 2, "error": error, "why": "", "state": {}}
    incident = Incident(tmp_path, {}, {0: part}, {})
    told = {"verdict": ["deadlock"], "culprits": [], "cycles": ["rank 0 waits for rank 1, ..."]}
    (tmp_path / "desync.json").write_text(json.dumps(told))
    assert incident.desync()["culprits"] == []
    (tmp_path / "desync.json").write_text(json.dumps({**told, "cycles": []}))
    assert incident.desync()["culprits"] == [1]
