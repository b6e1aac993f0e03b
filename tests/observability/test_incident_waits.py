"""Incidents of waits in processes without a control plane."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.captured_logs import logged
from support.programs import Ended, run
from support.ranks import Tenant, run_ranks
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

import observability
from dist2 import ProcessGroup
from dist2.cli.app import cli
from dist2.operation.signature import GroupInfo
from dist2.rendezvous.liveness import Building
from dist2.rendezvous.requests import JoinRequest
from observability.incidents import folders
from observability.incidents import waits as waits_module
from observability.incidents.hang import EXIT_CODE
from observability.incidents.recording import Recording
from observability.incidents.waits import Waits
from observability.job.answer import NO_PART, NOT_REGISTERED, Answer
from observability.metrics import instrument as metrics

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})
AFTER_S = 0.05


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rank_1_looks(root: Path, look: Callable[[Waits], None], waits_type: type[Waits] = Waits) -> Recording:
    """Have rank 1 look while rank 0 waits for it; both then end the operation."""
    recording = Recording(root)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        recording.opened(pg.info)
        if pg.rank() == 1:
            wait_for(
                lambda: any(time.monotonic_ns() - e.created_ns > AFTER_S * 1e9 for e in metrics.in_flight())
            )
            look(waits_type(recording, AFTER_S))
        pg.all_reduce(torch.ones(2))

    run_ranks(2, body, INPROC)
    return recording


def test_a_wait_that_two_looks_find_is_written_with_its_verdict(tmp_path: Path) -> None:
    def look(waits: Waits) -> None:
        waits.look()
        assert not list(tmp_path.iterdir()), "one look is not enough"
        for _ in range(3):
            waits.look()

    with logged() as records:
        recording = rank_1_looks(tmp_path, look)
    (folder,) = tmp_path.glob("2*")
    assert recording.latest == folder
    names = {path.name for path in folder.iterdir()}
    assert {"desync.json", "job.json", "stacks.json", "hang-0.json", "hang-1.json", "flight_1"} <= names
    told = CliRunner().invoke(cli, ["why", str(folder), "--json"])
    assert json.loads(told.output)["culprits"] == [1]
    events = [each["event"] for each in records]
    assert [each.startswith("the job waits: rank 1 ") for each in events].count(True) == 1, events
    assert f"incident: {folder}" in events


def look_twice(waits: Waits) -> None:
    waits.look()
    waits.look()


class WaitEnds(Waits):
    """The wait is over once the parts are written."""

    def _add_parts(self, path: Path) -> None:
        super()._add_parts(path)
        before = self._waiting
        self._waiting = lambda: before() and {}  # type: ignore[method-assign]


def test_nothing_stays_of_a_wait_that_is_over(tmp_path: Path) -> None:
    recording = rank_1_looks(tmp_path, look_twice, WaitEnds)
    assert not list(tmp_path.glob("2*"))
    assert recording.latest is None


def test_a_failure_keeps_the_folder_of_a_wait_that_is_over(tmp_path: Path) -> None:
    class Failing(WaitEnds):
        def _add_parts(self, path: Path) -> None:
            super()._add_parts(path)
            (path / "failure-0.json").write_text("{}")

    with logged() as records:
        rank_1_looks(tmp_path, look_twice, Failing)
    (folder,) = tmp_path.glob("2*")
    assert f"incident: {folder}" in [each["event"] for each in records]
    assert not (folder / "desync.json").exists()


def test_a_rank_that_waits_for_nothing_joins(tmp_path: Path) -> None:
    recording = Recording(tmp_path)

    def body(pg: ProcessGroup) -> None:
        recording.opened(pg.info)
        waits = Waits(recording, AFTER_S)
        folder = folders.joined(tmp_path, pg.info.uid, pg.info.name).path
        waits.look()
        assert not (folder / "hang-0.json").exists(), "it is of a failure"
        (folder / "hang-1.json").write_text("{}")
        waits.look()
        assert json.loads((folder / "hang-0.json").read_text())["why"] == "the job waits"

    run_ranks(1, body, INPROC)


def test_a_failure_before_the_verdict_tells_the_path_last(tmp_path: Path, capsys: Any) -> None:
    class Told(WaitEnds):
        def _conclude(
            self, folder: folders.Folder, job: GroupInfo, confirmed: set[object], why: str = ""
        ) -> None:
            self._recording.last_words(ValueError("a bad batch"))
            super()._conclude(folder, job, confirmed, why)

    recording = rank_1_looks(tmp_path, look_twice, Told)
    assert re.search(r"dist2: incident: \S+, read it with: dist2 why \S+$", capsys.readouterr().err.strip())
    assert not recording.is_mine, "it is removed in the end"


def test_a_control_plane_sees_to_it_where_there_is_one(tmp_path: Path) -> None:
    def look(waits: Waits) -> None:
        with observability.start(announce=False):
            for _ in range(3):
                waits.look()

    rank_1_looks(tmp_path, look)
    assert not list(tmp_path.glob("2*"))


def test_a_control_plane_may_be_imported_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "observability.server", types.ModuleType("half of it"))
    Waits(Recording(tmp_path), 1.0).look()


def test_a_line_that_waits_on_purpose_is_written_only_if_it_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Waits(Recording(tmp_path), 1.0)
    written: list[object] = []
    ages: list[dict[str, tuple[str, float]]] = [
        *[{"checkpoint 1": ("train.py:9", age)} for age in (1.0, 2.0, 3.0)],
        {},
        *[{"checkpoint 2": ("train.py:9", age)} for age in (1.0, 3.0, 5.9, 6.0, 7.0)],
        {},
        *[{"another line": ("train.py:10", age)} for age in (1.0, 2.0)],
    ]
    monkeypatch.setattr(waits, "_write", lambda confirmed: written.append(*confirmed))
    looks = []
    for each in ages:
        monkeypatch.setattr(waits, "_waiting", lambda each=each: each)
        waits.look()
        looks.append(len(written))
    assert written == ["checkpoint 1", "checkpoint 2", "another line"]
    assert looks == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_a_disk_that_is_full_does_not_end_the_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, looked = Waits(Recording(tmp_path), 0.01), threading.Semaphore(0)

    def look() -> None:
        looked.release()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(waits, "look", look)
    with logged() as records:
        run_ranks(1, lambda pg: waits.begin(Building(0, 1)), INPROC)
        for _ in range(3):
            assert looked.acquire(timeout=20)
        waits.stop()
        wait_for(lambda: "dist2-waits" not in {thread.name for thread in threading.enumerate()})
    assert "No space left on device" in str(records)


def test_a_wait_is_explained_though_no_incident_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    full, passing = tmp_path / "full", tmp_path / "waits"
    monkeypatch.setattr(folders, "passing", lambda: [tmp_path / "file" / "waits", passing])
    add = Waits._add_parts

    def add_parts(waits: Waits, path: Path) -> None:
        if path.parent == full:
            raise OSError(28, "No space left on device")
        add(waits, path)

    monkeypatch.setattr(Waits, "_add_parts", add_parts)
    with logged() as records:
        recording = rank_1_looks(full, look_twice)
    told = [event for each in records if "incident" in (event := each["event"]) or "the job waits" in event]
    assert len(told) == 2, told
    assert told[0].startswith("the job waits: rank 1 ")
    assert told[1].startswith(f"no incident can be written to {full}: No space left on device; set DIST2_INC")
    assert recording.latest is None
    (left,) = passing.glob("2*")
    assert {path.name for path in left.iterdir()} == {folders.HEAD, waits_module.VERDICT}


def test_the_verdict_is_told_though_the_disk_is_full_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = folders.write

    def fails(path: Path, data: bytes | str, most: int = folders.PART_BYTES) -> None:
        if path.name == waits_module.VERDICT:
            raise OSError(28, "No space left on device")
        write(path, data, most)

    monkeypatch.setattr(folders, "write", fails)
    with logged() as records:
        rank_1_looks(tmp_path, look_twice)
    told = [event for each in records if "incident" in (event := each["event"]) or "the job waits" in event]
    assert [each.partition(":")[0] for each in told] == [
        "the job waits",
        "incident",
        f"no incident can be written to {tmp_path}",
    ], told


WAITING = """
import os, time
from pathlib import Path
import torch, dist2

