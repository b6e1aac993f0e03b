"""Ranks that the system refuses threads work where they need none, and say what they lack where they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from support.captured_logs import logged
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup, ResourceError
from dist2.backends.socket.transport import links
from dist2.backends.socket.transport.links.background import Background
from dist2.runtime.lock import Lock
from dist2.runtime.threads import Worker


def refuse(worker: Worker) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_group_works_and_is_closed(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "start", refuse)

    def body(pg: ProcessGroup) -> list[float]:
        total = torch.ones(2)
        pg.all_reduce(total)
        pg.shutdown()
        return total.tolist()

    tenant = Tenant(transport, "socket", {"transport": transport})
    with logged() as records:
        assert run_ranks(2, body, tenant) == [[2.0, 2.0]] * 2
    told = [each["event"] for each in records if "answers other ranks only while" in each["event"]]
    assert len(told) == 2, "one for each rank"
    assert "raise the limits of threads" in told[0]


def background(is_busy: Callable[[], bool], work: Callable[[], None], look: Callable[[], None]) -> Background:
    return Background(Lock(), is_busy, work, look, 0.01)


def test_links_are_looked_after_once_there_may_be_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    thread = background(lambda: False, looked.clear, looked.set)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", refuse)
        thread.attend()
    thread.attend()
    assert looked.wait(5)
    thread.stop()


def test_progress_in_the_background_needs_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = threading.Event()
    thread = background(lambda: not worked.is_set(), worked.set, worked.is_set)
    with monkeypatch.context() as patched, pytest.raises(ResourceError, match="limits of threads"):
        patched.setattr(Worker, "start", refuse)
        thread.start()
    thread.start()
    assert worked.wait(5)
    thread.stop()


def test_a_thread_that_dozes_is_woken_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.background, "_IDLE_S", 0.0)
    pending, worked, dozes = threading.Event(), threading.Event(), threading.Event()

    def is_busy() -> bool:
        if not pending.is_set():
            dozes.set()
        return pending.is_set()

    thread = Background(Lock(), is_busy, worked.set, worked.clear, 0)
    thread.start()
    assert dozes.wait(5)
    deadline = time.monotonic() + 5
    pending.set()
    while not worked.is_set() and time.monotonic() < deadline:
        thread.start()  # as each message does
    assert worked.is_set()
    thread.stop()
