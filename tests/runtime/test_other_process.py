"""Other processes: distinguished from later ones with the same id, and how each ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace

import attrs
import pytest
from support.scarcity import no_descriptors
from support.stores import exit_code, forked

from dist2.runtime import other_process
from dist2.runtime.other_process import Process, has_ended, how_ended


def test_this_process_is_no_other() -> None:
    here = Process.here()
    assert here.pid == os.getpid()
    assert not here.is_another_here
    assert not here.has_ended
    assert Process.read(here.text) == here


def test_another_runs_until_it_has_ended() -> None:
    come, go = os.pipe()
    told, tell = os.pipe()

    def body() -> int:
        os.write(tell, Process.here().text.encode())
        os.read(come, 1)
        return 0

    child = forked(body)
    other = Process.read(os.read(told, 1000).decode())
    assert other is not None
    assert other.pid == child
    assert other.is_another_here
    assert not other.has_ended
    later = attrs.evolve(other, started=other.started + 1)
    assert not later.is_another_here, "another process has its number"
    assert later.has_ended
    elsewhere = attrs.evolve(other, host="elsewhere.example")
    assert not elsewhere.is_another_here
    assert not elsewhere.has_ended
    os.write(go, b"x")
    assert exit_code(child) == 0
    assert other.has_ended
    for fd in (come, go, told, tell):
        os.close(fd)


def test_a_process_whose_number_is_taken_meanwhile_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    child = forked(lambda: int(bool(signal.pause())))
    other = attrs.evolve(Process.here(), pid=child, started=other_process._started(child) or 0)
    opened: list[int] = []

    def late(pid: int) -> int:
        opened.append(os.pidfd_open(os.getpid()))
        os.kill(child, signal.SIGKILL)
        exit_code(child)
        return opened[0]

    with monkeypatch.context() as patched:
        patched.setattr(other_process, "os", SimpleNamespace(**{**vars(os), "pidfd_open": late}))
        assert other.watch() == -1
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(opened[0])


def test_a_process_that_the_kernel_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = attrs.evolve(Process.here(), pid=2**22 + 1, started=1)
    assert hidden.has_ended

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not hidden.has_ended


def test_without_a_free_descriptor_nothing_is_known_of_a_process() -> None:
    """It was taken for dead, and its rank for the cause of a failure."""
    here = Process.here()
    child = forked(lambda: int(bool(signal.pause())))
    started = other_process._started(child)
    assert started
    other = attrs.evolve(here, pid=child, started=started)
    other_process._known_space.cache_clear()
    try:
        with no_descriptors():
            assert not other.has_ended
            assert not other.is_another_here
            assert other.watch() == -1
            assert Process.here() == attrs.evolve(here, space="unknown", started=0)
        assert Process.here() == here
        assert other.is_another_here
        with no_descriptors():
            assert not other.has_ended
    finally:
        os.kill(child, signal.SIGKILL)
        exit_code(child)
    assert other.has_ended


@pytest.mark.parametrize(
    "text", ["", "host", "host/1", "host/1/x", "host/-1/2", "host/٣/4", f"host/{'9' * 30}/1"]
)
def test_what_is_no_process_is_none(text: str) -> None:
    assert Process.read(text) is None


def _killed(by: signal.Signals) -> Callable[[], int]:
    def body() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), by)
        return 0

    return body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda: 0, "exited with code 0"),
        (lambda: 7, "exited with code 7"),
        (_killed(signal.SIGKILL), "was killed by SIGKILL"),
        (_killed(signal.SIGTERM), "was killed by SIGTERM"),
        (_killed(signal.SIGRTMIN), "was killed by SIGRTMIN"),
    ],
)
def test_how_a_process_ended_is_told_before_its_parent_asks_and_after(
    body: Callable[[], int], words: str
) -> None:
    child = forked(body)
    pidfd = os.pidfd_open(child)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert has_ended(pidfd)
    assert how_ended(pidfd) == words
    exit_code(child)
    assert how_ended(pidfd) in (words, "died"), "Linux tells it to all since 6.15"
    os.close(pidfd)


def test_the_end_of_an_unknown_process_is_a_death() -> None:
    assert how_ended(-1) == "died"


def test_a_process_is_watched_as_long_as_it_runs() -> None:
    come, go = os.pipe()
    told, tell = os.pipe()

    def body() -> int:
        os.write(tell, Process.here().text.encode())
        os.read(come, 1)
        return 3

    child = forked(body)
    other = Process.read(os.read(told, 1000).decode())
    assert other is not None
    pidfd = other.watch()
    assert pidfd >= 0
    assert not has_ended(pidfd)
    assert attrs.evolve(other, started=other.started + 1).watch() == -1, "another process has its number"
    assert Process.here().watch() == -1
    os.write(go, b"x")
    assert exit_code(child) == 3
    assert has_ended(pidfd)
    assert other.watch() == -1
    for fd in (come, go, told, tell, pidfd):
        os.close(fd)


@pytest.mark.parametrize(
    ("kills", "words"), [(0, ""), (1, "killed a process of"), (2, "killed 2 processes of")]
)
def test_a_kill_is_told_with_those_of_the_kernel_for_lack_of_memory(
    kills: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_process, "_memory_kills", lambda: 7 + kills)
    monkeypatch.setattr(other_process, "_kills_before", 7)
    more = f" (the kernel {words} this host for lack of memory since this one began)" if kills else ""
    assert other_process.was_killed_by(signal.SIGKILL) == f"was killed by SIGKILL{more}"
    assert other_process.was_killed_by(signal.SIGSEGV) == "was killed by SIGSEGV"
    number = signal.SIGRTMIN + 1
    assert other_process.was_killed_by(number) == f"was killed by signal {number}"
