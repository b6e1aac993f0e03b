"""The counters: exact and bounded values in a format that any scraper can read."""

from __future__ import annotations

import gc
import itertools
import math
import re
import sys
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from support.fake_groups import FakeGroup, info_of, metas
from support.programs import ROOT

from dist2.errors import GroupAbortedError, MismatchError, OperationTimeoutError
from dist2.operation.instruments import Dispatch
from dist2.operation.kinds import OpKind
from dist2.operation.signature import TensorMeta
from dist2.runtime.usage import usage
from dist2.security.refusals import refusals
from observability import metrics as module
from observability.exposition import registry_of
from observability.flight_recorder import FlightRecorder
from observability.job.member import Member
from observability.job.verdict import Missing, Waiting
from observability.job.watch import MAX_LABELLED, Wait, WaitingCollector, Watch
from observability.metrics import (
    LARGER,
    MAX_LABEL_CHARS,
    OTHER,
    Metrics,
    label_text,
    size_bucket,
    size_in_words,
    size_label,
)
from observability.scrape import DURATIONS, Scrape, parse_metrics
from observability.steps import StepCollector, Steps
from observability.straggler_watch import StragglerCollector, StragglerWatch


def scrape(metrics: Metrics) -> Scrape:
    """Return the samples as Prometheus parses them."""
    return parse_metrics(generate_latest(registry_of(metrics)).decode())


def test_each_label_set_has_counts_bytes_and_durations() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(backend="socket"), metrics)
    for _ in range(3):
        group.run(took_ns=5_000)
    group.run(group.signature(OpKind.BROADCAST, metas([1 << 20]), root=0), took_ns=2_000_000)
    group.run(group.signature(OpKind.BARRIER, ()), took_ns=1_000)
    seen = scrape(metrics)
    small = {"op": "all_reduce", "group": "world", "backend": "socket", "rank": "0", "size_le_bytes": "64"}
    assert seen.value("dist2_operations_total", **small) == 3
    assert seen.value("dist2_bytes_total", **small) == 3 * 8
    assert seen.value(f"{DURATIONS}_count", **small) == 3
    assert seen.value(f"{DURATIONS}_sum", **small) == pytest.approx(15e-6)
    assert seen.value("dist2_bytes_total", op="broadcast", size_le_bytes=str(4 << 20)) == 4 << 20
    assert seen.value("dist2_slowest_operation_seconds", op="broadcast") == pytest.approx(2e-3)
    assert seen.value("dist2_operations_total", op="barrier", size_le_bytes="0") == 1
    assert seen.value("dist2_operations_total") == 5
    assert seen.value("process_resident_memory_bytes") > 0


