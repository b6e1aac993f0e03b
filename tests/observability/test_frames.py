"""The frames of other threads are read without garbage collections, which Python 3.11 does not survive."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from observability.flight_recorder import frames_in_flight
from observability.frames import no_collection
from observability.job.stacks import position, stacks


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The phases of the collections that begin by themselves, which now happens often."""
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50, *before[1:])
    yield phases
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def allocate() -> list[list[object]]:
    return [[] for _ in range(1000)]


def recorded() -> object:
    """Look for the caller of an operation that is nowhere."""
    unfinished: Any = SimpleNamespace(finished_ns=0, code=allocate.__code__, instruction=-1)
    return frames_in_flight([unfinished]) == {}


@pytest.mark.parametrize(
    "read", [stacks, lambda: position(threading.get_ident()), recorded], ids=["all", "one", "recorded"]
)
def test_no_collection_starts_while_frames_are_read(
    read: Callable[[], object], collections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    current_frames, during = sys._current_frames, list[str]()

    def reading() -> dict[int, FrameType]:
        before = len(collections)
        frames = current_frames()
        allocate()
        during.extend(collections[before:])
        return frames

    monkeypatch.setattr(sys, "_current_frames", reading)
    assert read()
    assert during == []
    del collections[:]
    allocate()
    assert collections  # they begin again


class Value:
    """Stands for a tensor of the program."""


@pytest.mark.parametrize(
    "read", [stacks, lambda: position(threading.get_ident()), recorded], ids=["all", "one", "recorded"]
)
def test_values_of_other_threads_live_no_longer_because_frames_were_read(read: Callable[[], object]) -> None:
    goes_on, holds, kept = threading.Event(), threading.Event(), list[weakref.ref[Value]]()

    def call() -> None:
        value = Value()
        kept.append(weakref.ref(value))
        holds.set()
        goes_on.wait(10)

    gc.disable()
    try:
        thread = threading.Thread(target=call)
        thread.start()
        assert holds.wait(10)
        read()
        goes_on.set()
        thread.join(10)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_collector_that_the_program_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_that_is_forked_meanwhile_collects_and_reads_frames() -> None:
    with no_collection():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                was_on = gc.isenabled()
                read = threading.Thread(target=stacks)  # another thread, as the lock is reentrant
                read.start()
                read.join(5)
                code = 0 if was_on and not read.is_alive() else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_calling_thread_has_its_frames_too() -> None:
    """A rank that fails describes itself."""
    assert position(threading.get_ident())["place"].endswith(" in test_the_calling_thread_has_its_frames_too")
    (mine,) = (each for each in stacks() if each["native_id"] == threading.get_native_id())
    assert mine["frames"][0]["name"] == "test_the_calling_thread_has_its_frames_too"
