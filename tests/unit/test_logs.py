"""Where dist2 logs: structlog if the program configured it, else `logging`; never to standard output."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from dist2.logs import Logger

log = Logger("dist2.test")


@pytest.fixture(autouse=True)
def _structlog_not_configured() -> Iterator[None]:
    configured = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if configured is not None:
        structlog.configure(**configured)


def test_a_program_that_configured_nothing_gets_warnings_on_standard_error() -> None:
    program = (
        "from dist2.logs import Logger\n"
        "log = Logger('dist2.store')\n"
        "log.info('unheard', port=1)\n"
        "log.warning('heard', port=2, error='100% out\\nof luck')\n"
        "print('result')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    assert done.stderr == "heard port=2 error='100% out\\nof luck'\n"


def test_logging_has_names_levels_and_who_called(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dist2")
    with structlog.contextvars.bound_contextvars(rank=3):
        log.info("one")
    log.warning("two", of=3)
    log.error("three")
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "one rank=3"),
        ("WARNING", "two of=3"),
        ("ERROR", "three"),
    ]
    assert {(each.name, each.filename) for each in caplog.records} == {("dist2.test", "test_logs.py")}


def test_logging_gets_exceptions(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        log.exception("failed", call="f")
    (record,) = caplog.records
    assert (record.message, record.levelno) == ("failed call='f'", logging.ERROR)
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_structlog_gets_all_as_soon_as_it_is_configured(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("before")
    with structlog.testing.capture_logs() as logs:
        log.warning("after", port=1)
    assert [each.message for each in caplog.records] == ["before"]
    assert logs == [{"event": "after", "port": 1, "log_level": "warning"}]
