"""Time limits: a test that misses one is repeated without other tests beside it, up to three times.

Tests of other workers, other processes, or the machine's own host may delay a test by some hundred
milliseconds. A regression is late in every run. So a test that misses a limit raises `Late` and runs again
from the beginning, with new fixtures, while the other workers of pytest wait. Any other failure, in any run
and of any rank, counts at once. The end of the run lists all late tests, also those that passed later. Each
run has the whole timeout of its test, and the wait for other workers has none.

Tests that measure times therefore need no mark `alone`: it is for tests that inspect the whole machine or
fill it, and for those whose ranks fail in another way than by `Late` where the machine is busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from dist2.errors import (
    GroupAbortedError,
    GroupRevokedError,
    OperationTimeoutError,
    PeerLostError,
    StoreTimeoutError,
)
from support.exclusive import running

TRIES = 4

_TOLD_OF_OTHERS = (
    GroupAbortedError,
    GroupRevokedError,
    OperationTimeoutError,
    PeerLostError,
    StoreTimeoutError,
)
_late = pytest.StashKey[str]()
_timer = pytest.StashKey[Any]()
_PROPERTY = "late"


class Late(AssertionError):  # noqa: N818 - a failed assertion
    """A promise about time was not kept, this time."""


def in_time(took_s: float, within_s: float, *about: object) -> None:
    """Check that a duration is below a promised limit.

    Args:
        took_s: The measured duration.
        within_s: The promised limit.
        about: Values that help to explain a longer duration.

    Raises:
        Late: It took longer.
    """
    if took_s >= within_s:
        shown = "".join(f", {each!r}" for each in about)
        raise Late(f"{took_s:.3f} s, promised within {within_s:.3f} s{shown}")


class Verdict(Enum):
    """The judgement of a rank's failure."""

    LATE = auto()
    """A promise about time was not kept."""
    FOLLOWS = auto()
    """Another rank has failed, and this one got its error, or waits for it."""
    WRONG = auto()
    """Something else."""


def verdict(error: BaseException) -> Verdict:
    """Judge a failure."""
    if isinstance(error, Late):
        return Verdict.LATE
    return Verdict.FOLLOWS if isinstance(error, _TOLD_OF_OTHERS) else Verdict.WRONG


def failure(about: str, *verdicts: Verdict) -> AssertionError:
    """Return the failure of a test, given its ranks' verdicts: a late rank does not excuse the others."""
    late = Verdict.LATE in verdicts and Verdict.WRONG not in verdicts
    return Late(about) if late else AssertionError(about)


def blamed(errors: Sequence[BaseException]) -> BaseException:
    """Return the failure to report out of several, in the order of time: wrong ones before late ones."""
    for judged in (Verdict.WRONG, Verdict.LATE):
        for error in errors:
            if verdict(error) is judged:
                return error
    return errors[0]


# Hooks of pytest: `conftest.py` registers this module


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test beside those of other workers, or alone; again, and alone, where it was late."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    late: list[str] = []
    hooks, timer = item.config.hook, item.stash.get(_timer, None)
    while True:
        item.stash[_late] = ""
        if timer is not None:
            hooks.pytest_timeout_cancel_timer(item=item)
        with _place(item, alone=bool(late)):
            if timer is not None:
                hooks.pytest_timeout_set_timer(item=item, settings=timer)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if item.stash[_late]:
            late.append(item.stash[_late])
        only_late = item.stash[_late] and all(each.passed or each.when == "call" for each in reports)
        if not only_late or len(late) == TRIES:
            break
    for report in reports:
        if late and report.when == "call":
            report.user_properties.append((_PROPERTY, late))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[None]:
    """Keep the settings of the timer that pytest-timeout sets before a test."""
    item.stash[_timer] = settings
    return (yield)


def _place(item: pytest.Item, alone: bool) -> AbstractContextManager[None]:
    """Return where a test runs: other workers of pytest may run theirs, or wait. The wait is not timed."""
    if not hasattr(item.config, "workerinput"):  # of pytest-xdist
        return nullcontext()
    return running(alone or item.get_closest_marker("alone") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep in mind that a test was late."""
    if call.when == "call" and call.excinfo is not None and isinstance(call.excinfo.value, Late):
        lines = str(call.excinfo.value).splitlines()  # of ranks that are processes: their tracebacks
        named = f"{__name__}.{Late.__name__}: "
        item.stash[_late] = next((line for line in lines if line.startswith(named)), lines[0])
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report late tests."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for late in (value for name, value in report.user_properties if name == _PROPERTY):
                terminalreporter.write_line(f"LATE {report.nodeid} ({outcome}): {'; '.join(late)}")
