"""Records, telling and counting."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import pytest
import torch

from dist2.operation.counters import Counters, Counting, Tally, Tallying
from dist2.operation.instruments import Calling, tell
from dist2.operation.kinds import SUM, OpKind
from dist2.operation.record import FIELDS, Operation
from dist2.operation.signature import GroupInfo, Signature, TensorMeta
from observability.metrics import COUNTERS, LAST_SEQ, MAX_NS, Metrics

INFO = GroupInfo("uid", "group", "", "socket", 0, (0, 1))
META = TensorMeta((4,), torch.float32)
SIGNATURE = Signature(OpKind.ALL_REDUCE, INFO, (META,), (META,), SUM)


def test_a_record_has_what_it_was_made_with() -> None:
    made = Operation(SIGNATURE, 7, 100, 1 << 62, True)
    fields = {name: getattr(made, name) for name in FIELDS}
    assert fields == {
        "signature": SIGNATURE,
        "seq": 7,
        "deadline_ns": 1 << 62,
        "created_ns": 100,
        "started_ns": 0,
        "finished_ns": 0,
        "error": None,
        "code": None,
        "instruction": 0,
        "is_async": True,
        "source": -1,
    }
    for name, value in fields.items():
        setattr(made, name, value)
    with pytest.raises(AttributeError):
        made.other = 1  # type: ignore[attr-defined]  # wrong, on purpose


def test_a_record_knows_when_and_where_it_began() -> None:
    before, line = monotonic_ns(), sys._getframe().f_lineno + 1
    made = Operation.begun(SIGNATURE, 1_000_000_000, False, "/elsewhere/")
    assert before <= made.created_ns <= monotonic_ns()
    assert made.deadline_ns == made.created_ns + 1_000_000_000
    assert (made.signature, made.seq, made.is_async) == (SIGNATURE, 0, False)
    assert made.code is sys._getframe().f_code
    lines = [at for start, end, at in made.code.co_lines() if start <= made.instruction < end]
    assert lines == [line]


def called_by(here: str | tuple[str, ...]) -> Operation:
    """Begin a record in a frame of a file that does not exist."""
    code = compile("def call(record, here): return record.begun(None, 1, False, here)", "/ours/x.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    made: Operation = names["call"](Operation, here)
    return made


def test_frames_of_the_library_did_not_call() -> None:
    named = called_by("/theirs")
    skipped = called_by("/ours")
    for here in (("/theirs/", "/ours/"), ("/ours/",)):
        assert called_by(here).code is called_by.__code__
    for others in (("/theirs/", "/our/"), ()):
        among = called_by(others).code
        assert among is not None and among.co_filename == "/ours/x.py"
    everything = called_by("")  # all frames are ours: the outermost called
    assert named.code is not None and named.code.co_filename == "/ours/x.py"
    assert skipped.code is called_by.__code__
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    assert everything.code is frame.f_code


@pytest.mark.parametrize("tracked_by", ["nothing", "error"])
def test_a_record_is_let_go(tracked_by: str) -> None:
    class Derived(Operation):  # as `Operation` is
        __slots__ = ()

    made = Derived.begun(SIGNATURE, 1, False, "")
    gone = weakref.ref(made)
    if tracked_by == "error":

        def fail(operation: Operation) -> None:
            operation.error = ValueError("x")
            raise operation.error

        with pytest.raises(ValueError, match="x"):
            fail(made)  # the traceback leads back to the record
        del made
        gc.collect()
    else:
        del made
    assert gone() is None


def test_making_records_leaks_nothing() -> None:
    code = sys._getframe().f_code
    for _ in range(100):
        Operation.begun(SIGNATURE, 1, False, "")
    counts = [sys.getrefcount(each) for each in (SIGNATURE, code, None, Operation)]
    for _ in range(10_000):
        Operation.begun(SIGNATURE, 1, False, "/elsewhere/")
        Operation(SIGNATURE, 1, 2, 3, False)
    after = [sys.getrefcount(each) for each in (SIGNATURE, code, None, Operation)]
    assert all(abs(new - old) < 100 for new, old in zip(after, counts, strict=True))


def test_counters_of_two_series_are_added_up() -> None:
    counters, others = Counters(), Counters()
    for place in range(COUNTERS):
        counters[place], others[place] = place << 70, (COUNTERS - place) << 70
    counters[LAST_SEQ], others[LAST_SEQ] = 5, 9
    counters.add(others)
    sums = [COUNTERS << 70] * COUNTERS
    sums[MAX_NS], sums[LAST_SEQ] = max(MAX_NS, COUNTERS - MAX_NS) << 70, 9
    assert list(counters) == sums


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="begun"):
        Operation.begun(SIGNATURE)  # type: ignore[call-arg]  # wrong, on purpose
    with pytest.raises(TypeError, match="tuple of str"):
        Operation.begun(SIGNATURE, 1, False, 3)
    with pytest.raises(TypeError, match="Operation"):
        Counting(set(), {}, print, [])(3)
    with pytest.raises(TypeError, match="Operation"):
        Tallying((), {}, print)(3)
    with pytest.raises(TypeError, match="got 3"):
        Counters().add(3)
    with pytest.raises(IndexError):
        Counters()[COUNTERS]


def test_what_raises_is_handed_over_and_the_others_are_told() -> None:
    told: list[object] = []

    def bad(operation: object) -> None:
        raise ValueError(operation)

    def failed(teller: object, error: Exception) -> None:
        told.append((teller, error.args, error.__traceback__ is not None))

    operation = Operation(SIGNATURE, 1, 0, 1, False)
    first, broken, last = Calling(told.append), Calling(bad), Calling(told.append)
    tell((first, broken, last), operation, failed)
    assert told == [operation, (broken, (operation,), True), operation]

    def interrupted(operation: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tell((Calling(interrupted), last), operation, failed)
    assert len(told) == 3


def counted(metrics: Metrics, count: Callable[[Operation], None]) -> object:
    """Count a few operations by one way, and read them."""
    for seq, (created, finished) in enumerate(
        [(10, 10), (10, 11), (10, 12), (0, 1 << 20), (5, 1 << 40), (0, 1 << 62), (0, 1 << 62), (0, 1 << 62)]
    ):
        operation = Operation(SIGNATURE, seq, created, created + 1, False)
        metrics.operation_started(operation)
        operation.finished_ns = finished
        count(operation)
    failed = Operation(SIGNATURE, 9, 1, 2, False)
    metrics.operation_started(failed)
    failed.error = ValueError("x")
    count(failed)
    return metrics.series(), metrics.errors(), metrics.in_flight()


def test_compiled_counting_counts_the_same() -> None:
    fast, plain = Metrics(), Metrics()
    assert counted(fast, fast.operation_finished) == counted(
        plain, lambda each: Metrics.operation_finished(plain, each)
    )


def test_counters_are_a_list_of_numbers() -> None:
    counters = Counters()
    assert list(counters) == [0] * COUNTERS
    for number in (1, -1, (1 << 62) - 1, 1 << 62, -(1 << 62) - 1, (1 << 100) + 7):
        counters[3] = number
        assert (counters[3], counters[2], len(counters)) == (number, 0, COUNTERS)
    with pytest.raises(OverflowError):
        counters[3] = 1 << 130
    with pytest.raises(TypeError):
        counters[3] = "x"  # type: ignore[assignment]  # wrong, on purpose


def test_messages_are_tallied_and_the_recorder_is_asked_about_what_is_unusual() -> None:
    passed: list[Operation] = []
    known, unknown = (Signature(OpKind.SEND, INFO, (META,), peer=1) for _ in range(2))
    tally = Tally()
    tallying = Tallying((OpKind.SEND, OpKind.RECV), {known: tally}, passed.append)
    usual, failed = (Operation(SIGNATURE, 1, 1, 1, False) for _ in range(2))
    message, other, lost = (Operation(each, 1, 1, 1, False) for each in (known, unknown, known))
    failed.error = lost.error = ValueError("x")
    for each in (usual, failed, message, other, lost, message):
        tallying(each)
    assert passed == [failed, other, lost]
    assert tally.count == 2
