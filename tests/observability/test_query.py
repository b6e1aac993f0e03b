"""``dist2 query``: SQL over a live job and over an incident, with the queries of the documentation."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.queries import DOCUMENT, QUERIES, ask
from support.ranks import Tenant, run_ranks

import observability
from dist2 import OperationTimeoutError, ProcessGroup
from observability.commands.query import query
from observability.flight_recorder import instrument
from observability.incidents.recording import Recording
from observability.job.tables import TABLES

duckdb = pytest.importorskip("duckdb")
INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


@attrs.define(eq=False)
class Job:
    """Two ranks: rank 1 misses an operation, while rank 0 waits for it."""

    ready: threading.Barrier = attrs.field(factory=lambda: threading.Barrier(2))
    asked: threading.Event = attrs.field(factory=threading.Event)

    def body(self, pg: ProcessGroup) -> None:
        """Be one rank."""
        with observability.start(pg, waiting_after_s=0.2) as server:
            for _ in range(3):
                with observability.step(pg, name="queried"):
                    pg.all_reduce(torch.ones(2))
            self.ready.wait(20)
            if pg.rank() == 0:
                work = pg.barrier(async_op=True, timeout=30.0)
                try:
                    self.look(server, pg.group_name)
                finally:
                    self.asked.set()
                work.wait()
            else:
                self.asked.wait(30)
                pg.barrier(timeout=30.0)

    def look(self, server: observability.Server, name: str) -> None:
        """Ask the job."""
        token = ["--token", server.token]
        assert len(QUERIES) >= 20
        for sql in QUERIES:
            ask(server.url, sql, *token)
        calls = "select rank from operations where op = 'all_reduce'"
        counted = f"select rank, count(*) as calls from ({calls}) group by rank order by rank"
        assert ask(server.url, counted, *token) == [{"rank": 0, "calls": 3}, {"rank": 1, "calls": 3}]
        flying = f"select rank, op from operations where state = 'started' and group_name = '{name}'"
        assert ask(server.url, flying, *token) == [{"rank": 0, "op": "barrier"}]
        queried = "select max(number) as step from steps where rank = 1 and loop = 'queried'"
        (step,) = ask(server.url, queried, *token)
        assert step == {"step": 3}


def test_a_live_job_answers_all_queries_of_the_documentation() -> None:
    run_ranks(2, Job().body, INPROC)


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The incident of a job in which rank 1 misses an operation."""
    root, failed = tmp_path_factory.mktemp("incidents"), threading.Event()
    recording = Recording(root)

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
        run_ranks(2, body, INPROC)
    finally:
        instrument.on_broken.remove(recording.broken)
    (folder,) = root.glob("2*")
    return folder


def test_an_incident_answers_them_too(incident: Path) -> None:
    for sql in QUERIES:
        ask(incident, sql)
    assert ask(incident, "select error from failures") == [{"error": "OperationTimeoutError"}]
    (failed,) = ask(incident, "select rank, op, seq from operations where error is not null")
    assert failed == {"rank": 0, "op": "all_reduce", "seq": 2}
    lines = ask(incident, "select count(*) as n from stacks where file like '%test_query.py'")
    assert lines[0]["n"] != 0


@pytest.mark.parametrize(
    "sql",
    [
        "copy ranks to '{folder}/ranks.csv'",
        "attach '{folder}/new.db' as new",
        "select * from read_csv('{folder}/secret.csv')",
        "select * from '{folder}/secret.csv'",
        "set enable_external_access = true",
        "load httpfs",
    ],
)
def test_a_query_reaches_no_files(incident: Path, tmp_path: Path, sql: str) -> None:
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    ended = CliRunner().invoke(query, [str(incident), sql.format(folder=tmp_path)])
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_a_row_is_a_line_with_all_of_its_values_unless_a_terminal_is_too_narrow(incident: Path) -> None:
    ended = CliRunner().invoke(
        query, [str(incident), "select repeat('long ', 100) as a, repeat('x', 99) as b"]
    )
    assert ended.stdout.splitlines()[1].split() == ["long"] * 100 + ["x" * 99]
    assert CliRunner().invoke(query, [str(incident), " "]).stdout.startswith("ranks(rank, ")


def test_ctrl_c_ends_a_query_at_once(incident: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, meanwhile = signal.getsignal(signal.SIGINT), list[object]()
    show = "observability.commands.query._show"
    monkeypatch.setattr(show, lambda *_: meanwhile.append(signal.getsignal(signal.SIGINT)))
    assert CliRunner().invoke(query, [str(incident), "select 1"]).exit_code == 0
    assert meanwhile == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == before


def test_the_answer_may_be_a_table_or_csv_and_an_error_is_a_line(
    incident: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = CliRunner()
    listed = command.invoke(query, [str(incident)])
    assert [line.partition("(")[0] for line in listed.stdout.splitlines()] == list(TABLES)
    assert set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)) == set(TABLES)
    table = command.invoke(query, [str(incident), "select 1 as one, null as none"])
    assert table.stdout.split() == ["one", "none", "1"]
    rows = command.invoke(query, [str(incident), "select 1 as a, 'x,y' as b", "--format", "csv"])
    assert rows.stdout.split() == ["a,b", '1,"x,y"']
    wrong = command.invoke(query, [str(incident), "select nothing from ranks"])
    assert (wrong.exit_code, "nothing" in wrong.stderr) == (1, True)
    assert command.invoke(query, [str(incident.parent), "select 1"]).exit_code == 2
    monkeypatch.setitem(sys.modules, "duckdb", None)
    absent = command.invoke(query, [str(incident), "select 1"])
    assert (absent.exit_code, "pip install 'dist2[query]'" in absent.stderr) == (2, True)
