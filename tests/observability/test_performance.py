"""The speed of the job, from any rank: stragglers, one trace, discovery for Prometheus."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from click.testing import CliRunner
from support.captured_logs import logged
from support.ranks import Tenant, run_ranks

import observability
from dist2 import ProcessGroup
from observability.client import Asker
from observability.clocks import Offset
from observability.commands.trace import trace as trace_command
from observability.tracing import Slice, Timeline, TracedGroup, merged

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})

TOKEN = "performance"

REDUCED, SENT = 54_321, 1_234
"""Elements that no other test uses."""


class Planes:
    """The control planes of ranks that are threads, which know each other."""

    def __init__(self) -> None:
        self.servers: dict[int, observability.Server] = {}

    def start(self, pg: ProcessGroup, stack: ExitStack) -> None:
        server = stack.enter_context(observability.start(pg, token=TOKEN))
        self.servers[pg.rank()] = server
        pg.barrier()

    def ask(self, rank: int, path: str) -> Any:
        return json.loads(observability.fetch(f"{self.servers[rank].url}{path}", TOKEN))


@contextmanager
def planes() -> Iterator[tuple[Planes, ExitStack]]:
    with ExitStack() as stack:
        yield Planes(), stack


def test_two_late_ranks_are_named_within_a_hundred_operations_everywhere() -> None:
    late = (1, 2)

    def body(pg: ProcessGroup) -> None:
        known.start(pg, stack)
        for _ in range(100):
            if pg.rank() in late:
                time.sleep(0.05)
            pg.all_reduce(torch.ones(2))
        if pg.rank() == 0:
            see()
        assert observability.slowest_rank(pg) in late  # without control planes

    def see() -> None:
        documents = [known.ask(rank, "/stragglers") for rank in (0, 3)]
        for document in documents:
            assert sorted(each["rank"] for each in document["stragglers"]) == list(late)
            assert document["asked_rank"] == 0  # the watching rank
            for each in document["stragglers"]:
                assert 0.03 < each["late_s"] < 0.08
            assert document["silent"] == {}
        metrics = observability.read_metrics(known.servers[0].url, TOKEN)
        for rank in late:
            assert 2 < metrics.value("dist2_straggler_seconds_total", rank=str(rank)) < 8
        assert metrics.label_values("dist2_straggler_seconds_total", "rank") == ["1", "2"]
        assert observability.slowest_rank(known.servers[3].url, TOKEN) in late
        assert observability.slowest_rank() in late
        assert observability.slowest_rank({0: metrics}) in late
        known.servers[0].close()
        document = known.ask(3, "/stragglers")  # another rank queries the remaining ones
        assert document["asked_rank"] == 1
        assert sorted(each["rank"] for each in document["stragglers"]) in ([], [2], list(late))
        assert "0" in document["silent"]

    with planes() as (known, stack), logged() as lines:
        run_ranks(4, body, INPROC)
    said = [each["event"] for each in lines if each["name"] == "dist2.stragglers"]
    assert any(line.startswith("rank 1 arrives") for line in said)
    assert any(line.startswith("rank 2 arrives") for line in said)


def test_without_a_late_rank_none_is_named() -> None:
    def body(pg: ProcessGroup) -> None:
        known.start(pg, stack)
        for _ in range(300):
            pg.all_reduce(torch.ones(2))
        if pg.rank() == 0:
            document = known.ask(1, "/stragglers")
            assert document["stragglers"] == []
            assert document["silent"] == {}
            assert observability.slowest_rank(known.servers[0].url, TOKEN) is None
        assert observability.slowest_rank(pg) is None

    with planes() as (known, stack):
        run_ranks(2, body, INPROC)


def parts_of(operation: Any, of_rank: list[Any]) -> dict[str, float]:
    """Return the durations of the parts of an operation in microseconds."""
    begun, ended = operation["ts"], operation["ts"] + operation["dur"]
    parts = [each for each in of_rank if each.get("cat") == "part" and begun <= each["ts"] <= ended]
    return {each["name"]: each["dur"] for each in parts if each["tid"] == operation["tid"]}


def test_one_trace_has_all_ranks_with_what_they_waited_for(tmp_path: Path) -> None:
    def body(pg: ProcessGroup) -> None:
        known.start(pg, stack)
        if pg.rank() == 1:
            time.sleep(0.05)
        pg.all_reduce(torch.ones(REDUCED))
        if pg.rank() == 0:
            time.sleep(0.05)
            pg.send(torch.ones(SENT), 1)
        else:
            pg.recv(torch.ones(SENT), 0)

    with planes() as (known, stack):
        run_ranks(2, body, INPROC)
        trace = known.ask(1, "/trace?seconds=30")
        alone = known.ask(1, "/trace?seconds=30&rank=0")
        with pytest.raises(HTTPError, match="400"):
            known.ask(1, "/trace?seconds=soon")
        path = tmp_path / "job.json"
        url = f"{known.servers[1].url}/#token={TOKEN}"
        done = CliRunner().invoke(trace_command, ["-o", str(path), url])
        assert done.exit_code == 0, done.output
        assert "2 ranks, clocks right within 0 us" in done.output
        refused = CliRunner().invoke(trace_command, ["-o", str(path), "--token", "wrong", url])
        assert refused.exit_code == 2
        assert "refuses the token" in refused.output
    assert len(json.loads(path.read_text())["otherData"]["ranks"]) == 2
    assert {each["rank"] for each in alone["otherData"]["ranks"]} == {0}
    events = trace["traceEvents"]
    assert [each["clock_error_ns"] for each in trace["otherData"]["ranks"]] == [0, 0]
    assert trace["otherData"]["missing"] == {}
    for rank in range(2):
        of_rank = [each for each in events if each["pid"] == rank]
        # The ranks of earlier tests were threads of this process as well.
        (reduce,) = [each for each in of_rank if each.get("args", {}).get("bytes") == 4 * REDUCED]
        parts = parts_of(reduce, of_rank)
        assert parts["wait"] + parts["move"] == pytest.approx(reduce["dur"], abs=1)
        assert (parts["wait"] > 40_000) == (rank == 0)
        assert any(each["ph"] == "C" and each["args"]["GB/s"] > 0 for each in of_rank)
    sent = [each for each in events if each.get("args", {}).get("bytes") == 4 * SENT]
    for message in sent:
        parts = parts_of(message, [each for each in events if each["pid"] == message["pid"]])
        if message["name"] == "send":
            assert parts == {}
        else:
            assert parts["wait"] > 40_000
            assert parts["wait"] + parts["move"] == pytest.approx(message["dur"], abs=1)
    flows = [[each["bind_id"] for each in sent if each["name"] == name] for name in ("send", "recv")]
    assert flows[0] == flows[1]
    assert len(flows[0]) == 1


def test_a_trace_with_parts_is_of_the_next_seconds(tmp_path: Path) -> None:
    path = tmp_path / "job.json"

    def body(pg: ProcessGroup) -> None:
        known.start(pg, stack)
        command, over = threading.Thread(target=write), torch.zeros(1)
        if pg.rank() == 0:
            command.start()
        while not over[0]:
            over.fill_(float(pg.rank() == 0 and not command.is_alive()))
            pg.all_reduce(over)

    def write() -> None:
        url = f"{known.servers[1].url}/#token={TOKEN}"
        done = CliRunner().invoke(trace_command, ["--parts", "--seconds", "1", "-o", str(path), url])
        assert done.exit_code == 0, done.output
        refused = Asker().ask  # the act has its limits
        with pytest.raises(HTTPError, match="400"):
            refused(f"{known.servers[0].url}/acts/record_parts", TOKEN, body={"seconds": -1})

    with planes() as (known, stack):
        run_ranks(2, body, INPROC)
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(2):
        parts = {each["name"] for each in events if each["pid"] == rank and each.get("cat") == "part"}
        assert {"send", "recv", "reduce"} <= parts


def test_prometheus_is_told_where_the_ranks_are() -> None:
    def body(pg: ProcessGroup) -> None:
        known.start(pg, stack)

    with planes() as (known, stack):
        run_ranks(2, body, INPROC)
        targets = known.ask(1, "/sd")
        urls = [known.servers[rank].url for rank in range(2)]
    assert [each["targets"] for each in targets] == [[url.removeprefix("http://")] for url in urls]
    assert [each["labels"] for each in targets] == [
        {"dist2_rank": str(rank), "__scheme__": "http"} for rank in range(2)
    ]


def test_long_answers_are_compressed_for_those_who_take_it() -> None:
    with observability.start(token=TOKEN) as server:
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept-Encoding": "gzip"}
        with urlopen(Request(f"{server.url}/metrics", headers=headers), timeout=10) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            body = response.read()
    assert b"dist2_build_info" in gzip.decompress(body)
    assert len(body) < len(gzip.decompress(body)) / 2


# Clocks of several hosts


def timeline(rank: int, called_ns: int, ended_ns: int) -> Timeline:
    operation = Slice(
        group=0,
        op="all_reduce",
        seq=1,
        flow="w#1",
        created_ns=called_ns,
        started_ns=called_ns,
        finished_ns=ended_ns,
        nbytes=1000,
        state="completed",
        call="",
        inputs=[],
        outputs=[],
    )
    group = TracedGroup("w", "world", "socket", [0, 1])
    return Timeline(rank, f"host{rank}", 7, f"clock{rank}", [group], [operation], True, ended_ns, 0)


def test_a_trace_is_right_across_hosts() -> None:
    ahead_ns = 5_000_000_000
    told = [
        (timeline(0, 1_000_000, 3_000_000), Offset()),
        (timeline(1, ahead_ns + 2_500_000, ahead_ns + 3_000_000), Offset(-ahead_ns, 40_000)),
    ]
    document = merged(told, {2: "no answer"})
    spans = {
        (each["pid"], each["name"]): (each["ts"], each["dur"])
        for each in document["traceEvents"]
        if each["ph"] == "X"
    }
    assert spans[0, "wait"] == (1000, 1500)
    assert spans[0, "move"] == (2500, 500)
    assert spans[1, "all_reduce"] == (2500, 500)
    assert spans[1, "wait"] == (2500, 0)
    assert document["otherData"]["missing"] == {"2": "no answer"}
    assert document["otherData"]["ranks"][1]["clock_error_ns"] == 40_000
    counters = [each["args"]["GB/s"] for each in document["traceEvents"] if each["ph"] == "C"]
    assert counters == [0.0005, 0.0, 0.002, 0.0]  # 1000 bytes of two ranks, over the time inside
