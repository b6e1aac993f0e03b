"""The log of all operations: every one that ended, in bounded files, as tables; lost ones are counted."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.captured_logs import logged
from support.fake_groups import FakeGroup, info_of, metas
from support.programs import run
from support.queries import QUERIES, ask
from support.warm_interpreter import warm_python

from dist2.errors import PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.runtime.config import DEFAULT_LOG_BYTES, LEAST_LOG_BYTES, Config
from dist2.runtime.deadline import Deadline
from observability import automatic, operation_log
from observability.commands.query import query
from observability.operation_files import CALLS
from observability.operation_log import SEGMENTS, OperationLog, Segments

pytest.importorskip("duckdb")
COUNT = "select count(*) as n from operations"


@pytest.fixture
def logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OperationLog]:
    """Log into a folder whose name needs quotes in SQL."""
    monkeypatch.setattr(operation_log, "LOOK_S", 60.0)  # the tests write, not the thread
    log = OperationLog(tmp_path / "it's a log", DEFAULT_LOG_BYTES)
    yield log
    log.close()


def test_every_operation_that_ended_is_a_row_of_the_same_tables(
    logging: OperationLog, tmp_path: Path
) -> None:
    world = FakeGroup(info_of(1, 4), logging)
    pair = FakeGroup(info_of(0, 2, uid="tp", global_ranks=(1, 3)), logging)
    signature = world.signature()
    for _ in range(1000):
        world.run(signature, took_ns=2_000_000)
    pair.run(pair.signature(OpKind.BARRIER, metas()))
    world.begin()
    world.run(error=PeerLostError('rank 2, of "a",\ndied'))
    logging.close()
    folder = tmp_path / "it's a log"
    (all_reduce, barrier) = ask(folder, "select * from groups order by operations desc")
    assert (
        all_reduce.items() >= {"rank": 1, "group_name": "world", "operations": 1001, "ranks": "0-3"}.items()
    )
    assert barrier.items() >= {"rank": 1, "group_name": "tp", "group_rank": 0, "last_op": "barrier"}.items()
    took = "select op, seq, state, bytes, round(duration_s, 3) as took_s from operations where seq = 7"
    row = {"op": "all_reduce", "seq": 7, "state": "completed", "bytes": 8, "took_s": 0.002}
    assert ask(folder, took) == [row]
    assert ask(folder, "select error, message from failures") == [
        {"error": "PeerLostError", "message": 'rank 2, of "a", died'}
    ]
    assert ask(folder, "select rank, pid from ranks") == [{"rank": 1, "pid": os.getpid()}]
    assert not ask(folder, "select * from events")
    for sql in QUERIES:
        ask(folder, sql)


def test_a_log_in_a_zip_is_asked_as_the_folder(logging: OperationLog, tmp_path: Path) -> None:
    group = FakeGroup(info_of(), logging)
    for _ in range(7):
        group.run()
    logging.close()
    folder, archive = tmp_path / "it's a log", tmp_path / "log.zip"
    for root, base in ((tmp_path, folder.name), (folder, ".")):
        shutil.make_archive(str(archive.with_suffix("")), "zip", root, base)
        assert ask(archive, COUNT) == ask(folder, COUNT) == [{"n": 7}]
    written = bytearray(archive.read_bytes())
    written[written.rindex(CALLS.encode(), 0, written.index(b"PK\x01\x02")) + len(CALLS)] ^= 0x7
    archive.write_bytes(written)
    ended = CliRunner().invoke(query, [str(archive), COUNT])
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith(f"{archive}: ")


def test_segments_replace_each_other_and_a_row_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    log = OperationLog(tmp_path, 16_000)
    group = FakeGroup(info_of(), log)
    calls = [group.signature(inputs=metas([1 + number])) for number in range(4)]
    for number in range(4000):
        group.run(calls[number // 1000])  # a segment has the calls of its own rows
    log.flush()
    files = list(tmp_path.iterdir())
    assert len(files) == 2 * SEGMENTS
    assert sum(path.stat().st_size for path in files) < 16_000 + SEGMENTS * operation_log.CHUNK * 40
    (kept,) = ask(tmp_path, "select max(seq) as last, max(seq) - min(seq) + 1 as n from operations")
    assert kept["last"] == 4000
    assert ask(tmp_path, COUNT) == [{"n": kept["n"]}]
    last = max(tmp_path.glob("*.operations.csv"))
    last.write_bytes(last.read_bytes()[:-9])
    assert ask(tmp_path, COUNT) == [{"n": int(str(kept["n"])) - 1}]
    log.close()


def test_lost_operations_are_counted_and_told(
    logging: OperationLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_log, "MOST", 10)
    group = FakeGroup(info_of(3, 4), logging)
    signature = group.signature()
    with logged() as records:
        for _ in range(25):
            group.run(signature)
        logging.flush()
        group.run(signature)
        logging.flush()
    folder = tmp_path / "it's a log"
    (event,) = ask(folder, "select rank, message from events")
    assert event["rank"] == 3
    assert str(event["message"]).startswith("15 operations are missing in the log of process")
    assert ask(folder, "select min(seq) as first, count(*) as n from operations") == [{"first": 16, "n": 11}]
    (warning,) = [each["event"] for each in records if each["levelname"] == "WARNING"]
    assert "has lost 15 operations" in warning


def test_a_disk_that_hangs_holds_up_neither_memory_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, goes_on, write = threading.Event(), threading.Event(), Segments.write

    def hang(segments: Segments, operations: list[Operation]) -> None:
        writes.set()
        goes_on.wait(20)
        write(segments, operations)

    for name, value in (("LOOK_S", 0.01), ("FLUSH_S", 0.01), ("MOST", 1000)):
        monkeypatch.setattr(operation_log, name, value)
    monkeypatch.setattr(Segments, "write", hang)
    log = OperationLog(tmp_path, DEFAULT_LOG_BYTES)
    group = FakeGroup(info_of(), log)
    group.run()
    try:
        assert writes.wait(20)
        for _ in range(3000):
            group.run()
        for _ in Deadline.after(5).tries(0.01, 0.1):
            if len(log._ended) <= 1000:
                break
        log.flush()
    finally:
        goes_on.set()
        monkeypatch.setattr(operation_log, "FLUSH_S", 20.0)
        log.close()
    (event,) = ask(tmp_path, "select message from events")
    assert str(event["message"]).startswith("2000 operations are missing in the log of process")
    assert ask(tmp_path, "select count(*) as n from operations") == [{"n": 1001}]


def test_operations_that_cannot_be_written_are_lost(logging: OperationLog, tmp_path: Path) -> None:
    group = FakeGroup(info_of(), logging)
    for path in (tmp_path / "it's a log").iterdir():
        path.unlink()
    (tmp_path / "it's a log").rmdir()
    with logged() as records:
        for _ in range(2):
            group.run()
            logging.flush()
    assert logging.lost == 2
    (said,) = [each["event"] for each in records if "cannot be logged in" in each["event"]]
    assert "operations cannot be logged in" in said


def test_after_a_failed_write_later_operations_have_their_calls(
    logging: OperationLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FakeGroup(info_of(), logging)
    before, later = group.signature(), group.signature(OpKind.BARRIER, metas())
    group.run(before)
    logging.flush()
    with monkeypatch.context() as full:
        full.setattr(operation_log, "_call_row", refuse)
        group.run(later)
        logging.flush()
    group.run(later)
    logging.flush()
    rows = ask(tmp_path / "it's a log", "select op, seq from operations order by seq")
    assert rows == [{"op": "all_reduce", "seq": 1}, {"op": "barrier", "seq": 3}]
    assert logging.lost == 1


def test_a_full_disk_leaves_whole_rows_and_a_count_of_the_lost_ones(
    logging: OperationLog, tmp_path: Path
) -> None:
    group, folder = FakeGroup(info_of(), logging), tmp_path / "it's a log"
    before, later = group.signature(), group.signature(OpKind.BARRIER, metas())
    group.run(before)
    logging.flush()
    most = max(path.stat().st_size for path in folder.iterdir()) + 100  # of the calls, and not of the rows
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with logged() as records:
            for _ in range(9):
                group.run(later)
            logging.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    group.run(later)
    logging.flush()
    assert ask(folder, "select op, count(*) as n from operations group by op order by op") == [
        {"op": "all_reduce", "n": 1},
        {"op": "barrier", "n": 1},
    ]
    (event,) = ask(folder, "select message from events")
    assert str(event["message"]).startswith("9 operations are missing in the log of process")
    assert [each["event"].partition(": they")[1] for each in records if "has lost" in each["event"]] == [
        ": they"
    ]


def test_a_segment_that_is_removed_while_the_log_is_asked_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OperationLog(tmp_path, 16_000)
    group = FakeGroup(info_of(), log)
    for _ in range(1000):
        group.run()
    log.close()
    oldest = min(tmp_path.glob("*.operations.csv"))
    (kept,) = ask(tmp_path, f"{COUNT} where seq > {len(oldest.read_bytes().splitlines())}")
    paths = list(tmp_path.iterdir())
    oldest.unlink()
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(paths))  # seen before it was removed
    assert ask(tmp_path, COUNT) == [kept]


def test_a_folder_whose_name_is_a_pattern_is_asked(tmp_path: Path) -> None:
    log = OperationLog(tmp_path / "job[1]*", DEFAULT_LOG_BYTES)
    FakeGroup(info_of(), log).run()
    log.close()
    assert ask(tmp_path / "job[1]*", COUNT) == [{"n": 1}]


def refuse(call: int, signature: object) -> str:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, "no space")


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with logged() as records:
        assert automatic._logging(tmp_path / "file", DEFAULT_LOG_BYTES) is None
    assert records[0]["event"].startswith(f"DIST2_OPERATION_LOG={tmp_path}/file: no operations are logged: ")


def test_the_settings_of_the_environment() -> None:
    assert Config.from_environment({}).operation_log is None
    config = Config.from_environment({"DIST2_OPERATION_LOG": "ops", "DIST2_OPERATION_LOG_BYTES": "5"})
    assert (config.operation_log, config.operation_log_bytes) == (str(Path.cwd() / "ops"), LEAST_LOG_BYTES)


PROGRAM = """
import os, torch, dist2
def train(operations):
    with dist2.new_group("fake", 20, rank=0, world_size=1, name="training") as pg:
        for _ in range(operations):
            pg.all_reduce(torch.ones(2))
train(5)
child = os.fork()
train(3)
if child:
    os.waitpid(child, 0)
"""


def test_a_process_and_its_forks_log_by_the_environment(tmp_path: Path) -> None:
    ended = run([*warm_python(), "-c", PROGRAM], variables={"DIST2_OPERATION_LOG": str(tmp_path)})
    assert (ended.code, ended.errors) == (0, ""), ended
    rows = ask(tmp_path, "select pid, count(*) as n from ranks group by pid")
    assert len(rows) == 2
    assert ask(tmp_path, COUNT) == [{"n": 5 + 3 + 3}]
