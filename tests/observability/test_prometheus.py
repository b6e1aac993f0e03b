"""The files for Prometheus and Grafana, with a real Prometheus: rules, discovery, an alert."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from support import debian, prometheus
from support.fake_groups import FakeGroup, info_of
from support.processes import run_processes
from support.programs import ROOT

import observability
from dist2 import ProcessGroup
from observability.exposition import registry_of
from observability.metrics import Metrics
from observability.straggler_watch import StragglerCollector, StragglerWatch

MONITORING = ROOT / "observability" / "monitoring"
CASES = Path(__file__).parent / "monitoring"
TOKEN = "prometheus-of-a-test"

STEPS = 150
STUCK = 2

pytestmark = pytest.mark.timeout(debian.NEEDED_S)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"nobody wrote {path}"
        time.sleep(0.02)


def rank_main(pg: ProcessGroup, folder: Path) -> None:
    """Run some steps; then all ranks but one come to a barrier, which the test has come to an end."""
    with observability.start(pg, token=TOKEN) as server:
        for _ in range(STEPS):
            pg.all_reduce(torch.ones(1000))
        pg.barrier()
        if pg.rank() == 1:
            (folder / "ran.part").write_text(server.url)  # any rank will do
            (folder / "ran.part").rename(folder / "ran")
        wait_for(folder / "hang")
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
    assert "dist2_oldest_operation_age_seconds) > 30" in rules
    (folder / "rules.yml").write_text(rules.replace("age_seconds) > 30", "age_seconds) > 3"))
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
            (tmp_path / "hang").touch()
            firing = prometheus.until(server.firing, lambda seen: "Dist2RankStuck" in seen)
            (stuck,) = firing["Dist2RankStuck"]
            assert (stuck["rank"], stuck["group"]) == (str(STUCK), "test")
            assert stuck["summary"] == f"rank {STUCK} is stuck: group test waits for it"
            (tmp_path / "enough").touch()
            prometheus.until(server.firing, lambda seen: "Dist2RankStuck" not in seen)
    finally:
        (tmp_path / "hang").touch()
        (tmp_path / "enough").touch()
        job.join()
    assert failed == []


def test_the_rules_say_what_they_must_and_nothing_else(tmp_path: Path) -> None:
    prometheus.require()
    for file in (MONITORING / "rules.yml", CASES / "rules_test.yml"):
        (tmp_path / file.name).write_text(file.read_text())
    prometheus.promtool("check", "rules", "rules.yml", folder=tmp_path)
    prometheus.promtool("test", "rules", "rules_test.yml", folder=tmp_path)


def expressions_of_the_dashboard() -> list[str]:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_what_prometheus_understands(tmp_path: Path) -> None:
    prometheus.require()
    rules = [
        {"record": f"panel:number_{number}", "expr": expression}
        for number, expression in enumerate(expressions_of_the_dashboard())
    ]
    # JSON is YAML.
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    prometheus.promtool("check", "rules", "panels.yml", folder=tmp_path)


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    metrics = Metrics()
    registry = registry_of(metrics)
    registry.register(StragglerCollector(StragglerWatch(lambda rank, path: b"", list)))
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
