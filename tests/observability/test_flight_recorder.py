"""The flight recorder: its records, and the findings of PyTorch's analyser in dumps of several ranks."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_groups import FakeGroup, info_of, metas
from support.torch_analyser import analyse, complaints

from dist2.errors import InvalidUsageError, PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.record import State
from dist2.operation.signature import Signature
from observability import flight_recorder
from observability.flight_recorder import FlightRecorder, dump_flight_recorder, encode, error_text
from observability.torch_format import dtype_name
from observability.tracing import write_trace

ANALYSER = Path(sys.executable).with_name("torchfrtrace")


class Job:
    """Ranks of a job, each with its own recorder, and the folder of their dumps."""

    def __init__(self, folder: Path, world_size: int, capacity: int = 4096) -> None:
        self.folder = folder
        self.world_size = world_size
        self.recorders = [FlightRecorder(capacity) for _ in range(world_size)]
        self.groups = [
            FakeGroup(info_of(rank, world_size), recorder) for rank, recorder in enumerate(self.recorders)
        ]

    def subgroup(self, members: list[int], uid: str) -> list[FakeGroup]:
        """Open a group of some ranks of the job."""
        return [
            FakeGroup(info_of(rank, uid=uid, global_ranks=members), self.recorders[member])
            for rank, member in enumerate(members)
        ]

    def dump(self, without: tuple[int, ...] = ()) -> None:
        """Dump every rank's recorder."""
        for rank, recorder in enumerate(self.recorders):
            if rank not in without:
                recorder.dump(self.folder / "flight_{rank}", rank=rank)

    def run_analyser(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the command over the folder, as a person would."""
        command = [str(ANALYSER), str(self.folder), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    def verdict(self) -> tuple[list[Any], str]:
        """Dump; return the analyser's table of collectives and its log, in this process."""
        self.dump()
        return analyse(self.folder)


NewJob = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path) -> NewJob:
    """Make a job with a folder of its own."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    return lambda *args, **kwargs: Job(folder, *args, **kwargs)


def every_operation(group: FakeGroup) -> None:
    """Call each collective once, rightly, with sizes that differ by rank where they may."""
    world_size, rank = group.info.world_size, group.info.rank
    each = metas(*[[4, 3]] * world_size)
    uneven = metas(*[[peer + 1] for peer in range(world_size)])
    mine = metas([rank + 1])
    at_root = rank == 1
    calls = [
        (OpKind.ALL_REDUCE, metas([4, 3]), metas([4, 3])),
        (OpKind.ALL_REDUCE, metas([]), metas([])),
        (OpKind.ALL_REDUCE_COALESCED, metas([4], [2, 2]), metas([4], [2, 2])),
        (OpKind.BROADCAST, metas([4, 3]), metas([4, 3])),
        (OpKind.REDUCE, metas([4, 3]), metas([4, 3]) if at_root else ()),
        (OpKind.ALL_GATHER, metas([4, 3]), each),
        (OpKind.ALL_GATHER_SINGLE, metas([4, 3]), metas([4 * world_size, 3])),
        (OpKind.ALL_GATHER_SINGLE_COALESCED, metas([4], [2]), metas([4 * world_size], [2 * world_size])),
        (OpKind.ALL_GATHER_V, mine, uneven),
        (OpKind.REDUCE_SCATTER, each, metas([4, 3])),
        (OpKind.REDUCE_SCATTER_SINGLE, metas([4 * world_size, 3]), metas([4, 3])),
        (OpKind.REDUCE_SCATTER_SINGLE_COALESCED, metas([4 * world_size]), metas([4])),
        (OpKind.REDUCE_SCATTER_V, uneven, mine),
        (OpKind.GATHER, metas([4, 3]), each if at_root else ()),
        (OpKind.SCATTER, each if at_root else (), metas([4, 3])),
        (OpKind.ALL_TO_ALL, metas(*[[rank + 1]] * world_size), uneven),
        (OpKind.ALL_TO_ALL_SINGLE, metas([world_size * (rank + 1)]), metas([sum(range(1, world_size + 1))])),
        (OpKind.BARRIER, (), ()),
    ]
    for kind, inputs, outputs in calls:
        group.run(group.signature(kind, inputs, outputs, root=1))
    assert {kind for kind, _, _ in calls} == {kind for kind in OpKind if not kind.is_p2p}


def test_the_analyser_finds_nothing_wrong_with_every_operation_done_rightly(job: NewJob) -> None:
    ranks = job(3)
    for group in ranks.groups:
        every_operation(group)
    for group in ranks.subgroup([0, 2], "world/split(0,2)#0"):
        group.run()
    collectives, printed = ranks.verdict()
    assert complaints(printed) == []
    assert len(collectives) == 19
    assert all(each.pass_check for each in collectives)
    assert all(each.collective_state == "completed" for each in collectives)


@pytest.mark.parametrize(
    ("theirs", "error"),
    [
        ((OpKind.BROADCAST, metas([2])), "COLLECTIVE_TYPE_MISMATCH"),
        ((OpKind.ALL_REDUCE, metas([3])), "SIZE_OR_SYNTAX_MISMATCH"),
        ((OpKind.ALL_REDUCE, metas([2], dtype=torch.int64)), "COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_the_analyser_names_the_rank_that_called_something_else(job: NewJob, theirs: Any, error: str) -> None:
    ranks = job(3)
    for group in ranks.groups:
        group.run()
    for rank, group in enumerate(ranks.groups):
        group.begin(group.signature(*theirs) if rank == 1 else None)
    _, printed = ranks.verdict()
    assert complaints(printed) == ["Collective sequence number: 2 has errors"]
    found = re.findall(r"Culprit rank (\d+); Error type: (\w+)", printed)
    assert {each for _, each in found} == {error}
    # It holds the rank whose file it reads first for right; the order is the file system's.
    _, _, files = next(os.walk(ranks.folder))
    assert {rank for rank, _ in found} == ({"0", "2"} if files[0].endswith("1") else {"1"})


def test_the_analyser_names_the_rank_that_did_not_join(job: NewJob) -> None:
    ranks = job(3)
    for group in ranks.groups:
        group.run()
        group.run()
    for rank in (0, 2):
        ranks.groups[rank].begin(ranks.groups[rank].signature(OpKind.BARRIER, ()))
    collectives, printed = ranks.verdict()
    assert complaints(printed) == ["Not all ranks joining collective, sequence number: 3"]
    assert "missing ranks: {1}" in printed
    assert "collective: gloo:barrier" in printed
    assert "fake_groups.py" in printed  # the frame of the call
    assert [each.missing_ranks for each in collectives] == [None, None, {1}]


def test_the_analyser_names_the_rank_that_did_not_join_a_split_group(job: NewJob) -> None:
    ranks = job(4)
    for group in ranks.groups:
        group.run()
    even, odd = ranks.subgroup([0, 2], "world/split(0,2)#0"), ranks.subgroup([1, 3], "world/split(1,3)#0")
    for group in (*even, *odd):
        group.run()
    odd[0].begin(odd[0].signature(OpKind.BARRIER, ()))
    _, printed = ranks.verdict()
    assert complaints(printed) == ["Not all ranks joining collective, sequence number: 2"]
    assert "missing ranks: {3}" in printed
    assert "world/split(1,3)#0" in printed


def test_a_failed_operation_is_not_shown_as_completed(job: NewJob) -> None:
    ranks = job(2)
    ranks.groups[0].run(error=PeerLostError("rank 1 died", ranks=[1]))
    _, printed = ranks.verdict()
    assert "missing ranks: {1}" in printed
    assert "collective state: started" in printed


def test_the_command_reads_the_dumps_and_names_a_rank_without_one(job: NewJob) -> None:
    ranks = job(3)
    for group in ranks.groups:
        group.run()
    ranks.dump(without=(2,))
    ran = ranks.run_analyser()
    assert ran.returncode != 0
    assert "Missing dump files from ranks {2}" in ran.stderr
    ranks.dump()
    ran = ranks.run_analyser()
    assert (ran.returncode, complaints(ran.stderr)) == (0, []), ran.stderr
    for group in ranks.groups[:2]:
        group.begin()
    ranks.dump()
    ran = ranks.run_analyser()
    assert ran.returncode == 0, ran.stderr
    assert "Not all ranks joining collective, sequence number: 2" in ran.stderr
    assert "missing ranks: {2}" in ran.stderr


def message(group: FakeGroup, kind: OpKind, peer: int | None, *, tag: int = 0, numel: int = 4) -> Signature:
    """Return the signature of a send or receive."""
    tensor = metas([numel])
    inputs, outputs = (tensor, ()) if kind is OpKind.SEND else ((), tensor)
    return group.signature(kind, inputs, outputs, peer=peer, tag=tag)


def exchange(ranks: Job, source: int, destination: int, *, from_any: bool = False, **of_message: int) -> None:
    """Send a message of the widest group."""
    sender, receiver = ranks.groups[source], ranks.groups[destination]
    sender.run(message(sender, OpKind.SEND, destination, **of_message))
    peer = None if from_any else source
    receiver.run(message(receiver, OpKind.RECV, peer, **of_message), source=source)


def test_messages_among_three_ranks_are_matched_with_their_receives(job: NewJob) -> None:
    ranks = job(3)
    for step in range(3):
        exchange(ranks, 0, 1, numel=step + 1)
        exchange(ranks, 1, 0, numel=step + 5)  # crossing
        exchange(ranks, 2, 1, tag=3, from_any=True)
        exchange(ranks, 2, 2)  # to itself
        for group in ranks.groups:
            group.run()
    collectives, printed = ranks.verdict()
    assert complaints(printed) == []
    assert all(each.pass_check for each in collectives)


def test_messages_received_in_another_order_of_tags_are_matched(job: NewJob) -> None:
    ranks = job(2)
    sender, receiver = ranks.groups
    for tag, numel in ((1, 10), (2, 20)):
        sender.run(message(sender, OpKind.SEND, 1, tag=tag, numel=numel))
    for tag, numel in ((2, 20), (1, 10)):
        receiver.run(message(receiver, OpKind.RECV, 0, tag=tag, numel=numel), source=0)
    _, printed = ranks.verdict()
    assert complaints(printed) == []


def test_the_analyser_names_the_rank_that_did_not_send(job: NewJob) -> None:
    ranks = job(3)
    exchange(ranks, 0, 1)
    receiver = ranks.groups[1]
    receiver.begin(message(receiver, OpKind.RECV, 0))
    receiver.begin(message(receiver, OpKind.RECV, None))  # from any: cannot be matched, does no harm
    _, printed = ranks.verdict()
    assert complaints(printed) == ["Not all ranks joining collective, sequence number: 2"]
    assert "missing ranks: {0}" in printed


def test_rings_that_wrapped_at_different_points_are_aligned(job: NewJob) -> None:
    """Rank 0 sends ten times as many messages as rank 2, so its ring holds a shorter time."""
    ranks = job(3, capacity=64)
    for _ in range(40):
        for group in ranks.groups:
            group.run()
        for _ in range(5):
            exchange(ranks, 0, 1)
        for group in ranks.groups:
            group.run(group.signature(OpKind.BARRIER, ()))
    collectives, printed = ranks.verdict()
    assert complaints(printed) == []
    assert 10 < len(collectives) < 280  # the rest of 280 after aligning
    # And a rank that falls behind is still found.
    ranks.groups[0].begin()
    ranks.groups[1].begin()
    _, printed = ranks.verdict()
    assert complaints(printed) == ["Not all ranks joining collective, sequence number: 81"]
    assert "missing ranks: {2}" in printed


@pytest.mark.parametrize("ahead", [0, 3], ids=["in step", "one group ahead"])
def test_a_slow_group_is_analysed_though_a_busy_one_has_filled_the_ring(job: NewJob, ahead: int) -> None:
    """Pairs of ranks are busy; all ranks meet seldom, and then one does not come."""
    ranks = job(4, capacity=64)
    pairs = [*ranks.subgroup([0, 1], "pair 0"), *ranks.subgroup([2, 3], "pair 1")]
    for _ in range(3):
        for group in ranks.groups:
            group.run()
        exchange(ranks, 0, 1)
        for rank, pair in enumerate(pairs):
            for _ in range(100 + (ahead if rank < 2 else 0)):
                pair.run()
    _, printed = ranks.verdict()
    assert complaints(printed) == []
    for group in ranks.groups[:3]:
        group.begin()
    _, printed = ranks.verdict()
    assert complaints(printed) == ["Not all ranks joining collective, sequence number: 4"]
    assert "missing ranks: {3}" in printed


def test_a_ring_without_collectives_is_dumped_whole(job: NewJob) -> None:
    ranks = job(2, capacity=8)
    for _ in range(20):
        exchange(ranks, 0, 1)
    _, printed = ranks.verdict()
    assert complaints(printed) == []


def test_ranks_as_threads_of_one_process_are_told_apart(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    for rank in range(2):
        group = FakeGroup(info_of(rank), recorder)
        for _ in range(rank + 1):
            group.run()
    counts = [len(recorder.recording(rank).operations) for rank in range(2)]
    assert counts == [1, 2]
    assert recorder.dump(tmp_path / "f{rank}") == tmp_path / "f0"


def test_of_each_group_the_last_operations_are_kept() -> None:
    recorder = FlightRecorder(capacity=10)
    seldom, busy, other = (FakeGroup(info_of(uid=uid), recorder) for uid in ("seldom", "busy", "other"))
    for _ in range(flight_recorder.KEPT + 5):
        seldom.run()
    failed = seldom.run(error=PeerLostError("rank 1 died", ranks=[1]))
    for _ in range(5):
        other.run()
    for _ in range(100):
        busy.run()
    held = Counter(each.signature.group.uid for each in recorder.operations())
    kept = flight_recorder.KEPT
    assert held == {"seldom": kept, "other": 5, "busy": 10 + kept}
    last = [each for each in recorder.operations() if each.signature.group.uid == "seldom"][-1]
    assert (last.seq, error_text(last)) == (kept + 6, "PeerLostError: rank 1 died")
    assert len(recorder.recent()) == 10
    for _ in range(flight_recorder.CLOSED_GROUPS + 1):
        recorder.group_closed(seldom)  # type: ignore[arg-type]  # of a test
    gone = weakref.ref(last)
    del last, failed
    gc.collect()
    assert gone() is None
    recorder._ring.clear()
    assert recorder.operations() == []


def test_the_ring_is_bounded_and_keeps_the_newest() -> None:
    recorder = FlightRecorder(capacity=10)
    group = FakeGroup(info_of(), recorder)
    for _ in range(25):
        group.run()
    recording = recorder.recording()
    assert [operation.seq for operation in recorder.recent()] == list(range(16, 26))
    assert [operation.seq for operation in recording.operations] == list(range(1, 26))
    assert not recording.complete
    with pytest.raises(InvalidUsageError, match="capacity"):
        FlightRecorder(capacity=0)


def test_a_failed_operation_keeps_its_words_but_no_tensor() -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(), recorder)

    class Payload:
        pass

    def fail(payload: Payload) -> None:
        raise PeerLostError("rank 1 died", ranks=[1])

    def call() -> weakref.ref[Payload]:
        payload = Payload()
        with pytest.raises(PeerLostError) as raised:
            fail(payload)
        group.run(error=raised.value)
        return weakref.ref(payload)

    kept = call()
    gc.collect()
    assert kept() is None
    (operation,) = recorder.recording().operations
    assert operation.state is State.FAILED
    assert operation.seq == 1
    (entry,) = entries_of(recorder)
    assert entry["error"] == "PeerLostError: rank 1 died"


def entries_of(recorder: FlightRecorder) -> list[dict[str, Any]]:
    """Return the entries of a recorder's dump."""
    entries: list[dict[str, Any]] = json.loads(encode(recorder.recording(), "json"))["entries"]
    return entries


