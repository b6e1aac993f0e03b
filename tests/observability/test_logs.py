"""Logs: one event a line, with rank, group, operation and sequence number."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from support.fake_groups import FakeGroup, info_of
from support.programs import run
from support.warm_interpreter import warm_python

from dist2.errors import InvalidUsageError, PeerLostError
from observability.logs import LogInstrument, bind_operation, configure_logs, log_context


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> Iterator[None]:
    configured, ours = structlog.get_config(), logging.getLogger("dist2")
    before = list(ours.handlers), ours.level, ours.propagate
    yield
    structlog.configure(**configured)
    ours.handlers, level, ours.propagate = before
    ours.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_bear_what_is_bound(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    group = FakeGroup(info_of(1, 4))
    log = structlog.get_logger()
    with log_context(group.info, step=12):
        log.info("trained")
        with log_context(group.begin()):
            log.warning("slow")
    log.info("after")
    trained, slow, after = lines(capsys)
    assert trained.items() >= {"event": "trained", "rank": 1, "group": "world", "step": 12}.items()
    assert slow.items() >= {"op": "all_reduce", "seq": 1, "rank": 1, "level": "warning"}.items()
    assert "timestamp" in after
    assert "rank" not in after


def test_lines_about_a_subgroup_have_the_rank_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    with log_context(info_of(1, 2, uid="tp", global_ranks=(1, 2))):
        structlog.get_logger().info("late")
    assert lines(capsys)[0].items() >= {"rank": 2, "group": "tp", "group_rank": 1}.items()


def test_what_is_bound_stays_in_its_thread(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    with log_context(info_of(3, 4)):
        other = threading.Thread(target=lambda: structlog.get_logger().info("elsewhere"))
        other.start()
        other.join()
    assert "rank" not in lines(capsys)[0]


def test_people_get_plain_lines_where_they_ask_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=False)
    bind_operation(structlog.get_logger(), FakeGroup(info_of()).begin()).info("hello")
    printed = capsys.readouterr().err
    assert "hello" in printed
    assert "op=all_reduce" in printed
    assert not printed.startswith("{")


def test_json_is_the_default_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(level="warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


def test_an_exception_is_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    try:
        raise PeerLostError("rank 1 died")
    except PeerLostError:
        structlog.get_logger().exception("failed")
    assert "PeerLostError: rank 1 died" in lines(capsys)[0]["exception"]


def test_failed_and_slow_operations_are_logged_and_others_not(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    group = FakeGroup(info_of(), LogInstrument(slow_s=0.5))
    group.run(took_ns=400_000_000)
    group.run(took_ns=600_000_000)
    group.run(error=PeerLostError("rank 1 died"), took_ns=1)
    group.close()
    opened, slow, failed, closed = lines(capsys)
    assert (opened["event"], closed["event"]) == ("opened group world over socket", "closed group world")
    assert slow.items() >= {"op": "all_reduce", "seq": 2, "elapsed_s": 0.6, "level": "warning"}.items()
    assert "took 0.6 s" in slow["event"]
    assert failed.items() >= {"error": "PeerLostError", "level": "error"}.items()
    assert "failed: PeerLostError: rank 1 died" in failed["event"]
    assert failed["reason"] == "rank 1 died"
    assert "fake_groups.py" in failed["call"]


def test_without_a_threshold_only_failures_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    group = FakeGroup(info_of(), LogInstrument())
    group.run(took_ns=10**15)
    (line,) = lines(capsys)
    assert line["event"].startswith("opened group")


def test_records_of_the_standard_library_come_out_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(json=True)
    configure_logs(json=True)  # in place of the first
    with log_context(info_of(1, 4)):
        logging.getLogger("dist2.store").warning("port %d is taken", 5, extra={"port": 5})
    logging.getLogger("dist2.store").info("more")
    logging.getLogger("dist2.store").debug("too much")
    warned, informed = lines(capsys)
    expected = {"event": "port 5 is taken", "port": 5, "rank": 1, "level": "warning", "group": "world"}
    assert warned.items() >= expected.items()
    assert informed["event"] == "more"


def test_a_program_that_configured_nothing_gets_warnings_on_standard_error() -> None:
    program = (
        "from dist2.security.refusals import refusals\n"
        "refusals.note('store', 'wrong_secret', '127.0.0.1:5', 'it has another secret')\n"
        "print('result')"
    )
    ended = run([*warm_python(), "-c", program])
    assert ended.output == "result\n"
    said = "refused a store connection from 127.0.0.1:5 (wrong_secret): it has another secret\n"
    assert ended.errors == said


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidUsageError, match="'loud'"):
        configure_logs(level="loud")
    with pytest.raises(InvalidUsageError, match="slow_s"):
        LogInstrument(slow_s=0)
    with pytest.raises(InvalidUsageError, match="slow_s must be a timedelta or a number of seconds, got '1'"):
        LogInstrument(slow_s="1")  # type: ignore[arg-type]  # wrong, on purpose
    for about in (None, "training"):
        with (
            pytest.raises(InvalidUsageError, match=rf"about must be .* \(pg.info\) .*, got {about!r}"),
            log_context(about),  # type: ignore[arg-type]  # likewise
        ):
            pass
