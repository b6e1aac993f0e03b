"""Dumps that write themselves: when a group breaks, on a signal; and the user code that they name."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captured_logs import logged
from support.ranks import Tenant, run_ranks
from support.torch_analyser import analyse, complaints

from dist2 import OperationTimeoutError, ProcessGroup, add_instrument
from dist2.errors import ArgumentTypeError, InvalidUsageError
from observability import dumps
from observability.dumps import dump_on
from observability.flight_recorder import FlightRecorder, encode

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


@pytest.fixture
def recorder() -> Iterator[FlightRecorder]:
    """Record in a separate ring: the usual one holds earlier operations of this process."""
    fresh = FlightRecorder()
    remove = add_instrument(fresh)
    yield fresh
    remove()


def wait_for(path: Path) -> bytes:
    """Return the content of a file, once it exists."""
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} was never written"
        time.sleep(0.01)
    return path.read_bytes()


def test_a_group_that_breaks_is_dumped_with_the_calls_that_led_there(
    recorder: FlightRecorder, tmp_path: Path
) -> None:
    given_up = threading.Event()

    def step(pg: ProcessGroup) -> None:
        pg.all_reduce(torch.ones(2), timeout=0.3)

    def body(pg: ProcessGroup) -> None:
        pg.barrier()
        if pg.rank() == 1:
            assert given_up.wait(20)
            return
        with pytest.raises(OperationTimeoutError):
            step(pg)
        given_up.set()

    stop = dump_on(tmp_path / "flight_{rank}", recorder=recorder)
    try:
        with logged() as lines:
            run_ranks(2, body, INPROC)
    finally:
        stop()
    assert recorder.on_broken == []
    assert [path.name for path in tmp_path.iterdir()] == ["flight_0"]  # rank 1 saw no failure
    (line,) = [each for each in lines if each["name"] == "dist2.dumps"]
    assert line["path"] == str(tmp_path / "flight_0")
    assert "all_reduce(float32[2]" in line["event"]
    entry = pickle.loads((tmp_path / "flight_0").read_bytes())["entries"][-1]
    names = [frame["name"].rpartition(".")[2] for frame in entry["frames"]]
    assert names[:2] == ["step", "body"]
    assert {Path(frame["filename"]) for frame in entry["frames"][:2]} == {Path(__file__)}
    recorder.dump(tmp_path / "flight_{rank}", rank=1)
    _, said = analyse(tmp_path)
    assert complaints(said) == ["Not all ranks joining collective, sequence number: 2"]
    assert "missing ranks: {1}" in said


def test_an_operation_that_waits_is_shown_with_the_calls_that_led_there(recorder: FlightRecorder) -> None:
    go_on = threading.Event()
    shown: list[dict[str, Any]] = []

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            pg.barrier()
            return
        end = time.monotonic() + 20
        while not shown and time.monotonic() < end:
            recording = recorder.recording(0)
            if recording.frames:
                shown.extend(json.loads(encode(recording, "json"))["entries"])
                (frames,) = recording.frames.values()
                assert frames[0].name.endswith("body")
                assert Path(frames[0].filename) == Path(__file__)
                assert len(frames) > 1  # run_ranks, which called the body
            time.sleep(0.001)
        go_on.set()
        pg.barrier()

    run_ranks(2, body, INPROC)
    assert go_on.is_set()
    assert [entry["state"] for entry in shown] == ["started"]


def test_a_signal_writes_a_dump_and_calls_the_handler_before(
    recorder: FlightRecorder, tmp_path: Path
) -> None:
    run_ranks(1, lambda pg: pg.barrier(), INPROC)
    came: list[int] = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR2)
        path = tmp_path / "flight_{rank}.json"
        stop = dump_on(path, failure=False, signal_number=signal.SIGUSR2, recorder=recorder, format="json")
        os.kill(os.getpid(), signal.SIGUSR2)
        dump = json.loads(wait_for(tmp_path / "flight_0.json"))
        assert [entry["profiling_name"] for entry in dump["entries"]] == ["gloo:barrier"]
        assert came == [signal.SIGUSR2]
        stop()
        stop()
        assert signal.getsignal(signal.SIGUSR2) is mine
        assert not any(thread.name == "dist2-dumps" for thread in threading.enumerate())
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_each_period_replaces_the_dumps(recorder: FlightRecorder, tmp_path: Path) -> None:
    path = tmp_path / "flight_0"
    stop = dump_on(tmp_path / "flight_{rank}", every_s=0.05, recorder=recorder)
    try:
        assert pickle.loads(wait_for(path))["entries"] == []

        def body(pg: ProcessGroup) -> None:
            for _ in range(3):
                pg.barrier()

        run_ranks(1, body, INPROC)
        end = time.monotonic() + 20
        while len(pickle.loads(path.read_bytes())["entries"]) < 3:
            assert time.monotonic() < end, "it is never written again"
            time.sleep(0.01)
    finally:
        stop()
    assert not [each for each in threading.enumerate() if each.name == "dist2-dumps"]


def test_a_dump_that_cannot_be_written_is_logged_and_breaks_nothing(
    recorder: FlightRecorder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")

    given_up = threading.Event()

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            assert given_up.wait(20)
            return
        with pytest.raises(OperationTimeoutError):
            pg.barrier(timeout=0.2)
        given_up.set()

    stop = dump_on(tmp_path / "file" / "flight_{rank}", recorder=recorder)
    try:
        with logged() as lines:
            run_ranks(2, body, INPROC)
    finally:
        stop()
    assert any("cannot be written" in each["event"] for each in lines)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="path must be a str or a Path, got 7"):
        dump_on(7)  # type: ignore[arg-type]  # wrong
    with pytest.raises(InvalidUsageError, match=f"signal_number={signal.SIGKILL.value}"):
        dump_on(tmp_path / "dump", signal_number=signal.SIGKILL.value)
    with pytest.raises(InvalidUsageError, match="every_s must be positive, got 0"):
        dump_on(tmp_path / "dump", every_s=0)
    raised: list[str] = []

    def elsewhere() -> None:
        try:
            dump_on(tmp_path / "dump", signal_number=signal.SIGUSR2)
        except InvalidUsageError as error:
            raised.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in raised[0]


def test_the_environment_can_ask_for_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int | None, float | None]] = []

    def record(path: str, signal_number: int | None = None, every_s: float | None = None) -> None:
        asked.append((path, signal_number, every_s))

    monkeypatch.setattr(dumps, "dump_on", record)
    with logged() as lines:
        dumps.from_settings(None, None)
        dumps.from_settings(None, "USR1")
        dumps.from_settings("d/{rank}", None)
        dumps.from_settings("d/{rank}", "USR1")
        dumps.from_settings(None, None, 60.0)
        dumps.from_settings("d/{rank}", None, 60.0)
    assert asked == [("d/{rank}", None, None), ("d/{rank}", signal.SIGUSR1, None), ("d/{rank}", None, 60.0)]
    assert [each["event"] for each in lines] == [
        "DIST2_DUMP_SIGNAL=USR1 has no effect without DIST2_DUMP",
        "DIST2_DUMP_EVERY=60.0 has no effect without DIST2_DUMP",
    ]
