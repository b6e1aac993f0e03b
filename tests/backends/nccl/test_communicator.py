"""`Communicator` over the stub: through cupy where that is installed, and through its twin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import nccl_stubs
from support.threads import together
from support.time_limits import in_time

from dist2.backends.nccl import communicator
from dist2.backends.nccl.communicator import Communicator
from dist2.backends.nccl.library import Library
from dist2.backends.nccl.meeting import Meeting
from dist2.errors import BackendError, BackendUnavailableError, GroupAbortedError, PeerLostError
from dist2.runtime.deadline import deadline_in

pytestmark = pytest.mark.skipif(bool(nccl_stubs.missing()), reason=str(nccl_stubs.missing()))

FLOAT, SUM = 7, 0
NO_STREAM = 0
"""Calls without a stream run at once."""


@pytest.fixture(params=["cupy", "ctypes"])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param == "cupy" and not nccl_stubs.has_cupy():
        pytest.skip("cupy is not installed")
    return nccl_stubs.through_cupy() if request.param == "cupy" else nccl_stubs.through_ctypes()


@pytest.fixture
def pair(library: Library) -> Iterator[list[Communicator]]:
    """Two connected ranks, on threads."""
    made = connected(library, 2)
    yield made
    for each in made:
        each.abort()


def connected(library: Library, size: int) -> list[Communicator]:
    unique_id = library.unique_id()
    made = [Communicator.unconnected(library) for _ in range(size)]
    together(
        *(lambda rank=rank, each=each: each.connect(size, unique_id, rank) for rank, each in enumerate(made))
    )
    return made


def each_rank(ranks: list[Communicator], call: Callable[[int, Communicator], Any]) -> list[Any]:
    """Call a function for each rank at the same time; return each one's result."""
    results: list[Any] = [None] * len(ranks)

    def store(rank: int) -> None:
        results[rank] = call(rank, ranks[rank])

    together(*(lambda rank=rank: store(rank) for rank in range(len(ranks))))
    return results


def total(rank: int, communicator: Communicator, op: int = SUM) -> float:
    tensor = torch.full((3,), rank + 1.0)
    at = tensor.data_ptr()
    communicator.issue([("allReduce", (at, at, 3, FLOAT, op))], NO_STREAM)
    return tensor[0].item()


def test_ranks_meet_and_reduce(pair: list[Communicator]) -> None:
    assert each_rank(pair, total) == [3.0, 3.0]


