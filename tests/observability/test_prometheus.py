"""The files for Prometheus and Grafana, with a real Prometheus: rules, discovery, an alert."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import certificates, debian, prometheus
from support.documents import blocks_of
from support.fake_groups import FakeGroup, info_of
from support.processes import run_processes, started
from support.programs import ROOT

import dist2
import observability
from dist2 import ProcessGroup
from observability.exposition import registry_of
from observability.flight_recorder import FlightRecorder
from observability.job.member import Member
from observability.job.watch import WaitingCollector, Watch
from observability.metrics import Metrics
from observability.straggler_watch import StragglerCollector, StragglerWatch

MONITORING = ROOT / "observability" / "monitoring"
CASES = Path(__file__).parent / "monitoring"
BLOCKS = dict(blocks_of((ROOT / "docs" / "metrics.md").read_text()))
"""The last block of each language."""
QUERIES = re.findall(r"^[^# \n].*(?:\n +.*)*", BLOCKS["promql"], re.MULTILINE)
TOKEN = "prometheus-of-a-test"

CANARY = """      - alert: Canary
        expr: up == 0
        for: 2s
"""
"""Fires for each rank that does not answer, after the rules before it have been evaluated as often."""

STEPS = 150
STUCK = 2

pytestmark = pytest.mark.timeout(debian.NEEDED_S)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"nobody wrote {path}"
        time.sleep(0.02)


def rank_main(pg: ProcessGroup, folder: Path) -> None:
    """Run some steps, and others for as long as the test looks; then one rank does not come to a barrier."""
    with observability.start(pg, token=TOKEN, waiting_after_s=1) as server:
        for _ in range(STEPS):
            pg.all_reduce(torch.ones(1000))
        pg.barrier()
        if pg.rank() == 1:
            (folder / "ran.part").write_text(server.url)  # any rank will do
            (folder / "ran.part").rename(folder / "ran")
        going = torch.ones(1)
        while going.item():  # so that there are rates
            time.sleep(0.05)
            going.fill_(not (folder / "hang").exists())
            pg.broadcast(going, root=1)
        if pg.rank() == STUCK:
            wait_for(folder / "enough")
        pg.barrier()


def configured(folder: Path, url: str) -> None:
    """Put the ready-made files into a folder: for this job, and with less patience."""
    text = (MONITORING / "prometheus.yml").read_text()
    for ours, theirs in (
        ("http://127.0.0.1:9400/sd", f"{url}/sd"),
        ("_interval: 5s", "_interval: 1s"),
        ("refresh_interval: 15s", "refresh_interval: 1s"),
    ):
        assert ours in text
        text = text.replace(ours, theirs)
    (folder / "prometheus.yml").write_text(text)
    rules = (MONITORING / "rules.yml").read_text()
    for ours, theirs in (
        ('"(.*)")) > 30', '"(.*)")) > 3'),
        ("for: 30s", "for: 2s"),
        ("seconds_total[5m]", "seconds_total[20s]"),
    ):
        assert ours in rules
        rules = rules.replace(ours, theirs)
    (folder / "rules.yml").write_text(rules + CANARY)
    (folder / "dist2_token").write_text(TOKEN)


@pytest.mark.slow
def test_prometheus_finds_all_ranks_counts_rightly_and_says_which_rank_is_stuck(tmp_path: Path) -> None:
    prometheus.require()
    failed: list[BaseException] = []

    def run_job() -> None:
        try:
            run_processes(4, rank_main, tmp_path, tmp_path, timeout=60.0)
        except BaseException as error:  # noqa: BLE001 - for the test
            failed.append(error)

    job = threading.Thread(target=run_job)
    job.start()
    try:
        wait_for(tmp_path / "ran")
        configured(tmp_path, (tmp_path / "ran").read_text())
        prometheus.promtool("check", "config", "prometheus.yml", folder=tmp_path)
        with prometheus.running(tmp_path) as server:
            up = prometheus.until(lambda: server.query("up"), lambda seen: list(seen.values()) == [1] * 4)
            assert sorted(re.findall(r"dist2_rank=(\d)", " ".join(up))) == ["0", "1", "2", "3"]
            counts = server.query('sum by (rank) (dist2_operations_total{op="all_reduce"})')
            assert counts == {f"rank={rank}": STEPS for rank in range(4)}
            payload = server.query('sum(dist2_bytes_total{op="all_reduce", size_le_bytes="16384"})')
            assert payload == {"": 4 * STEPS * 4000}
            bus = server.query('sum(dist2_bus_bytes_total{op="all_reduce"})')
            assert bus == {"": 4 * STEPS * 4000 * 2 * 3 / 4}
            histogram = server.query(
                'sum(dist2_operation_duration_seconds_bucket{op="all_reduce", le="+Inf"})'
            )
            assert histogram == {"": 4 * STEPS}
            assert "Dist2RankStuck" not in server.firing()
            check_dashboard(server)
            check_documented_queries(server)
            (tmp_path / "hang").touch()
            firing = prometheus.until(server.firing, lambda seen: "Dist2RankStuck" in seen)
            (stuck,) = firing["Dist2RankStuck"]
            assert (stuck["rank"], stuck["group"]) == (str(STUCK), "test")
            assert stuck["summary"] == f"rank {STUCK} is stuck: group test waits for it"
            assert data_of(server, "Waiting for").keys() == {f"group=test,job=training,missing_rank={STUCK}"}
            behind = data_of(server, "Ranks behind")
            assert re.findall(r"rank=\d", " ".join(behind)) == [f"rank={STUCK}"]
            check_documented_queries_of_a_hang(server)
            (tmp_path / "enough").touch()
            prometheus.until(server.firing, lambda seen: "Dist2RankStuck" not in seen)
    finally:
        (tmp_path / "hang").touch()
        (tmp_path / "enough").touch()
        job.join()
    assert failed == []


def alerting_rank(pipe: Connection, rank: int, folder: Path) -> None:
    """Work, with rank 2 slow; hang in a chain over two groups; then end, or rank 2 is killed."""
    store = dist2.FileStore(str(folder / "store"), 3)
    members: dict[str, Any] = {"store": store, "rank": rank, "world_size": 3}
    with (
        dist2.new_group("socket", 60, name="training", **members) as pg,
        observability.start(pg, token=TOKEN, waiting_after_s=0.5) as server,
    ):
        first, second = pg.split([0, 1], name="first"), pg.split([1, 2], name="second")
        pipe.send(server.url)
        going = torch.ones(1)
        while going.item():
            time.sleep(0.06 if rank == 2 else 0.01)
            going.fill_(not pipe.poll() if rank == 0 else 1)
            pg.all_reduce(going, dist2.ReduceOp.MIN)
        pipe.send("hangs")
        if rank != 1:
            pipe.recv()  # rank 0 had the message that ended the loop
        for each in (second, first):
            if each is not None:
                each.barrier()
        if pipe.recv() == "be killed" and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if pipe.recv() == "fail":
            with pytest.raises(dist2.PeerLostError):
                pg.barrier()
            pipe.recv()


@pytest.mark.slow
def test_alerts_name_the_culprit_and_only_it(tmp_path: Path) -> None:
    """A slow rank, a hang in a chain of groups, a killed rank, and the normal end of a job."""
    prometheus.require()
    for ending in ("killed", "normal"):
        folder = tmp_path / ending
        folder.mkdir()
        with started(alerting_rank, *((rank, folder) for rank in range(3))) as pipes:
            urls = [pipe.recv() for pipe in pipes]
            configured(folder, urls[0])
            with prometheus.running(folder) as server:
                prometheus.until(lambda: server.query("up"), lambda seen: list(seen.values()) == [1] * 3)
                if ending == "normal":
                    check_slow_rank(server)
                check_chain(server, pipes)
                if ending == "killed":
                    check_killed(server, pipes, urls[2])
                end(pipes)
                prometheus.until(server.firing, lambda seen: len(seen.get("Canary", ())) == 3)
                assert "Dist2RankSilent" not in server.firing(), "the job is over"


def check_slow_rank(server: prometheus.Prometheus) -> None:
    found = prometheus.until(server.firing, lambda seen: "Dist2Straggler" in seen)
    assert [each["rank"] for each in found["Dist2Straggler"]] == ["2"]
    assert set(found) <= {"Dist2Straggler", "Dist2SlowPath"}


def check_chain(server: prometheus.Prometheus, pipes: list[Connection]) -> None:
    pipes[0].send("hang")
    assert [pipe.recv() for pipe in pipes] == ["hangs"] * 3
    found = prometheus.until(server.firing, lambda seen: "Dist2RankStuck" in seen)
    waits = "max by (group) (dist2_waiting_seconds)"
    prometheus.until(lambda: server.query(waits), lambda seen: set(seen) == {"group=first", "group=second"})
    stuck = [(each["rank"], each["group"]) for each in found["Dist2RankStuck"]]
    assert stuck == [("2", "second")], "rank 1 waits itself"
    pipes[2].send("go on")
    prometheus.until(server.firing, lambda seen: "Dist2RankStuck" not in seen)


def check_killed(server: prometheus.Prometheus, pipes: list[Connection], killed: str) -> None:
    for pipe in pipes:
        pipe.send("be killed")
    for pipe in pipes[:2]:
        pipe.send("fail")
    found = prometheus.until(server.firing, lambda seen: "Dist2RankSilent" in seen)
    assert [each["instance"] for each in found["Dist2RankSilent"]] == [killed.removeprefix("http://")]
    failed = prometheus.until(server.firing, lambda seen: "Dist2OperationsFail" in seen)
    assert {each["error"] for each in failed["Dist2OperationsFail"]} == {"PeerLostError"}


def end(pipes: list[Connection]) -> None:
    for _ in range(2):
        for pipe in pipes:
            with suppress(OSError):  # of the rank that was killed
                pipe.send("end")


@pytest.mark.slow
def test_prometheus_scrapes_with_the_configuration_for_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prometheus.require()
    tls = certificates.make(tmp_path / "pod", name="training").variables
    for name, path in tls.items():
        monkeypatch.setenv(name, path)
    documents = yaml.safe_load_all((MONITORING / "kubernetes.yml").read_text())
    (text,) = [each["data"]["prometheus.yml"] for each in documents if each["kind"] == "ConfigMap"]
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        dist2.new_group("fake", 20, store=store, rank=0, world_size=1) as pg,
        observability.start(pg, token=TOKEN, announce=False) as plane,
    ):
        for theirs, ours in {
            "https://training-0.training:9400": plane.url,
            "/run/dist2/token": "dist2_token",
            "/run/tls/ca.pem": tls["DIST2_TLS_CA"],
            "/etc/dist2/rules.yml": "rules.yml",
            "scrape_interval: 5s": "scrape_interval: 1s",
        }.items():
            assert theirs in text
            text = text.replace(theirs, ours)
        (tmp_path / "prometheus.yml").write_text(text)
        (tmp_path / "rules.yml").write_text((MONITORING / "rules.yml").read_text())
        (tmp_path / "dist2_token").write_text(TOKEN)
        prometheus.promtool("check", "config", "prometheus.yml", folder=tmp_path)
        with prometheus.running(tmp_path) as server:
            prometheus.until(lambda: server.query("up"), lambda seen: list(seen.values()) == [1])
            assert ",plane=store" in "".join(data_of(server, "Connections"))
            assert "request=append" in data_of(server, "Store requests a second")
    store.close()


def test_the_rules_say_what_they_must_and_nothing_else(tmp_path: Path) -> None:
    prometheus.require()
    for file in (MONITORING / "rules.yml", CASES / "rules_test.yml"):
        (tmp_path / file.name).write_text(file.read_text())
    prometheus.promtool("check", "rules", "rules.yml", folder=tmp_path)
    prometheus.promtool("test", "rules", "rules_test.yml", folder=tmp_path)


DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUIET = {"Ranks behind", "Waiting for", "Stragglers", "Failed operations", "Refused connections"}
"""Panels without data while nothing is wrong."""
CONNECTED = {"Connections", "Store requests a second"}
"""Panels without data for a job that meets in a file, on one host."""


def filled_in(expression: str) -> str:
    """Put into an expression what Grafana does by default for its variables."""
    for variable in DASHBOARD["templating"]["list"][1:]:
        expression = expression.replace(f"${variable['name']}", variable["allValue"])
    assert "$" not in expression
    return expression


def data_of(server: prometheus.Prometheus, title: str, place: int = 0) -> dict[str, float]:
    """Return the data of a panel, once there are any; those of operations that rest may be NaN."""
    (targets,) = [panel["targets"] for panel in PANELS if panel["title"] == title]
    found: dict[str, float] = prometheus.until(
        lambda: server.query(filled_in(targets[place]["expr"])),
        lambda seen: not all(map(math.isnan, seen.values())),
    )
    return found


def check_dashboard(server: prometheus.Prometheus) -> None:
    """Ask what the dashboard asks, during a run: panels have data with the labels that their legends name."""
    for panel in PANELS:
        for place, target in enumerate(panel["targets"]):
            if panel["title"] in QUIET | CONNECTED:
                server.query(filled_in(target["expr"]))
                continue
            found = data_of(server, panel["title"], place)
            labels = {pair.partition("=")[0] for series in found for pair in series.split(",")}
            assert set(re.findall(r"{{ ?(\w+) ?}}", target.get("legendFormat", ""))) <= labels, panel["title"]
    for variable, values in (("job", ["training"]), ("group", ["test"]), ("rank", list("0123"))):
        (of_dashboard,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == variable]
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", of_dashboard["query"]["query"])
        assert asked is not None
        assert server.label_values(filled_in(asked[1]), asked[2]) == values


def check_documented_queries(server: prometheus.Prometheus) -> None:
    """Ask the document's queries about speed during a run; ranks call `broadcast` then."""
    p99, stragglers, bandwidth, inside, waiting, stuck, _ = QUERIES
    ranks = {f"rank={rank}" for rank in range(4)}

    def until_found(query: str, names: set[str]) -> set[str]:
        """Return the series of an answer, once those named are among them: ranks are scraped one by one."""
        return set(
            prometheus.until(
                lambda: {name for name, value in server.query(query).items() if not math.isnan(value)},
                names.issubset,
            )
        )

    sizes = {"size_le_bytes=64"}
    assert until_found(p99.replace("all_reduce", "broadcast"), sizes) == sizes
    until_found(bandwidth, {f"op=broadcast,{rank}" for rank in ranks})
    assert until_found(inside, ranks) == ranks
    assert until_found(waiting, ranks) == ranks
    assert server.query(stuck) == {}
    server.query(stragglers)  # may or may not find one