def test_the_json_variant_has_no_frames_and_no_missing_times(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    group = FakeGroup(info_of(), recorder)
    group.begin()
    path = recorder.dump(tmp_path / "flight_{rank}.json", format="json")
    (entry,) = json.loads(path.read_text())["entries"]
    assert "frames" not in entry
    assert entry["time_discovered_completed_ns"] == 0
    assert entry["process_group"] == ["world", "undefined"]
    assert entry["state"] == "started"
    assert list(tmp_path.iterdir()) == [path]  # no partial file is left


def test_times_are_nanoseconds_since_1970() -> None:
    recorder = FlightRecorder()
    before = time.time_ns()
    FakeGroup(info_of(), recorder).run()
    after = time.time_ns()
    (entry,) = entries_of(recorder)
    slack = 5_000_000
    assert before - slack <= entry["time_created_ns"] <= after + slack
    assert entry["time_created_ns"] <= entry["time_discovered_completed_ns"] <= after + slack
    assert entry["duration_ms"] >= 0


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    with pytest.raises(InvalidUsageError, match="'yaml'"):
        recorder.dump(tmp_path / "f0", format="yaml")  # type: ignore[arg-type]  # wrong, on purpose
    assert list(tmp_path.iterdir()) == []
    for path in (None, 7, ["f0"]):
        with pytest.raises(InvalidUsageError, match="path must be a str or a Path, got"):
            recorder.dump(path)  # type: ignore[arg-type]  # likewise
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        recorder.dump(tmp_path / "file" / "f0")


def test_the_folder_of_a_dump_or_a_trace_is_made(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    FakeGroup(info_of(), recorder).run()
    assert recorder.dump(f"{tmp_path}/dumps/of/{{rank}}/flight_{{rank}}").exists()
    assert (tmp_path / "dumps" / "of" / "0" / "flight_0").exists()
    trace = write_trace(tmp_path / "traces" / "trace_{rank}.json", rank=3)
    assert json.loads((tmp_path / "traces" / "trace_3.json").read_text())
    assert trace == tmp_path / "traces" / "trace_3.json"


@pytest.mark.parametrize("dtype", [value for value in vars(torch).values() if isinstance(value, torch.dtype)])
def test_every_dtype_has_a_name(dtype: torch.dtype) -> None:
    assert dtype_name(dtype).isidentifier()
    if dtype in (torch.float32, torch.int64, torch.bool):
        assert torch.empty(0, dtype=dtype).type() == f"torch.{dtype_name(dtype)}Tensor"


def test_dumping_while_other_threads_record_loses_nothing() -> None:
    recorder = FlightRecorder(capacity=512)
    stop = threading.Event()

    def record(rank: int) -> None:
        group = FakeGroup(info_of(rank), recorder)
        while not stop.is_set():
            group.run(error=PeerLostError("gone") if group.numbers[False] % 3 == 0 else None)

    threads = [threading.Thread(target=record, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            recording = recorder.recording(0)
            seqs = [operation.seq for operation in recording.operations]
            assert len(set(seqs)) >= len(seqs) - 1  # a failure is recorded anew while we look
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("write", [dump_flight_recorder, write_trace])
def test_who_cannot_write_a_file_leaves_the_one_before(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "of_rank"
    before = write(path).read_bytes()

    def on_a_full_disk(partial: Path, data: bytes) -> int:
        with partial.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", on_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [before]