def test_the_document_lists_the_metrics_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "counts", lambda: {("data", "version"): 1})
    monkeypatch.setattr(usage, "connections", lambda: {"data": (1, 2, 0)})
    monkeypatch.setattr(usage, "requests", lambda: {"get": 1})
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    group.waited_ns = lambda: 0  # type: ignore[attr-defined]  # as real groups have it
    group.queued = list  # type: ignore[attr-defined]  # and this
    group.run()
    group.run(error=GroupAbortedError("aborted"))
    shown, samples = set(), set()
    member = Member(metrics, FlightRecorder())
    watch = Watch(member, "http://127.0.0.1:9", 5.0)
    watch.waits = (Wait(group.begin(), ("world", 3, False, -1), None),)
    straggling = StragglerWatch(lambda after_ns, most: {}, list)
    monkeypatch.setattr(straggling, "late_s", lambda: {1: 2.5})
    late = StragglerCollector(straggling)
    registry = registry_of(metrics, lambda: [group])  # type: ignore[list-item]
    loops = Steps(metrics)
    begun = loops.begin()
    group.run()
    loops.end(begun, "train", 0)
    collectors = (registry, WaitingCollector(watch, member), late, StepCollector(loops))
    collected = (each.collect() for each in collectors)
    for family in itertools.chain.from_iterable(collected):
        if family.name.startswith("dist2_"):
            names = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            name = f"{family.name}_total" if family.type == "counter" else family.name
            shown.add((name, family.type, ", ".join(names)))
            samples |= {sample.name for sample in family.samples}
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(dist2_\w+)` \| (\w+) \|([\w, ]*) \|", text, re.MULTILINE)
    assert {
        (name, kind, ", ".join(sorted(labels.strip().split(", ")))) for name, kind, labels in rows
    } == shown
    queries = "".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
    asked = set(re.findall(r"\bdist2_\w+", queries))
    assert len(asked) > 3
    assert asked <= samples


def test_a_culprit_has_a_series_of_its_own_however_many_ranks_are_missing() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(0, 32), metrics)
    member = Member(metrics, FlightRecorder())
    watch = Watch(member, "http://127.0.0.1:9", 5.0)
    missing = tuple(Missing(rank, "", "", answers=True) for rank in range(1, 31))
    found = Waiting(("world", 1, False, -1), "world", "all_reduce", "", "", (0,), 6.0, missing)
    watch.waits, watch.culprits = (Wait(group.begin(), found.key, found),), frozenset({30})
    (family,) = WaitingCollector(watch, member).collect()
    culprits = {each.labels["missing_rank"]: each.labels["culprit"] for each in family.samples}
    assert len(culprits) == MAX_LABELLED + 1
    assert [rank for rank, is_culprit in culprits.items() if is_culprit == "true"] == ["30"]


def test_failures_are_counted_by_type_and_not_as_durations() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    group.run(error=OperationTimeoutError("rank 1 is missing", missing=[1]))
    group.run(error=OperationTimeoutError("rank 1 is missing", missing=[1]))
    group.run(error=GroupAbortedError("aborted"))
    seen = scrape(metrics)
    assert (
        seen.value("dist2_errors_total", error="OperationTimeoutError", op="all_reduce", group="world") == 2
    )
    assert seen.value("dist2_errors_total", error="GroupAbortedError") == 1
    assert seen.value("dist2_operations_total") == 3
    assert seen.value(f"{DURATIONS}_count") == 0
    assert seen.value("dist2_bytes_total") == 0
    newest = metrics.statuses.failures()[0]
    assert (newest.error, newest.message, newest.seq) == ("GroupAbortedError", "aborted", 3)


def test_operations_in_flight_and_their_age_are_shown_until_they_end() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    assert scrape(metrics).value("dist2_operations_in_flight", group="world") == 0
    first, second = group.begin(), group.begin()
    first.created_ns -= 3_000_000_000
    seen = scrape(metrics)
    assert seen.value("dist2_operations_in_flight", group="world", backend="socket") == 2
    assert 3 <= seen.value("dist2_oldest_operation_age_seconds") < 30
    assert metrics.in_flight() == [first, second]
    group.end(first)
    group.end(second, error=GroupAbortedError("aborted"))
    seen = scrape(metrics)
    assert seen.value("dist2_operations_in_flight") == 0
    assert seen.value("dist2_oldest_operation_age_seconds") == 0


def test_the_last_sequence_numbers_show_how_far_a_rank_is() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    for _ in range(4):
        group.run()
    group.begin()
    group.run(group.signature(OpKind.SEND, metas([2]), (), peer=1))
    seen = scrape(metrics)
    name = "dist2_last_sequence_number"
    assert seen.value(name, numbering="collective", state="begun", group="world") == 5
    assert seen.value(name, numbering="collective", state="ended", group="world") == 4
    assert seen.value(name, numbering="point_to_point", state="ended", group="world") == 1


def test_a_group_that_is_made_again_under_its_name_has_its_own_numbers() -> None:
    """A rank that has joined anew was never in the one before; another rank of the process still is."""
    metrics = Metrics()
    before = FakeGroup(info_of(0, name="dp"), metrics)
    for _ in range(500):
        before.run()
    before.close()
    other = FakeGroup(info_of(1, name="dp"), metrics)
    other.run()
    other.run()
    FakeGroup(info_of(0, uid="again", name="dp"), metrics).run()
    seen = scrape(metrics)
    for state in ("begun", "ended"):
        numbers = [
            seen.value("dist2_last_sequence_number", group="dp", rank=rank, state=state)
            for rank in ("0", "1")
        ]
        assert numbers == [1, 2]


def test_a_group_is_described_while_it_is_open() -> None:
    metrics = Metrics()
    group = FakeGroup(
        info_of(1, uid="9f3a/split(4,6)#0", name="tp", desc="tensor parallel", global_ranks=[4, 6]), metrics
    )
    seen = scrape(metrics)
    labels = {
        "group": "tp",
        "uid": "9f3a/split(4,6)#0",
        "desc": "tensor parallel",
        "rank": "6",
        "group_rank": "1",
        "world_size": "2",
    }
    assert seen.value("dist2_group_info", **labels) == 1
    group.close()
    group.close()
    assert scrape(metrics).value("dist2_group_info") == 0
    assert [status.state for status in metrics.statuses.groups()] == ["closed"]


@given(st.lists(st.integers(min_value=0, max_value=1 << 62), max_size=30))
def test_histograms_hold_their_invariants(durations_ns: list[int]) -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    signature = group.signature()
    for took_ns in durations_ns:
        group.run(signature, took_ns=took_ns)
    seen = scrape(metrics)
    buckets = seen.buckets(DURATIONS, op="all_reduce")
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)
    assert (counts[-1] if counts else 0) == len(durations_ns)
    assert seen.value(f"{DURATIONS}_sum") == pytest.approx(sum(durations_ns) / 1e9)
    for bound, count in buckets:
        if math.isfinite(bound):  # bounds are whole nanoseconds, and inclusive
            assert count == sum(took_ns <= round(bound * 1e9) for took_ns in durations_ns)
    if durations_ns:
        longest = seen.value("dist2_slowest_operation_seconds")
        assert longest == pytest.approx(max(durations_ns) / 1e9, abs=1.1e-9)


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_makes_labels_that_can_be_read_back(uid: str, desc: str) -> None:
    metrics = Metrics()
    FakeGroup(info_of(uid=uid, desc=desc, backend=desc), metrics).run()
    seen = scrape(metrics)
    (sample,) = seen.samples("dist2_group_info")
    assert sample.labels["group"] == label_text(uid)
    assert sample.labels["desc"] == label_text(desc)
    assert seen.value("dist2_operations_total", group=label_text(uid), backend=label_text(desc)) == 1


@given(st.text(max_size=300))
def test_labels_are_short_printable_and_unchanged_where_they_can_be(text: str) -> None:
    label = label_text(text)
    assert len(label) <= MAX_LABEL_CHARS
    assert label.isprintable()
    if text.isprintable() and len(text) <= MAX_LABEL_CHARS:
        assert label == text


@pytest.mark.parametrize("pair", [("a\nb", "a\rb"), ("x" * 500, "x" * 501), ("\ud800", "\udc00")])
def test_different_text_has_different_labels(pair: tuple[str, str]) -> None:
    assert label_text(pair[0]) != label_text(pair[1])


def test_a_hostile_error_type_cannot_break_a_scrape() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    for number in range(100):
        group.run(error=type(f'Bad"}} \n{number}', (Exception,), {})("\ud800" * 9999))
    seen = scrape(metrics)
    assert seen.value("dist2_errors_total") == 100
    names = seen.label_values("dist2_errors_total", "error")
    assert len(names) == module.MAX_ERROR_TYPES + 1
    assert OTHER in names


def test_sizes_fall_into_few_buckets_whose_labels_sort_as_numbers() -> None:
    buckets = [size_bucket(n) for n in (0, 1, 64, 65, 1 << 30, (1 << 30) + 1)]
    assert buckets == [0, 64, 64, 1 << 10, 1 << 30, LARGER]
    labels = [size_label(bound) for bound in (*module.SIZES, LARGER)]
    assert labels[0] == "0"
    assert labels[-1] == "+Inf"
    assert labels == sorted(labels, key=float)
    words = [size_in_words(bound) for bound in (0, 64, 16 << 10, 4 << 20, 1 << 30, LARGER)]
    assert words == ["<=0B", "<=64B", "<=16KiB", "<=4MiB", "<=1GiB", ">1GiB"]


def test_ranks_that_share_a_process_are_told_apart() -> None:
    metrics = Metrics()
    for rank, runs in ((4, 1), (6, 2)):
        info = info_of([4, 6].index(rank), name="tp", global_ranks=[4, 6])
        group = FakeGroup(info, metrics)
        for _ in range(runs):
            group.run()
        group.run(error=GroupAbortedError("aborted"))
        group.begin()
    seen = scrape(metrics)
    for name, counts in (
        ("dist2_operations_total", (2, 3)),
        ("dist2_errors_total", (1, 1)),
        ("dist2_operations_in_flight", (1, 1)),
        ("dist2_group_info", (1, 1)),
    ):
        assert tuple(seen.value(name, rank=rank, group="tp") for rank in ("4", "6")) == counts, name
    sequence = {"numbering": "collective", "state": "begun"}
    assert seen.value("dist2_last_sequence_number", rank="6", **sequence) == 4


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "share"),
    [
        (OpKind.ALL_REDUCE, metas([256]), None, 2 * 3 / 4),
        (OpKind.ALL_GATHER_SINGLE, metas([64]), metas([256]), 3 / 4),
        (OpKind.REDUCE_SCATTER_SINGLE, metas([256]), metas([64]), 3 / 4),
        (OpKind.ALL_TO_ALL_SINGLE, metas([256]), metas([256]), 3 / 4),
        (OpKind.BROADCAST, metas([256]), None, 1),
        (OpKind.BARRIER, (), (), 0),
    ],
    ids=lambda value: value.value if isinstance(value, OpKind) else "",
)
def test_bus_bytes_are_those_of_nccl_tests(
    op: OpKind, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...] | None, share: float
) -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(world_size=4), metrics)
    group.run(group.signature(op, inputs, outputs))
    seen = scrape(metrics)
    assert seen.value("dist2_bytes_total") == (0 if op is OpKind.BARRIER else 1024)
    assert seen.value("dist2_bus_bytes_total") == pytest.approx(share * 1024)


def test_the_slowest_operation_is_forgotten_after_some_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_000_000_000_000
    monkeypatch.setattr(module, "monotonic_ns", lambda: now_ns)
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    group.run(took_ns=9_000_000_000)
    for minute in range(module.WINDOWS):
        assert scrape(metrics).value("dist2_slowest_operation_seconds") == pytest.approx(9), minute
        now_ns += module.WINDOW_NS
        group.run(took_ns=2_000_000_000)
    scrape(metrics)
    assert scrape(metrics).value("dist2_slowest_operation_seconds") == pytest.approx(2)
    assert scrape(metrics).value(f"{DURATIONS}_count") == 1 + module.WINDOWS


def test_waiting_counts_while_a_group_is_open_and_after() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    group.waited_ns = lambda: 3_000_000_000  # type: ignore[attr-defined]  # as real groups have it
    assert metrics.waited([group]) == {("world", "socket", 0): 3_000_000_000}  # type: ignore[list-item]
    group.close()
    assert scrape(metrics).value("dist2_peer_wait_seconds_total", group="world", rank="0") == 3


def test_a_thousand_groups_make_a_bounded_number_of_series_and_lose_no_count() -> None:
    metrics = Metrics()
    world = FakeGroup(info_of(), metrics)
    world.run()
    for number in range(1000):
        group = FakeGroup(info_of(uid=f"world/split#{number}"), metrics)
        group.run(error=MismatchError("no") if number % 10 == 0 else None)
        group.close()
    seen = scrape(metrics)
    assert len(seen.label_values("dist2_operations_total", "group")) <= module.MAX_GROUPS + 1
    assert seen.value("dist2_operations_total") == 1001
    assert seen.value("dist2_errors_total") == 100
    assert seen.value("dist2_operations_total", group="world") == 1
    assert seen.value("dist2_operations_total", group="world/split#999") == 1  # the newest keep their own
    assert seen.value("dist2_operations_total", group=OTHER) > 900
    # Open groups beyond the limit are counted together, too.
    still_open = [FakeGroup(info_of(uid=f"open#{number}"), metrics) for number in range(100)]
    for group in still_open:
        group.run()
    seen = scrape(metrics)
    assert seen.value("dist2_operations_total") == 1101
    assert len(seen.label_values("dist2_operations_total", "group")) <= module.MAX_GROUPS + 1


def test_the_group_that_was_closed_longest_ago_makes_room() -> None:
    metrics = Metrics()
    groups = [FakeGroup(info_of(uid=f"group#{number}"), metrics) for number in range(module.MAX_GROUPS)]
    for group in groups:
        group.run()
    for number in (7, 5, 9):
        groups[number].close()
    FakeGroup(groups[5].info, metrics)  # a group of that name is open again
    for number in range(2):
        FakeGroup(info_of(uid=f"new#{number}"), metrics).run()
    seen = set(scrape(metrics).label_values("dist2_operations_total", "group"))
    gone = {f"group#{number}" for number in range(module.MAX_GROUPS)} - seen
    assert gone == {"group#7", "group#9"}
    assert {"new#0", "new#1", OTHER} <= seen
    FakeGroup(info_of(uid="new#2"), metrics).run()  # all others are open
    assert "new#2" not in scrape(metrics).label_values("dist2_operations_total", "group")


def test_a_name_that_several_groups_have_is_kept_until_the_last_is_closed() -> None:
    metrics = Metrics()
    ranks = [FakeGroup(info_of(rank=rank, world_size=2, uid="shared"), metrics) for rank in range(2)]
    others = [FakeGroup(info_of(uid=f"group#{number}"), metrics) for number in range(module.MAX_GROUPS - 1)]
    for group in [*ranks, *others]:
        group.run()
    ranks[0].close()
    FakeGroup(info_of(uid="early"), metrics).run()
    assert "shared" in scrape(metrics).label_values("dist2_operations_total", "group")
    ranks[1].close()
    FakeGroup(info_of(uid="late"), metrics).run()
    seen = scrape(metrics).label_values("dist2_operations_total", "group")
    assert "shared" not in seen
    assert "early" not in seen
    assert "late" in seen


def test_ever_changing_shapes_do_not_fill_the_memory() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    count = module.MAX_SIGNATURES + 50
    forgotten = weakref.ref(group.run().signature)
    for numel in range(1, count):
        group.run(group.signature(inputs=metas([numel % 16])))
    gc.collect()
    assert forgotten() is None
    assert scrape(metrics).value("dist2_operations_total") == count


def test_a_closed_group_is_not_kept_alive_by_its_operations() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    kept = weakref.ref(group.run().signature)
    group.close()
    gc.collect()
    assert kept() is None


def test_counting_from_many_threads_loses_nothing() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        count_from_many_threads()
    finally:
        sys.setswitchinterval(before)


def count_from_many_threads() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    signature = group.signature()
    each, workers = 4000, 4
    started = threading.Barrier(workers + 1)

    def work() -> None:
        started.wait()
        for _ in range(each):
            group.run(signature)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    started.wait()
    while any(thread.is_alive() for thread in threads):
        seen = metrics.series()
        assert len(seen) <= 1
        assert all(series.succeeded <= each * workers for series in seen)
    for thread in threads:
        thread.join()
    (series,) = metrics.series()
    assert series.succeeded == each * workers
    assert series.nbytes == each * workers * 8
    assert metrics.in_flight() == []


class _Raising:
    """An instrument that raises at one event."""

    def __init__(self, event: str) -> None:
        self.event = event

    def _tell(self, event: str) -> None:
        if event == self.event:
            raise ZeroDivisionError(event)

    def group_opened(self, group: object) -> None:
        self._tell("group_opened")

    def group_closed(self, group: object) -> None:
        self._tell("group_closed")

    def operation_started(self, operation: object) -> None:
        self._tell("operation_started")

    def operation_finished(self, operation: object) -> None:
        self._tell("operation_finished")


@pytest.mark.parametrize("event", ["group_opened", "group_closed", "operation_started", "operation_finished"])
def test_an_instrument_that_raises_is_dropped_and_the_others_go_on(event: str) -> None:
    raising, metrics = _Raising(event), Metrics()
    group = FakeGroup(info_of(), raising, metrics)
    group.run()
    group.close()
    group.run()
    assert group.dispatch.instruments == (metrics,)
    assert scrape(metrics).value("dist2_operations_total") == 2


def test_an_instrument_may_be_removed_again() -> None:
    dispatch, metrics = Dispatch(), Metrics()
    remove = dispatch.add(metrics)
    assert dispatch.operation_finished == (metrics.operation_finished,)
    remove()
    assert not dispatch.operation_finished