pg = dist2.new_group("socket", 60, name="training")
pg.all_reduce(torch.ones(4))

def load():
    deadline = time.monotonic() + 50
    while not list(Path(os.environ["DIST2_INCIDENTS"]).glob("2*/desync.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # line 13

if pg.rank() == 1:
    load()
CALL
"""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("pg.all_reduce(torch.ones(4))", r"in all_reduce #2 of group training"),
        ("dist2.new_group('socket', 60, name='second')", r"is in dist2's new_group, called at train.py:17"),
    ],
)
def test_a_job_without_a_control_plane_leaves_an_incident(call: str, words: str, tmp_path: Path) -> None:
    script, root = tmp_path / "train.py", tmp_path / "incidents"
    script.write_text(WAITING.replace("CALL", call))
    warm_executable()
    variables = {"DIST2_INCIDENTS": str(root), "DIST2_WAITING": "0.5"}
    size = 2 if "all_reduce" in call else 3
    ended = run([*warm_python(), CHILDREN, "-m", "dist2.run", "-n", str(size), script], variables=variables)
    assert ended.code == 0, ended
    (folder,) = root.glob("2*")
    assert f"incident: {folder}" in ended.errors
    told = CliRunner().invoke(cli, ["why", str(folder)])
    assert re.search(words.replace("is in", "are in"), told.output), told.output
    assert re.search(r"train.py:1[123] in load", told.output), told.output
    assert json.loads((folder / "desync.json").read_text())["culprits"] == [1]


FIRST = """
import os, threading, time
from pathlib import Path
import dist2

def load():
    deadline = time.monotonic() + 50
    while not list(Path(os.environ["DIST2_INCIDENTS"]).glob("2*/desync.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if os.environ.get("DIST2_ON_HANG"):
        threading.Event().wait()  # until the launcher ends it

here = Path(__file__).parent
(here / f"started-{os.environ['RANK']}").touch()
while len(list(here.glob("started-*"))) < 3:  # a rank that starts slowly would be late, too
    time.sleep(0.01)
if os.environ["RANK"] == LATE:
    load()
dist2.new_group("socket", 60, name="training")
"""


def first_group(folder: Path, late: int, **variables: str) -> tuple[Ended, Path, list[int]]:
    """Have one of three ranks come late to their first group; return the end, the incident, the culprits."""
    script, root = folder / "train.py", folder / "incidents"
    script.write_text(FIRST.replace("LATE", repr(str(late))))
    warm_executable()
    variables |= {"DIST2_INCIDENTS": str(root), "DIST2_WAITING": "0.5"}
    ended = run([*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "3", script], variables=variables)
    (incident,) = root.glob("2*")
    return ended, incident, json.loads((incident / "desync.json").read_text())["culprits"]


@pytest.mark.parametrize(("late", "control_plane"), [(0, ""), (1, ""), (1, "1")])
def test_a_wait_in_the_first_new_group_leaves_an_incident(
    late: int, control_plane: str, tmp_path: Path
) -> None:
    ended, folder, culprits = first_group(tmp_path, late, DIST2_CONTROL_PLANE=control_plane)
    assert ended.code == 0, ended
    assert ended.errors.count(f"incident: {folder}") == 1, ended
    assert ended.errors.count("the job waits: ") == 1, ended
    assert culprits == [late]
    waiting = ", ".join(str(rank) for rank in range(3) if rank != late)
    told = CliRunner().invoke(cli, ["why", str(folder)]).output
    words = (
        f"ranks {waiting} are in dist2's new_group, called at train.py:20 in <module>; rank {late}: it has "
    )
    assert words in told, told


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(("policy", "code"), [("abort", 1), ("exit", EXIT_CODE)])
def test_the_policy_ends_a_wait_in_the_first_new_group(
    policy: str, code: int, late: int, tmp_path: Path
) -> None:
    ended, folder, culprits = first_group(tmp_path, late, DIST2_ON_HANG=policy)
    assert ended.code == code, ended
    assert culprits == [late]
    assert f"GroupAbortedError: DIST2_ON_HANG={policy}, as the job waited: ranks " in ended.errors
    assert ended.errors.splitlines()[-1].startswith(f"incident: {folder}, ")
    assert {path.name for path in folder.glob("hang-*")} == {f"hang-{r}.json" for r in range(3) if r != late}


FOREVER = """
import os, threading
from pathlib import Path
import dist2

here = Path(__file__).parent
(here / f"started-{os.environ['RANK']}").touch()
while len(list(here.glob("started-*"))) < 3:
    threading.Event().wait(0.01)
if os.environ["RANK"] == "2":
    threading.Event().wait()
dist2.new_group("socket", 60, name="training")
"""


@pytest.mark.parametrize(("policy", "code"), [("abort", 1), ("exit", EXIT_CODE)])
def test_the_policy_holds_where_no_incidents_are_wanted(policy: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FOREVER)
    warm_executable()
    variables = {"DIST2_INCIDENTS": "0", "DIST2_ON_HANG": policy, "DIST2_WAITING": "0.5"}
    variables["TMPDIR"] = str(tmp_path)
    ended = run([*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "3", script], variables=variables)
    assert ended.code == code, ended
    # Rank 1 may still be on its way into the call.
    words = (
        rf"GroupAbortedError: DIST2_ON_HANG={policy}, as the job waited: .*; rank 2: it has not registered "
    )
    assert re.search(words, ended.errors), ended
    assert "incident" not in ended.errors, ended
    assert not list(tmp_path.rglob("hang-*"))


def test_a_rank_that_has_not_registered_is_expected_to_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "_requests", lambda: {0: object(), 1: None})
    (tmp_path / "hang-0.json").touch()
    job, until = GroupInfo("uid", "training", "", "", 0, (0, 1)), time.monotonic() + 40
    Waits(Recording(tmp_path), 1.0)._await_parts(tmp_path, job, until)
    assert time.monotonic() < until


NEVER = """
import os, dist2
if os.environ["RANK"] == "0":
    dist2.new_group("socket", 0.5, name="training")
else:
    os.read(os.pipe()[0], 1)
"""


def test_a_timeout_of_the_first_new_group_leaves_an_incident(tmp_path: Path) -> None:
    script, root = tmp_path / "train.py", tmp_path / "incidents"
    script.write_text(NEVER)
    warm_executable()
    command = [*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "2", script]
    ended = run(command, variables={"DIST2_INCIDENTS": str(root)})
    (folder,) = root.glob("2*")
    assert ended.errors.splitlines()[-1].startswith(f"incident: {folder}, ")
    told = json.loads(CliRunner().invoke(cli, ["why", str(folder), "--json"]).output)
    assert told["culprits"] == [1]
    assert told["verdict"][0].startswith("rank 0 failed: RendezvousTimeoutError: "), told


def test_a_store_that_does_not_answer_is_that_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of which nothing is known may wait on another host."""
    monkeypatch.setattr(waits_module, "STORE_S", 0.05)
    monkeypatch.setattr(waits_module, "processes_of_ranks", dict)
    hangs = threading.Event()

    class Silent(Building):
        def requests(self) -> dict[int, JoinRequest | None]:
            hangs.wait(20)
            return {}

    answers = {rank: Answer(silence=NO_PART) for rank in range(3)}
    answers[1] = Answer(state={"rank": 1})
    with Silent(1, 3):
        found = waits_module._registered(answers)
        hangs.set()
    assert {rank: each.silence for rank, each in found.items()} == {0: NOT_REGISTERED, 1: ""}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_comes_after_the_verdict_adds_no_part(is_told: bool, tmp_path: Path) -> None:
    """It would show a rank that was missing as one that waits."""
    recording, making = Recording(tmp_path), Building(2, 3, uid="meeting")
    recording.making = waits_module._info_of(making)
    folder = folders.joined(tmp_path, "meeting", "new_group").path
    if is_told:
        (folder / waits_module.VERDICT).write_text('{"verdict": []}')
    with making:
        Waits(recording, 0.01)._write(set())
    assert [path.name for path in folder.glob("hang-*")] == ([] if is_told else ["hang-2.json"])


def test_a_rank_that_fails_after_the_verdict_leaves_its_end_to_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks end one after another, and the others notice: no traceback of a program may tell that."""
    making = Building(rank=1, world_size=2, uid="job")
    seen: list[str] = []
    acts, ended = threading.Event(), threading.Event()

    def act(then: str, words: str, rank: int) -> None:
        acts.wait(20)
        seen.append(f"rank {rank}: {then}")

    monkeypatch.setattr("observability.incidents.hang.act", act)
    folder = folders.joined(tmp_path, "job", "new_group")
    waits = Waits(Recording(tmp_path), AFTER_S, "exit")

    def fail() -> None:
        with pytest.raises(ValueError, match="rank 0 exited"), making:
            waits._recording.making = waits_module._info_of(making)
            meeting.start()
            wait_for(lambda: making.on_failed is not None)
            (folder.path / waits_module.VERDICT).write_text('{"verdict": ["rank 2 sleeps"]}')
            raise ValueError("rank 0 exited with code 86")
        seen.append("raised")
        ended.set()

    meeting = threading.Thread(target=waits._meet, args=(tmp_path, set(), ""))
    failing = threading.Thread(target=fail)
    failing.start()
    assert not ended.wait(0.3), seen
    acts.set()
    failing.join(20)
    meeting.join(20)
    assert seen == ["rank 1: exit", "raised"]
