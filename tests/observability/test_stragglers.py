"""Stragglers: late ranks are named soon, and noise names none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from time import monotonic_ns, time_ns

import pytest
import torch
from support.captured_logs import logged
from support.fake_groups import FakeGroup, info_of
from support.programs import ROOT

from dist2.operation.kinds import OpKind
from observability.clocks import ClockOffset, Offset, clock_id
from observability.entries import Entries, document_of, entries_of
from observability.flight_recorder import FlightRecorder
from observability.job.answer import Answer
from observability.optimizer_steps import optimizer_steps
from observability.straggler_watch import StragglerCollector, StragglerWatch
from observability.stragglers import (
    ALPHA,
    BLOCK_NS,
    BLOCK_OPERATIONS,
    BLOCKS,
    SCALES,
    Ledger,
    Straggler,
    chance,
)

LATE_S = 0.05

Delay = Callable[[int, int], float]
"""By how much a rank arrives late at an operation, in seconds, from (rank, sequence number)."""


def no_noise(rank: int, seq: int) -> float:
    return 0.0


def noise(seed: int) -> Delay:
    """Return that of a busy machine: 2 ms on average, and every 30th time 20 ms more."""
    dice = random.Random(seed)
    return lambda rank, seq: dice.expovariate(500) + (0.02 if dice.random() < 1 / 30 else 0)


class Job:
    """Ranks that call one operation after the other, in simulated time.

    With a root, a broadcast precedes each operation, so that the root arrives there before the other ranks.
    """

    def __init__(
        self,
        ranks: int,
        delay: Delay = no_noise,
        period_s: float = 0.01,
        stride: int = 1,
        root: int | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.seq = 0
        self.stride = stride
        self._ranks = ranks
        self._delay = delay
        self._period_s = period_s
        self._root = root
        self._now_s = 1.0

    def run(self, operations: int, late: Mapping[int, float], told: int = 10) -> list[Straggler]:
        """Let some ranks be late; return the stragglers found when it is over."""
        found: list[Straggler] = []
        for _ in range(operations // told):
            called: list[list[tuple[int, int]]] = [[] for _ in range(self._ranks)]
            roots: list[tuple[int, int]] = []
            for _ in range(told):
                self.seq += 1
                times = [
                    self._now_s + self._period_s + self._delay(rank, self.seq) + late.get(rank, 0)
                    for rank in range(self._ranks)
                ]
                if self._root is not None:
                    roots.append((self.seq, self._root))
                    self._note(times, called)
                    self.seq += 1
                    times = [max(at_s, times[self._root]) + 20e-6 for at_s in times]
                self._note(times, called)
                self._now_s = max(times)
            for rank, pairs in enumerate(called):
                entries = Entries(
                    "w", "world", tuple(range(self._ranks)), tuple(pairs), self.stride, roots=tuple(roots)
                )
                self.ledger.take(rank, [entries])
            found = self.ledger.close()
        return found

    def _note(self, times: list[float], called: list[list[tuple[int, int]]]) -> None:
        for rank, at_s in enumerate(times):
            if self.seq % self.stride == 0:
                called[rank].append((self.seq, int(at_s * 1e9)))


@pytest.mark.parametrize("late", [{2: LATE_S}, {1: LATE_S, 3: LATE_S}, {}], ids=["one", "two", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_come_late_are_named_within_a_hundred_operations(
    late: dict[int, float], seed: int
) -> None:
    job = Job(4, noise(seed))
    assert job.run(500, {}) == []
    found = job.run(100, late)
    assert {each.rank for each in found} == set(late)
    for each in found:
        assert each.late_s == pytest.approx(LATE_S, rel=0.2)
        assert each.share > 0.5
        assert each.probability < ALPHA
        assert f"rank {each.rank} arrives" in each.sentence()
    assert job.ledger.late_s.keys() == set(late)
    for late_s in job.ledger.late_s.values():
        assert late_s == pytest.approx(100 * LATE_S, rel=0.3)
    if late:
        assert [row["rank"] for row in job.ledger.ranking()][: len(late)] == [each.rank for each in found]


MESH = {"tp-0": (0, 1), "tp-1": (2, 3), "dp-0": (0, 2), "dp-1": (1, 3)}
"""Groups of a job with tensor and data parallelism."""


def reports_of_mesh(steps: int, of_tensors: int, slow: Mapping[int, float]) -> dict[int, list[Entries]]:
    """Return the entries of ranks whose steps take 100 ms, and more on slow ones."""
    dice = random.Random(0)
    now_s = dict.fromkeys(range(4), 1.0)
    called: dict[tuple[str, int], list[tuple[int, int]]] = {
        (group, rank): [] for group, ranks in MESH.items() for rank in ranks
    }

    def call(*groups: str) -> None:
        for group in groups:
            for rank in MESH[group]:
                pairs = called[group, rank]
                pairs.append((len(pairs) + 1, int(now_s[rank] * 1e9)))
            end_s = max(now_s[rank] for rank in MESH[group]) + 1e-4
            now_s.update(dict.fromkeys(MESH[group], end_s))

    for _ in range(steps):
        for _ in range(of_tensors):
            for rank in now_s:
                now_s[rank] += (dice.gauss(0.1, 0.001) + slow.get(rank, 0.0)) / of_tensors
            call("tp-0", "tp-1")
        call("dp-0", "dp-1")
    return {
        rank: [
            Entries(group, group, ranks, tuple(called[group, rank]))
            for group, ranks in MESH.items()
            if rank in ranks
        ]
        for rank in now_s
    }


@pytest.mark.parametrize("of_tensors", [1, 4])
@pytest.mark.parametrize("slow", [{1: 0.05}, {1: 0.05, 2: 0.05}, {}], ids=["one", "two", "none"])
def test_a_rank_that_waited_in_another_group_is_no_straggler(of_tensors: int, slow: dict[int, float]) -> None:
    ledger = Ledger()
    for rank, entries in reports_of_mesh(400, of_tensors, slow).items():
        ledger.take(rank, entries)
    found = ledger.close()
    assert {each.rank for each in found} == set(slow)
    assert ledger.late_s.keys() == set(slow)
    for late_s in ledger.late_s.values():
        assert late_s < 400 * 0.055, "what is late in two groups costs once"


def test_a_straggler_of_a_smaller_group_is_no_victim_of_one_in_a_group_that_all_are_in() -> None:
    ledger = Ledger()
    for rank in range(4):
        world = tuple((seq, seq * 10**8 + (rank == 3) * 5 * 10**7) for seq in range(1, 400))
        pair = tuple((seq, seq * 10**8 + 10**7 + (rank == 1) * 2 * 10**7) for seq in range(1, 400))
        entries = [Entries("world", "world", (0, 1, 2, 3), world), Entries("pair", "pair", (0, 1), pair)]
        ledger.take(rank, entries[: 1 + (rank < 2)])
    assert [(each.rank, each.group) for each in ledger.close()] == [(3, "world"), (1, "pair")]


def looked_at_pairs(ledger: Ledger, pairs: int, looks: int) -> list[Straggler]:
    """Return the stragglers of a job of pairs and a group of all, in which rank 3 is 20 ms late."""
    found: list[Straggler] = []
    for look in range(looks):
        for rank in range(2 * pairs):
            late_ns = 20_000_000 * (rank == 3)
            numbers = range(100 * look + 1, 100 * look + 101)
            called = tuple((seq, seq * 50_000_000 + late_ns) for seq in numbers)
            pair = (rank // 2 * 2, rank // 2 * 2 + 1)
            groups = {f"pair {rank // 2}": pair, "world": tuple(range(2 * pairs))}
            ledger.take(rank, [Entries(name, name, ranks, called) for name, ranks in groups.items()])
        found = ledger.close()
    return found


def test_a_straggler_of_a_job_of_many_groups_is_found() -> None:
    ledger = Ledger()
    found = looked_at_pairs(ledger, pairs=70, looks=2)
    assert {(each.rank, each.group) for each in found} == {(3, "pair 1"), (3, "world")}
    assert ledger.left_out == 0


def test_of_too_many_groups_the_largest_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.stragglers.MAX_GROUPS", 3)
    ledger = Ledger()
    found = looked_at_pairs(ledger, pairs=5, looks=3)
    assert {(each.rank, each.group) for each in found} == {(3, "pair 1"), (3, "world")}
    assert {row["group"] for row in ledger.ranking()} == {"world", "pair 0", "pair 1"}
    assert ledger.left_out == 3


def judged(job: Job) -> list[bool]:
    """Return which ranks are judged, in their order."""
    return [row["judged"] for row in sorted(job.ledger.ranking(), key=lambda row: row["rank"])]


def test_a_late_rank_is_not_cleared_before_it_can_be_named() -> None:
    job = Job(4, lambda rank, seq: 0.0)
    assert job.run(60, {2: LATE_S}) == []
    assert job.ledger.ranking()[0]["share"] > 0.5
    assert judged(job) == [False] * 4
    assert [each.rank for each in job.run(60, {2: LATE_S})] == [2]
    assert judged(job) == [True] * 4


def test_a_rank_that_is_late_now_and_then_is_not_cleared_before_it_can_be_named() -> None:
    job = Job(4, lambda rank, seq: 0.5 if rank == 2 and seq % 100 == 0 else 0.0)
    assert job.run(100 * 12, {}) == []  # of 24 blocks, too few are late
    assert judged(job) == [True, True, False, True]
    assert [each.rank for each in job.run(100 * 60, {})] == [2]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_names_nobody(ranks: int) -> None:
    job = Job(ranks, noise(ranks))
    for _ in range(100):
        assert job.run(50, {}, told=50) == []
    assert job.ledger.late_s == {}


@pytest.mark.parametrize("operations", [100, 400])
def test_noise_that_lasts_makes_no_stragglers_of_both_ranks_of_a_pair(operations: int) -> None:
    """Another program uses the core of one rank for a while, then that of the other."""
    dice = random.Random(operations)

    def delay(rank: int, seq: int) -> float:
        return dice.expovariate(100) if seq // operations % 2 == rank else 0.0

    job, named = Job(2, delay), set[int]()
    for _ in range(200):
        named |= {each.rank for each in job.run(50, {}, told=50)}
    assert len(named) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_equal_noise_before_a_broadcast_names_neither_rank_of_a_pair(seed: int) -> None:
    """The root arrives first at the operation after it, but makes the other wait in the broadcast."""
    dice = random.Random(seed)
    job = Job(2, lambda rank, seq: dice.uniform(0, 0.02), root=0)
    for _ in range(30):
        assert job.run(50, {}, told=50) == []


@pytest.mark.parametrize("late", range(4))
def test_a_late_rank_is_named_in_a_loop_with_a_broadcast(late: int) -> None:
    job = Job(4, noise(7), root=1)
    assert job.run(300, {}) == []
    (found,) = job.run(100, {late: LATE_S})
    assert found.rank == late


def test_a_straggler_is_named_by_its_rank_in_the_job_and_in_the_group() -> None:
    ledger = Ledger()
    for seq in range(1, 100):
        for rank in (3, 2, 1):
            at_ns = seq * 100_000_000 + (50_000_000 if rank == 3 else 0)
            ledger.take(rank, [Entries("t", "tp", (3, 2, 1), ((seq, at_ns),))], process=f"host a, pid {rank}")
    (found,) = ledger.close()
    assert found.sentence().startswith(
        "rank 3 (rank 0 of tp, host a, pid 3) arrives 50 ms late at collectives of group tp"
    )


def test_the_documented_sentence() -> None:
    late = Straggler(2, "training", 0.0501, 0.83, 75, 4.5, 1e-9, "rank 2")
    assert f"```\n{late.sentence()}\n```" in (ROOT / "docs" / "metrics.md").read_text()


def test_the_late_rank_of_a_pair_is_named() -> None:
    job = Job(2, noise(5))
    assert job.run(500, {}) == []
    assert {each.rank for each in job.run(200, {1: LATE_S})} == {1}


def test_a_rank_that_stalls_now_and_then_is_named_as_well() -> None:
    job = Job(4, lambda rank, seq: 0.5 if rank == 1 and seq % 40 == 0 else 0)
    assert {each.rank for each in job.run(6000, {})} == {1}


def test_a_rank_that_recovers_is_named_no_more() -> None:
    job = Job(4, noise(1))
    assert job.run(100, {0: LATE_S})
    counted = job.ledger.late_s[0]
    assert job.run(2000, {}) == []
    assert job.ledger.late_s[0] == pytest.approx(counted, rel=0.5)


def test_little_lateness_is_not_worth_a_name() -> None:
    assert Job(4, period_s=1.0).run(300, {2: 0.01}) == []  # a hundredth of the time
    assert Job(4, period_s=1e-4).run(9000, {2: 1e-4}) == []  # half of it, but microseconds


def test_some_operations_stand_for_all_where_there_are_many() -> None:
    whole, part = Job(2, period_s=1e-3), Job(2, period_s=1e-3, stride=8)
    for job in (whole, part):
        assert {each.rank for each in job.run(4000, {1: 1e-3}, told=40)} == {1}
    assert part.ledger.late_s[1] == pytest.approx(whole.ledger.late_s[1], rel=0.1)


def test_what_the_clock_may_be_wrong_by_is_no_lateness() -> None:
    for error_ns, named in ((1_000_000, {1}), (60_000_000, set())):
        ledger = Ledger()
        for seq in range(1, 400):
            at_ns = seq * 60_000_000
            for rank, offset in ((0, Offset()), (1, Offset(-(10**15), error_ns))):
                called = ((seq, at_ns + (50_000_000 + 10**15 if rank else 0)),)
                ledger.take(rank, [Entries("w", "world", (0, 1), called)], offset)
        assert {each.rank for each in ledger.close()} == named


def test_a_rank_is_named_as_soon_as_chance_does_not_explain_its_late_blocks() -> None:
    job = Job(4)
    assert job.run(1 + BLOCKS * BLOCK_NS // 10_000_000, {}, told=1) == []
    expected = [4 * len(SCALES) * chance(late, late, 4, BLOCKS) < ALPHA for late in range(1, BLOCKS)]
    assert [bool(job.run(BLOCK_OPERATIONS, {1: LATE_S}, told=1)) for _ in expected] == expected
    assert expected.index(True) > 5


def test_the_chance_is_that_of_dealing_at_random() -> None:
    dice = random.Random(1)
    cells = [True] * 6 + [False] * 6  # 3 ranks of 4 blocks
    hits = 0
    for _ in range(20_000):
        dice.shuffle(cells)
        hits += sum(cells[:4]) >= 3
    assert chance(3, 6, 3, 4) == pytest.approx(hits / 20_000, abs=0.02)
    assert chance(0, 6, 3, 4) == 1


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("buckets", [1, 10])
def test_buckets_of_a_backward_pass_are_one_occasion(buckets: int, stride: int) -> None:
    """A rank that delays each step of 100 ms by 15 ms costs 15 %, however many buckets there are."""
    ledger, seq, now_s = Ledger(), 0, 1.0
    for step in range(400):
        called: list[list[tuple[int, int]]] = [[], []]
        joint: list[tuple[int, int]] = []
        for bucket in range(buckets):
            seq += 1
            if seq % stride == 0:
                joint.append((seq, step))
                for rank, late_s in enumerate((0.0, 0.015)):
                    called[rank].append((seq, int((now_s + 0.085 * bucket / buckets + late_s) * 1e9)))
        for rank in (0, 1):
            entries = Entries("w", "world", (0, 1), tuple(called[rank]), stride, joint=tuple(joint))
            ledger.take(rank, [entries])
        now_s += 0.1
    (found,) = ledger.close()
    assert found.rank == 1
    assert found.share == pytest.approx(0.15, rel=0.05)
    assert found.late_s == pytest.approx(0.015, rel=0.05)
    assert found.operations == pytest.approx(found.span_s / 0.1, rel=0.05)


# Entries: times of calls from the recorder


def test_entries_tell_when_a_rank_called_what_all_wait_for() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(1, 2), recorder)
    first = group.run()
    second = group.run(group.signature(OpKind.BROADCAST, root=0))
    group.run(group.signature(OpKind.REDUCE, root=0))
    (entries,), newest_ns = entries_of(recorder, 1)
    assert entries.group == "world"
    assert (entries.uid, entries.ranks) == ("world", (0, 1))
    assert entries.called_ns == ((1, first.created_ns), (2, second.created_ns))
    assert entries.roots == ((2, 0),)
    assert newest_ns > first.created_ns
    assert entries_of(recorder, 0)[0] == []
    (nothing_new,), _ = entries_of(recorder, 1, newest_ns)
    assert nothing_new.called_ns == ()
    assert Entries.of(json.loads(json.dumps(entries.document()))) == entries


def test_entries_tell_which_operations_are_waited_for_together() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(0, 2), recorder)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    optimizer_steps.watch()
    try:
        optimizer.step()
        by_reducer = group.begin()
        by_reducer.is_async, by_reducer.code = True, compile("loss.backward()", "train.py", "exec")
        group.run()  # one that is waited for at once
        optimizer.step()
        last = group.begin()
        last.is_async, last.code = True, by_reducer.code
    finally:
        optimizer_steps.ignore()
    (entries,), _ = entries_of(recorder, 0)
    (first, step), (second, later) = sorted(entries.joint)
    assert (first, second, later - step) == (by_reducer.seq, last.seq, 1)
    assert Entries.of(json.loads(json.dumps(entries.document()))) == entries
    of_another_line = group.begin()
    of_another_line.is_async = True
    (entries,), _ = entries_of(recorder, 0)
    assert entries.joint == ()


def test_a_group_that_was_closed_has_no_stragglers_any_more() -> None:
    planes = FakePlanes(2)
    watch = StragglerWatch(planes.ask, lambda: range(2))
    planes.run(100, {1: LATE_S})
    assert [each.rank for each in watch.look()] == [1]
    assert [each.rank for each in watch.look()] == [1]  # nothing is new
    for group in planes.groups:
        group.close()
    assert watch.look() == ()
    assert watch.late_s()[1] == pytest.approx(BLOCKS * BLOCK_OPERATIONS * LATE_S, rel=0.1)


def test_a_recorder_that_has_forgotten_some_says_so() -> None:
    recorder = FlightRecorder(capacity=4)
    group = FakeGroup(info_of(), recorder)
    last = group.run()
    for _ in range(3):
        group.run()
    (entries,), _ = entries_of(recorder, 0, last.created_ns)
    assert not entries.torn
    for _ in range(4):
        group.run()
    (entries,), _ = entries_of(recorder, 0, last.created_ns)
    assert entries.torn


def test_of_many_operations_few_are_told() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(), recorder)
    for _ in range(1500):
        group.run()
    (entries,), _ = entries_of(recorder, 0)
    assert entries.stride == 4
    assert [seq for seq, _ in entries.called_ns] == list(range(4, 1501, 4))


# Clocks


def test_the_offset_of_another_clock_is_within_its_error() -> None:
    dice, clock = random.Random(3), ClockOffset()
    assert clock.at(0) is None
    true_ns = 123_456_789_000
    for sent_ns in range(0, 10_000_000_000, 1_000_000_000):
        there, back = dice.randrange(50_000, 900_000), dice.randrange(50_000, 900_000)
        clock.add(sent_ns, sent_ns + there - true_ns, sent_ns + there + back, "another host")
        known = clock.at(sent_ns + there + back)
        assert known is not None
        assert abs(known.offset_ns - true_ns) <= known.error_ns
    later = clock.at(10_000_000_000 + 3600 * 10**9)
    assert known is not None
    assert later is not None
    assert later.error_ns > known.error_ns + 100_000_000  # they drift


def test_processes_of_one_kernel_read_one_clock() -> None:
    clock = ClockOffset()
    clock.add(0, 10**15, 10**9, clock_id())
    assert clock.at(10**9) == Offset(0, 0)


# The watch


class FakePlanes:
    """Recorders of ranks whose operations are put in by hand, asked as control planes are."""

    def __init__(self, ranks: int) -> None:
        self.recorders = [FlightRecorder() for _ in range(ranks)]
        self.groups = [
            FakeGroup(info_of(rank, ranks), recorder) for rank, recorder in enumerate(self.recorders)
        ]
        self.dead: set[int] = set()
        self._now_ns = monotonic_ns()

    def ask(self, after_ns: Mapping[int, int], most: int) -> dict[int, Answer]:
        return {rank: self._answer(rank, at_ns, most) for rank, at_ns in after_ns.items()}

    def _answer(self, rank: int, after_ns: int, most: int) -> Answer:
        if rank in self.dead:
            return Answer(silence="nobody listens")
        entries = document_of(self.recorders[rank], rank, after_ns, most)
        return Answer(state={"entries": entries, "epoch_ns": time_ns()})

    def run(self, operations: int, late: Mapping[int, float]) -> None:
        for _ in range(operations):
            self._now_ns += 10_000_000
            times = [self._now_ns + int(late.get(rank, 0) * 1e9) for rank in range(len(self.groups))]
            for group, at_ns in zip(self.groups, times, strict=True):
                operation = group.begin()
                operation.created_ns = operation.started_ns = at_ns
                group.end(operation, took_ns=max(times) - at_ns)
            self._now_ns = max(times)


def test_the_watch_names_counts_and_logs_stragglers() -> None:
    planes = FakePlanes(4)
    watch = StragglerWatch(planes.ask, lambda: range(4))
    with logged() as lines:
        planes.run(200, {})
        assert watch.look() == ()
        for _ in range(2):
            planes.run(50, {2: LATE_S})
            found = watch.look()
        planes.run(20, {2: LATE_S})
        watch.look()
    assert [each.rank for each in found] == [2]
    (line,) = [each for each in lines if each["name"] == "dist2.stragglers"]
    assert line["event"].startswith("rank 2 arrives ")
    assert (line["rank"], line["group"]) == (2, "world")
    document = watch.document()
    assert json.loads(json.dumps(document))["stragglers"][0]["rank"] == 2
    assert document["ranking"][0]["rank"] == 2
    assert document["clocks"]["3"] == {"offset_s": 0, "error_s": 0}
    (family,) = StragglerCollector(watch).collect()
    (sample,) = family.samples
    assert (sample.name, sample.labels) == ("dist2_straggler_seconds_total", {"rank": "2"})
    assert sample.value == pytest.approx(120 * LATE_S, rel=0.1)


def test_the_watch_goes_on_without_ranks_that_do_not_answer() -> None:
    planes = FakePlanes(3)
    watch = StragglerWatch(planes.ask, lambda: range(3))
    planes.dead.add(1)
    planes.run(100, {2: LATE_S})
    assert [each.rank for each in watch.look()] == [2]
    assert watch.silent == {1: "nobody listens"}
    planes.dead.clear()
    planes.run(10, {2: LATE_S})
    assert [each.rank for each in watch.look()] == [2]
    assert watch.silent == {}
    planes.dead |= {0, 1}
    planes.run(10, {})
    assert watch.look() == ()  # one rank alone is not late


def test_a_scrape_does_not_wait_for_ranks_that_are_asked() -> None:
    scraped: list[object] = []

    def ask(after_ns: Mapping[int, int], most: int) -> dict[int, Answer]:
        scraped.extend(StragglerCollector(watch).collect())  # as the server does that is asked
        scraped.append(watch.document())
        return {}

    watch = StragglerWatch(ask, lambda: [0])
    assert watch.look() == ()
    assert len(scraped) == 2