def test_settings_reach_nccl(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.configured({}) is library
    seen: list[tuple[int, bytes]] = []
    real = library.functions.call

    def call(name: str, *arguments: Any) -> None:
        if name == "ncclCommInitRankConfig":
            config = arguments[-1]._obj
            seen.append((config.min_ctas, config.net_name))
        real(name, *arguments)

    monkeypatch.setattr(library.functions, "call", call)
    made = connected(library.configured({"min_ctas": 2, "net_name": "Socket"}), 2)
    assert seen == [(2, b"Socket")] * 2
    assert each_rank(made, total) == [3.0, 3.0]
    parts = each_rank(made, lambda rank, each: each.split(0, rank))
    assert each_rank(parts, total) == [3.0, 3.0]
    for each in (*parts, *made):
        each.abort()


def test_a_factor_of_its_own(pair: list[Communicator]) -> None:
    half = bytes(torch.tensor([0.5]).view(torch.uint8).tolist())
    codes = [each.premul_sum(half, FLOAT) for each in pair]
    assert codes == [each.premul_sum(half, FLOAT) for each in pair]
    assert each_rank(pair, lambda rank, each: total(rank, each, codes[rank])) == [1.5, 1.5]


def test_ranks_are_split_by_color_and_ordered_by_key(library: Library) -> None:
    ranks = connected(library, 3)
    parts = each_rank(ranks, lambda rank, each: each.split(-1 if rank == 1 else 0, -rank))
    assert parts[1] is None
    assert each_rank([parts[2], parts[0]], total) == [3.0, 3.0]
    for each in (*ranks, parts[0], parts[2]):
        each.abort()


def test_a_split_that_some_do_not_come_to_can_be_aborted(pair: list[Communicator]) -> None:
    blocked = threading.Thread(target=lambda: failed.append(attempt(lambda: pair[0].split(0, 0))))
    failed = list[BaseException | None]()
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    pair[0].abort()
    blocked.join(10)
    assert not blocked.is_alive()
    assert failed != [None]


def test_one_that_is_aborted_before_it_connects_waits_for_nobody(library: Library) -> None:
    one = Communicator.unconnected(library)
    one.abort()
    with pytest.raises(GroupAbortedError, match="closed in this process"):
        one.connect(2, library.unique_id(), 0)
    one.abort()


def test_a_meeting_ends_at_once_where_a_death_is_known_before_it_begins(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort before the connecting thread has entered the blocking call ends the connection at once."""
    connect = Communicator.connect

    def late(communicator: Communicator, *arguments: Any) -> None:
        aborted.wait(5)
        connect(communicator, *arguments)

    class Abort:
        """An end of the links, at which a death is known already."""

        wake = staticmethod(lambda: None)

        def share(self, *_: object) -> bytes:
            return library.unique_id()

        def wait(self, *_: object) -> None:
            raise PeerLostError("rank 1 died", ranks=[1])

    aborted = threading.Event()
    device: Any = SimpleNamespace(active=nullcontext)
    outside: Any = Abort()
    meeting = Meeting(0, 2, library, device, outside, deadline_in(5), "early")
    abort = Communicator.abort

    def told(communicator: Communicator) -> None:
        abort(communicator)
        aborted.set()

    monkeypatch.setattr(Communicator, "connect", late)
    monkeypatch.setattr(Communicator, "abort", told)
    began_s = time.monotonic()
    with pytest.raises(PeerLostError):
        meeting.connect()
    in_time(time.monotonic() - began_s, 1.0)
    assert not [each.name for each in threading.enumerate() if each.name == "dist2-nccl-connect-early"]


def attempt(call: Callable[[], object]) -> BaseException | None:
    """Return the exception of a call."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - looked at by the caller
        return error
    return None


def test_a_group_ends_when_a_call_in_it_raises(pair: list[Communicator]) -> None:
    wrong = ("send", (0, 1, FLOAT, 99))
    for each in pair:
        with pytest.raises(BackendError, match="invalid argument"):
            each.issue([wrong, wrong], NO_STREAM)
    assert nccl_stubs.stub().stub_group_depth() == 0
    assert each_rank(pair, total) == [3.0, 3.0]


def test_a_group_is_launched_as_one(pair: list[Communicator]) -> None:
    """Each rank sends before it receives: without a group, the sends would wait for each other for ever."""

    def swap(rank: int, communicator: Communicator) -> float:
        mine, theirs = torch.full((100_000,), float(rank)), torch.empty(100_000)

        send = ("send", (mine.data_ptr(), mine.numel(), FLOAT, 1 - rank))
        recv = ("recv", (theirs.data_ptr(), theirs.numel(), FLOAT, 1 - rank))
        communicator.issue([send, recv], NO_STREAM)
        return theirs[0].item()

    assert each_rank(pair, swap) == [1.0, 0.0]


def test_connecting_can_be_aborted(library: Library) -> None:
    alone = Communicator.unconnected(library)
    failed = list[BaseException]()

    def connect() -> None:
        try:
            alone.connect(2, library.unique_id(), 0)
        except Exception as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    start = time.monotonic()
    while thread.is_alive() and time.monotonic() - start < 10:
        alone.abort()
        thread.join(0.05)
    assert failed


def test_abort_frees_who_waits(pair: list[Communicator]) -> None:
    blocked = threading.Thread(target=total, args=(0, pair[0]))
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    pair[0].abort()
    blocked.join(10)
    assert not blocked.is_alive()
    with pytest.raises(GroupAbortedError):
        total(0, pair[0])


class Calls:
    """A communicator whose operation, and whose abort, take until they are released."""

    comm = 1

    def __init__(self) -> None:
        self.log: list[str] = []
        self.entered, self.leaves = threading.Event(), threading.Event()
        self.aborting, self.aborted = threading.Event(), threading.Event()

    def work(self, stream: int) -> None:
        self.log.append("called")
        self.entered.set()
        self.leaves.wait(10)
        self.log.append("returned")

    def abort(self) -> None:
        self.log.append("aborting")
        self.aborting.set()
        self.aborted.wait(10)
        self.log.append("aborted")


def started(call: Callable[[], object]) -> threading.Thread:
    """Return a thread that calls a function."""
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def inside_a_call() -> tuple[Communicator, Calls, threading.Thread]:
    """Return a communicator that a thread is in a call of; its abort takes no time."""
    nothing: Any = None
    calls = Calls()
    calls.aborted.set()
    one = Communicator(nothing, calls)
    caller = started(lambda: one.issue([("work", ())], NO_STREAM))
    calls.entered.wait(10)
    return one, calls, caller


def test_abort_lets_a_call_return_that_has_just_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_BLOCKED_NS", 30 * 10**9)
    one, calls, caller = inside_a_call()
    aborter = started(one.abort)
    assert not calls.aborting.wait(0.1)
    with pytest.raises(GroupAbortedError):  # no call begins any more
        assert one.handle
    calls.leaves.set()
    for each in (caller, aborter):
        each.join(10)
    assert calls.log == ["called", "returned", "aborting", "aborted"]


def test_abort_breaks_a_call_off_at_once_that_has_lasted_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_BLOCKED_NS", 200_000_000)
    one, calls, caller = inside_a_call()
    time.sleep(0.2)  # it blocks
    began_s = time.monotonic()
    one.abort()
    took_s = time.monotonic() - began_s
    calls.leaves.set()
    caller.join(10)
    assert calls.log == ["called", "aborting", "aborted", "returned"]
    in_time(took_s, 0.15)


def test_a_second_abort_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_ABORT_S", 30.0)
    nothing: Any = None
    calls = Calls()
    one = Communicator(nothing, calls)
    first = started(one.abort)
    calls.aborting.wait(10)
    second = started(one.abort)
    second.join(0.1)
    assert second.is_alive()
    calls.aborted.set()
    for each in (first, second):
        each.join(10)
    assert calls.log == ["aborting", "aborted"]


def test_asynchronous_errors_come_in_words(pair: list[Communicator]) -> None:
    assert pair[0].async_error() is None
    for code, words in ((6, "remote process exited"), (3, "internal error")):
        nccl_stubs.stub().stub_set_async_error(pair[0].handle, code)
        assert words in str(pair[0].async_error())


def test_ranks_free_their_communicators_together(pair: list[Communicator]) -> None:
    first = threading.Thread(target=pair[0].destroy)
    first.start()
    first.join(0.1)
    assert first.is_alive()  # it waits for the other rank, as garbage collection of cupy's object would
    pair[1].destroy()
    first.join(10)
    assert not first.is_alive()


def test_an_old_library_is_refused(library: Library) -> None:
    nccl_stubs.stub().stub_set_version(21702)
    try:
        with pytest.raises(BackendUnavailableError, match=r"2\.18\.0 or newer, found 2\.17\.2"):
            nccl_stubs.through_ctypes()
    finally:
        nccl_stubs.stub().stub_set_version(22809)