def check_documented_queries_of_a_hang(server: prometheus.Prometheus) -> None:
    *_, stuck, behind = QUERIES

    def ranks_of(query: str) -> list[str]:
        return sorted(re.findall(r"\brank=(\d)", " ".join(server.query(query))))

    assert stuck.endswith(" > 30")
    others = [str(rank) for rank in range(4) if rank != STUCK]
    prometheus.until(lambda: ranks_of(stuck.replace("> 30", "> 1")), others.__eq__)
    prometheus.until(lambda: ranks_of(behind), [str(STUCK)].__eq__)


def expressions_of_the_dashboard() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_dashboard_is_whole() -> None:
    """Grafana itself is not run: ids and places are unique, and all queries go to the chosen source."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    source, *variables = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asking = [*PANELS, *[target for panel in PANELS for target in panel["targets"]], *variables]
    assert all(each["datasource"] == chosen for each in [*asking, *DASHBOARD["annotations"]["list"]])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        assert columns.stop <= 24
        taken = {(x, y) for x in columns for y in rows}
        assert not cells & taken, panel["title"]
        cells |= taken
    for panel in PANELS:
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)


def test_dashboard_and_document_ask_what_prometheus_understands(tmp_path: Path) -> None:
    prometheus.require()
    rules = [
        {"record": f"panel:number_{number}", "expr": expression}
        for number, expression in enumerate([*expressions_of_the_dashboard(), *QUERIES])
    ]
    # JSON is YAML.
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    prometheus.promtool("check", "rules", "panels.yml", folder=tmp_path)


def test_the_document_configures_prometheus_as_the_ready_made_file() -> None:
    documented, ready = (
        yaml.safe_load(BLOCKS["yaml"]),
        yaml.safe_load((MONITORING / "prometheus.yml").read_text()),
    )
    assert documented == {"scrape_configs": ready["scrape_configs"]}


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    metrics = Metrics()
    registry = registry_of(metrics)
    registry.register(StragglerCollector(StragglerWatch(lambda after_ns, most: {}, list)))
    member = Member(metrics, FlightRecorder(), info_of())
    registry.register(WaitingCollector(Watch(member, "http://127.0.0.1:1", 1.0), member))
    FakeGroup(info_of(), metrics).run()
    there = {
        f"{family.name}{suffix}"
        for family in registry.collect()
        for suffix in ("", "_total", "_sum", "_count", "_bucket")
    }
    rules = (MONITORING / "rules.yml").read_text()
    recorded = set(re.findall(r"record: (\S+)", rules))
    text = " ".join([re.sub(r"#.*|summary:.*|description:.*", "", rules), *expressions_of_the_dashboard()])
    asked = set(re.findall(r"\b(?:dist2_[a-z0-9_]+|process_[a-z_]+)\b", text)) - {"dist2_rank"}
    assert len(asked) > 15
    assert asked <= there
    assert set(re.findall(r"\bdist2:[\w:]+", text)) <= recorded
