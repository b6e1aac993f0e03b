"""`Process`: told apart from others, and from who has its number later."""

from __future__ import annotations

import os

import attrs
import pytest
from stores import exit_code, forked

from dist2.rendezvous.liveness import Process


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


@pytest.mark.parametrize(
    "text", ["", "host", "host/1", "host/1/x", "host/-1/2", "host/٣/4", f"host/{'9' * 30}/1"]
)
def test_what_is_no_process_is_none(text: str) -> None:
    assert Process.read(text) is None
