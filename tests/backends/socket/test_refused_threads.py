"""Ranks that the system refuses threads work where they need none, and say what they lack where they do."""

from __future__ import annotations

import threading

import pytest
import torch
from support.captured_logs import logged
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup, ResourceError
from dist2.backends.socket.transport.links.background import Background
from dist2.backends.socket.transport.links.link_watch import LinkWatch
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


def test_links_are_looked_after_once_there_may_be_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    watch = LinkWatch(looked.set, 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", refuse)
        watch.start()
    watch.start()
    assert looked.wait(5)
    watch.stop()


def test_progress_in_the_background_needs_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = threading.Event()
    lock = threading.Lock()
    background = Background(lock, lambda: not worked.is_set(), worked.set)
    with monkeypatch.context() as patched, lock, pytest.raises(ResourceError, match="limits of threads"):
        patched.setattr(Worker, "start", refuse)
        background.start()
    with lock:
        background.start()
    assert worked.wait(5)
    thread = background.stop()
    if thread is not None:
        thread.join(5)
