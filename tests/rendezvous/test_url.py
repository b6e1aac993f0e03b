"""Rendezvous at URLs: repeated meetings, and the errors of missing ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.captured_logs import logged
from support.programs import run
from support.stores import exit_code, forked, leaving_nothing, torch_server, unused_port
from support.threads import ends_of, together
from support.time_limits import in_time
from support.torch_features import needs

import dist2
import dist2.legacy
from dist2.errors import (
    ArgumentTypeError,
    InvalidUsageError,
    OperationTimeoutError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreConnectionError,
)
from dist2.rendezvous import Meeting, register_rendezvous_handler, rendezvous, session
from dist2.rendezvous import url as url_module
from dist2.rendezvous.liveness import abort_building
from dist2.rendezvous.requests import JoinRequest, Outcome, Verdict
from dist2.rendezvous.url import ServerEndpoint
from dist2.runtime.deadline import Deadline
from dist2.runtime.other_process import Process
from dist2.store import HashStore, Store, shared_server

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
LIMIT = 20.0


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with leaving_nothing():
        yield


@pytest.fixture(params=["tcp", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp":
        return f"tcp://127.0.0.1:{unused_port()}"
    return f"file://{tmp_path / 'store'}"


def meet(
    url: str,
    size: int,
    body: Callable[[Meeting], Any] | None = None,
    *,
    late_s: float = 0.0,
    **options: Any,
) -> list[Any]:
    """Meet as ranks that are threads; return the meetings, or the body's results for them.

    Args:
        late_s: Delay of rank 0 against the others, in seconds.
    """

    def rank(number: int) -> Any:
        time.sleep(0 if number else late_s)
        met = rendezvous(url, number, size, **{"timeout": LIMIT, **options})
        assert (met.rank, met.world_size) == (number, size)
        return met if body is None else body(met)

    return together(*(lambda number=number: rank(number) for number in range(size)))


def exchange(met: Meeting) -> list[bytes]:
    met.store.set(f"from {met.rank}", str(met.rank))
    return [met.store.get(f"from {rank}") for rank in range(met.world_size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_share_a_store(url: str, size: int) -> None:
    assert meet(url, size, exchange) == [[str(rank).encode() for rank in range(size)]] * size


def test_rank_and_size_may_stand_in_the_url() -> None:
    base = f"tcp://127.0.0.1:{unused_port()}"
    together(
        lambda: exchange(rendezvous(f"{base}?rank=0&world_size=2", timeout=LIMIT)),
        lambda: exchange(rendezvous(f"{base}?world_size=2", rank=1, timeout=LIMIT)),
    )


def test_a_meeting_unpacks() -> None:
    store, rank, world_size = rendezvous(f"tcp://127.0.0.1:{unused_port()}", 0, 1)
    assert isinstance(store, dist.Store)
    assert (rank, world_size) == (0, 1)


def test_the_store_has_the_timeout(url: str) -> None:
    assert rendezvous(url, 0, 1, timeout=12).store.timeout == timedelta(seconds=12)  # type: ignore[attr-defined]  # torch's stubs lack it
    assert rendezvous(url, 0, 1, timedelta(seconds=13)).store.timeout == timedelta(seconds=13)  # type: ignore[attr-defined]  # torch's stubs lack it


def test_meetings_are_apart_and_share_the_connection(url: str) -> None:
    def body(first: Meeting) -> Any:
        second = rendezvous(url, first.rank, first.world_size, LIMIT)
        first.store.set(f"key {first.rank}", "1")
        assert not second.store.check([f"key {first.rank}"])
        second.store.set_timeout(timedelta(seconds=5))
        assert first.store.timeout == timedelta(seconds=LIMIT)  # type: ignore[attr-defined]  # torch's stubs lack it
        return first, second

    pairs = meet(url, 2, body)
    if url.startswith("tcp"):
        links = {
            store._underlying_non_prefix_store._link
            for pair in pairs
            for store in (pair[0].store, pair[1].store)
        }
        assert len(links) == 2, "one for each rank"
        assert sum(shared_server._leases.values()) == 1


def test_ranks_may_come_again_after_they_let_go(url: str) -> None:
    for _ in range(3):
        assert meet(url, 2, exchange) == [[b"0", b"1"]] * 2


def test_one_rank_may_let_go_before_the_others(url: str) -> None:
    kept: dict[int, Meeting] = {}

    def body(met: Meeting) -> list[bytes]:
        if met.rank == 0:
            kept[0] = met
        return exchange(met)

    meet(url, 3, body)
    assert meet(url, 3, exchange) == [[b"0", b"1", b"2"]] * 3


def test_the_store_lives_while_others_use_it() -> None:
    url = f"tcp://127.0.0.1:{unused_port()}"
    meetings = meet(url, 2)
    meetings[0].store.set("key", "value")
    other = meetings.pop().store
    meetings.clear()
    assert other.get("key") == b"value"


def test_ranks_may_meet_in_many_places() -> None:
    urls = [f"tcp://127.0.0.1:{unused_port()}" for _ in range(3)]
    kept = [meet(url, 2) for url in urls]
    for meetings in kept:
        meetings[0].store.set("key", "value")
        assert meetings[1].store.get("key") == b"value"


# Stores that outlived their users


def stale_file(path: Path, size: int) -> str:
    """Return the URL of a file that ranks left behind when they were killed."""

    def body() -> int:
        kept = meet(f"file://{path}", size, timeout=10)
        kept[0].store.set("uid", "of the dead")
        os._exit(0)  # as if killed: nothing is closed

    assert exit_code(forked(body)) == 0
    assert path.exists()
    return f"file://{path}"


def test_a_file_of_a_crashed_run_is_no_obstacle(tmp_path: Path) -> None:
    url = stale_file(tmp_path / "store", 2)

    def body(met: Meeting) -> list[bytes]:
        assert not met.store.check(["uid"])
        return exchange(met)

    # A late rank 0 is the case that matters: the others find the traces of the earlier one.
    assert meet(url, 2, body, late_s=0.3) == [[b"0", b"1"]] * 2


def test_an_agents_store_of_an_earlier_attempt_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = torch_server()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    url = f"tcp://127.0.0.1:{agent.port}"
    for size in (2, 2, 3):
        # Leftovers of an earlier attempt: a leader, its ranks, and go.
        agent.set("dist2/leader", f"dead{size}")
        for rank in range(size):
            agent.set(f"dist2/dead{size}/rank/{rank}", f"elsewhere/1/{rank}")
        agent.set(f"dist2/dead{size}/go", str(size))

        session._sessions.clear()  # as in new processes
        meet(url, size, exchange, late_s=0.2)
    assert not any(shared_server._leases.values())
    del agent


def test_a_rank_that_is_started_twice_is_named(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    ready, answer = os.pipe()

    def body() -> int:
        store = dist2.FileStore(str(tmp_path / "store"), 2)
        store.set("dist2/leader", "leader")
        store.set("dist2/leader/rank/1", JoinRequest(Process.here(), {"world_size": "2"}).to_text())
        os.write(answer, b"x")
        time.sleep(30)
        return 0

    child = forked(body)
    os.read(ready, 1)
    try:
        with pytest.raises(
            RendezvousError,
            match=rf"rank 1 was started twice: as process {child} on .* as process {os.getpid()} on",
        ):
            rendezvous(url, 1, 2, timeout=10)
    finally:
        os.kill(child, 9)
        exit_code(child)
        os.close(ready)
        os.close(answer)


UNGUARDED = """
import multiprocessing, sys
import dist2
with dist2.new_group("socket", init_method=sys.argv[1], rank=0, world_size=1):
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
"""


def test_a_worker_that_imports_the_program_is_told_what_to_do(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNGUARDED)
    ended = run([sys.executable, program, f"file://{tmp_path / 'store'}"])
    assert ended.code == 0, ended
    told = "a worker of multiprocessing that imports the program: make groups below `if __name__"
    assert re.search(rf"RendezvousError: .*rank 0 was started twice: .*, {told}", ended.errors), ended


def test_a_rank_that_gave_up_and_comes_again_is_not_started_twice(tmp_path: Path) -> None:
    store, url = dist2.FileStore(str(tmp_path / "store"), 2), f"file://{tmp_path / 'store'}"
    store.set("dist2/leader", "g")
    store.set("dist2/g/rank/0", JoinRequest(Process("elsewhere", "x", 1, 1), {"world_size": "2"}).to_text())
    waits = r"rank 0 \(host elsewhere, pid 1\) waits for other ranks, is stopped, or is gone"
    for obstacle in (waits, "rank 1 has registered before"):
        with pytest.raises(RendezvousError, match=f"rank 1 of 2 waited 0.3 s: {obstacle}"):
            rendezvous(url, 1, 2, timeout=0.3)
    assert not store.check(["dist2/g/go"])  # rank 0 gets no report of a failure


def test_a_stopped_rank_0_holds_nobody_up_beyond_the_limit() -> None:
    """The store is its own, so no request has an answer: neither the one under way, nor any later one."""
    port = unused_port()
    url = f"tcp://127.0.0.1:{port}"

    def leads() -> int:
        rendezvous(url, 0, 3, timeout=60)
        return 0

    child = forked(leads)
    limit_s = 4.0
    try:
        store = dist2.TCPStore("127.0.0.1", port, timeout=30)
        leader = store.get("dist2/leader").decode()
        with ThreadPoolExecutor(1) as pool:
            begun_s = time.monotonic()
            waiting = pool.submit(rendezvous, url, 1, 3, timeout=limit_s)
            store.wait([f"dist2/{leader}/rank/1"])
            os.kill(child, signal.SIGSTOP)
            error = waiting.exception()
            took_s = time.monotonic() - begun_s
    finally:
        os.kill(child, signal.SIGKILL)
        exit_code(child)
    assert isinstance(error, RendezvousTimeoutError)
    under_way, later = (
        rf"compare_set timeout after \d+ms .*; the store of rank 0 \(.*pid {child}\) does not answer",
        rf"rank 0 \(.*pid {child}\) .*is stopped, or is gone(; | \(Timed out\)$)",
    )
    assert re.search(f"{under_way}|{later}", str(error)), error
    assert "did not arrive" not in str(error)
    in_time(took_s, 1.5 * limit_s)


def _aborted_at_its_second_look(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, looks_again, begun_s = [], threading.Event(), time.monotonic()

    def opened(endpoint: ServerEndpoint, rank: int, world_size: int, timeout: timedelta) -> Store:
        looks.append(timeout)
        if len(looks) == 2:
            looks_again.set()
        return served(endpoint, rank, world_size, timeout)

    served = ServerEndpoint.open
    monkeypatch.setattr(ServerEndpoint, "open", opened)
    monkeypatch.setattr(session, "_LISTENS_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous, f"tcp://127.0.0.1:{port}", 1, 2, timeout=15)
        assert looks_again.wait(10)
        assert abort_building(lambda: dist2.GroupAbortedError("the job waits")) == 1
        with pytest.raises(dist2.GroupAbortedError, match="the job waits"):
            waiting.result(timeout=30)
    in_time(time.monotonic() - begun_s, 5)


def test_a_rank_is_aborted_while_no_store_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    _aborted_at_its_second_look(unused_port(), monkeypatch)


@contextmanager
def _dropping() -> Iterator[int]:
    """Yield a port whose connections get no answer, as where a firewall drops packets."""
    with ExitStack() as kept:
        listener = kept.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # more than it takes
            waiting = kept.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_rank_is_aborted_while_its_packets_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with _dropping() as port:
        _aborted_at_its_second_look(port, monkeypatch)


def test_a_store_that_drops_packets_is_told_with_the_whole_limit() -> None:
    words = r"no store answered within 2.5 s: .*connect timeout"
    with _dropping() as port, pytest.raises(RendezvousTimeoutError, match=words):
        rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=2.5)


def test_a_store_that_never_listens_is_told_with_the_whole_limit() -> None:
    url = f"tcp://127.0.0.1:{unused_port()}"
    with pytest.raises(RendezvousTimeoutError, match=r"no store answered within 2.5 s: .*refused") as raised:
        rendezvous(url, 1, 2, timeout=2.5)
    assert list(raised.value.missing) == [0]


def test_a_rank_0_that_is_stopped_after_the_meeting_is_named_soon_after_the_limit() -> None:
    """Each of the requests that follow used to wait for the whole limit."""
    port, limit_s = unused_port(), 2.0
    url = f"tcp://127.0.0.1:{port}"

    def leads() -> int:
        joined = dist2.new_group("socket", 60, init_method=url, rank=0, world_size=3)
        return int(joined is None)

    def meets() -> int:
        rendezvous(url, 2, 3, timeout=60)
        time.sleep(60)
        return 0

    children = [forked(leads), forked(meets)]
    try:
        store = dist2.TCPStore("127.0.0.1", port, timeout=30)
        leader = store.get("dist2/leader").decode()
        with ThreadPoolExecutor(1) as pool:
            group = {"init_method": url, "rank": 1, "world_size": 3}
            waiting = pool.submit(dist2.new_group, "socket", limit_s, **group)
            store.wait([f"dist2/{leader}/1/dist2/1/rank/{rank}" for rank in range(2)])
            os.kill(children[0], signal.SIGSTOP)
            begun_s = time.monotonic()
            error = waiting.exception()
            took_s = time.monotonic() - begun_s
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            exit_code(child)
    assert isinstance(error, dist2.StoreError), error
    assert f"pid {children[0]}) does not answer: is it stopped?" in str(error)
    in_time(took_s, 1.2 * limit_s + 4)


def test_world_sizes_that_differ_are_told_to_all(url: str) -> None:
    start = time.monotonic()
    ends = ends_of(
        lambda: rendezvous(url, 0, 2, timeout=LIMIT),
        lambda: rendezvous(url, 1, 3, timeout=LIMIT),
    )
    for end in ends:
        assert isinstance(end, RendezvousError), end
        assert "rank 0 has a world size of 2 (host " in str(end)
        assert "rank 1 of 3 (host " in str(end)
    assert time.monotonic() - start < LIMIT / 2


def test_a_rank_beyond_the_world_of_rank_0_is_told_to_all(url: str) -> None:
    start = time.monotonic()
    ends = ends_of(
        lambda: rendezvous(url, 0, 2, timeout=LIMIT),
        lambda: rendezvous(url, 2, 3, timeout=LIMIT),
    )
    for end in ends:
        assert isinstance(end, RendezvousError), end
        assert "rank 0 has a world size of 2 (host " in str(end)
        assert "rank 2 of 3 (host " in str(end)
    assert time.monotonic() - start < LIMIT / 2


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"3", b"x/1/2", b"\xff", b'["h/1", {}, "t"]', b'["h/s/1/2", 2, "t"]', b"[" * 9999]
    + [b'["h/s/a/2", {}, "t"]', b'["h/s/1/2", {"b": 3}, "t"]', b'["h/s/1/2", {}, 3]', b'["h/s/1/2", [], "t"]']
    + [b'["h/s/1/2", {}]', b'["h/s/1/2", {}, "t", 4]'],
)
def test_what_no_rank_comes_with_is_no_request(text: bytes) -> None:
    assert JoinRequest.read(text) is None
    request = JoinRequest(Process.here(), {"world_size": "2"})
    assert JoinRequest.read(request.to_text().encode()) == request


# Missing or wrong ranks


def test_missing_ranks_are_named(url: str) -> None:
    def third() -> None:
        with pytest.raises(RendezvousTimeoutError, match=r"rank 0 gave up: ranks 1, 3 of 4 ") as told:
            rendezvous(url, 2, 4, timeout=0.9)
        assert (told.value.missing, told.value.timeout_s) == ((1, 3), 0.9)

    start = time.monotonic()
    with pytest.raises(
        RendezvousTimeoutError, match=r"ranks 1, 3 of 4 did not arrive within 0.5 s"
    ) as caught:
        together(lambda: rendezvous(url, 0, 4, timeout=0.5), third)
    took_s = time.monotonic() - start
    assert took_s >= 0.5
    in_time(took_s, 2)
    assert isinstance(caught.value, OperationTimeoutError)
    assert (caught.value.missing, caught.value.timeout_s) == ((1, 3), 0.5)
    assert url.split("://")[1].rpartition("/")[2] in str(caught.value)


def place_of(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> ServerEndpoint:
    """Return an endpoint at which this store is found."""
    monkeypatch.setattr(ServerEndpoint, "open", lambda *_: store)
    return ServerEndpoint("127.0.0.1", 1, hosted=False, label="here")


def announce_rank_0(store: HashStore) -> None:
    """Register this process as rank 0 of 3, of a generation that has begun."""
    store.set("dist2/leader", "g")
    store.set("dist2/g/rank/0", JoinRequest(Process.here(), {"world_size": "3"}).to_text())


class EndingStore(HashStore):
    """A store with a rank 0 that gives up when rank 2 has registered, and ends when rank 2 has the reason."""

    is_over = False

    def clone(self) -> HashStore:
        return self

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        found = super()._compare_set(key, expected, desired)
        if key == b"dist2/g/rank/2":
            self.set("dist2/g/go", Verdict(Outcome.TIMEOUT, "rank 1 of 3 did not arrive", (1,)).to_text())
        return found

    def _set(self, key: bytes, value: bytes) -> None:
        super()._set(key, value)
        self.is_over = self.is_over or key == b"dist2/g/told/2"

    def _check(self, keys: tuple[bytes, ...]) -> bool:
        self._fail_if_over()
        return super()._check(keys)

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        self._fail_if_over()
        super()._wait(keys, deadline)

    def _fail_if_over(self) -> None:
        if self.is_over:
            raise StoreConnectionError("the store is gone")


def test_who_is_told_that_rank_0_gave_up_says_why_though_the_store_ends_at_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = EndingStore()
    place = place_of(store, monkeypatch)
    announce_rank_0(store)
    with pytest.raises(
        RendezvousTimeoutError, match="rank 0 gave up: rank 1 of 3 did not arrive; then: the store"
    ) as caught:
        session.RendezvousSession(place, 2, 3).come(timedelta(seconds=LIMIT))
    assert caught.value.missing == (1,)
    assert store.is_over


class StalledStore(HashStore):
    """The rank learns nothing of rank 0's end until its own deadline has passed, and the store is gone."""

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        time.sleep(0.3)
        raise StoreConnectionError("the store is gone")


def test_a_store_that_is_gone_after_the_deadline_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StalledStore()
    place = place_of(store, monkeypatch)
    announce_rank_0(store)
    with pytest.raises(RendezvousTimeoutError, match="then: the store is gone"):
        session.RendezvousSession(place, 2, 3).come(timedelta(seconds=0.2))
    with pytest.raises(RendezvousError) as caught:
        session.RendezvousSession(place, 2, 3).come(timedelta(seconds=LIMIT))
    assert not isinstance(caught.value, OperationTimeoutError)


class ObjectingStore(HashStore):
    """Another rank decides just before rank 0 does."""

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        if key.endswith(b"/go"):
            other = Verdict(Outcome.MISMATCH, "rank 2 has another world size").to_text()
            super()._compare_set(key, b"", other.encode())
        return super()._compare_set(key, expected, desired)


def test_rank_0_raises_the_failure_that_was_decided_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its timeout, a rank 0 does not replace the verdict that the other ranks may have read."""
    store = ObjectingStore()
    place = place_of(store, monkeypatch)
    with pytest.raises(RendezvousError, match="here: rank 2 has another world size") as caught:
        session.RendezvousSession(place, 0, 2).come(timedelta(seconds=0.1))
    assert not isinstance(caught.value, OperationTimeoutError)
    generation = store.get("dist2/leader").decode()
    assert Verdict.read(store.get(f"dist2/{generation}/go")).outcome is Outcome.MISMATCH


def test_who_waits_long_says_for_whom(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_WARN_S", 0.3)
    with logged() as logs:
        ends = ends_of(
            lambda: rendezvous(url, 0, 3, timeout=1.5),
            lambda: rendezvous(url, 2, 3, timeout=1.5),
        )
    assert all(isinstance(end, RendezvousError) for end in ends)
    said = [each["event"] for each in logs if each["levelname"] == "WARNING"]
    assert any("rank 0 has waited for" in each and "rank 1 of 3 did not arrive yet" in each for each in said)
    assert all("rank 0 has waited for" in each for each in said), "a thousand ranks would write as many lines"
    others = [each["event"] for each in logs if each["levelname"] == "INFO"]
    assert any(re.search(r"rank 2 has waited for .*: .*rank 0", each) for each in others)


def test_a_missing_rank_0_is_named() -> None:
    port = unused_port()
    start = time.monotonic()
    with pytest.raises(
        RendezvousTimeoutError, match=rf"127\.0\.0\.1:{port}: .*timed out after .*ms.*refused"
    ) as caught:
        rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=0.3)
    took_s = time.monotonic() - start
    assert took_s >= 0.3
    in_time(took_s, 1)
    assert isinstance(caught.value, dist.DistNetworkError)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.missing, caught.value.timeout_s) == ((0,), 0.3)


def test_a_rank_0_that_never_comes_to_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match=r"rank 1 of 2 waited 0.3 s: rank 0 did not arrive"
    ) as caught:
        rendezvous(f"file://{tmp_path / 'store'}", 1, 2, timeout=0.3)
    assert caught.value.missing == (0,)


def test_a_verdict_of_another_version_is_passed_over(tmp_path: Path) -> None:
    store, url = dist2.FileStore(str(tmp_path / "store"), 2), f"file://{tmp_path / 'store'}"
    store.set("dist2/leader", "g")
    store.set("dist2/g/go", "2")
    with pytest.raises(RendezvousTimeoutError, match="no verdict on a rendezvous: b'2'"):
        rendezvous(url, 1, 2, timeout=0.3)
    for met in together(
        lambda: rendezvous(url, 0, 2, timeout=LIMIT), lambda: rendezvous(url, 1, 2, timeout=LIMIT)
    ):
        assert met.world_size == 2


@pytest.mark.usefixtures("told")
def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"tcp:// rendezvous at 127\.0\.0\.1:{port}: .*EADDRINUSE"):
            rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=5)


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def set_all(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**ENVIRONMENT, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, MASTER_PORT=str(unused_port()))
    met = rendezvous()
    assert (met.rank, met.world_size) == (0, 1)
    assert exchange(met) == [b"0"]
    assert exchange(rendezvous("env://")) == [b"0"]


def test_arguments_and_query_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, MASTER_PORT=str(unused_port()), RANK="7", WORLD_SIZE="9")
    met = rendezvous("env://", rank=0, world_size=1)
    assert (met.rank, met.world_size) == (0, 1)
    met = rendezvous("env://?rank=0&world_size=1", rank=-1, world_size=-1)
    assert (met.rank, met.world_size) == (0, 1)


@needs("list_keys")
def test_under_an_agent_nobody_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = torch_server()
    set_all(monkeypatch, MASTER_PORT=str(agent.port), TORCHELASTIC_USE_AGENT_STORE="True")
    met = rendezvous(timeout=LIMIT)
    met.store.set("key", "value")
    assert any(key.endswith("/key") for key in agent.list_keys())
    assert not any(shared_server._leases.values())
    del agent


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    set_all(monkeypatch, **{name: value})
    with pytest.raises(RendezvousError, match=f"env:// rendezvous: environment variable {name} expected"):
        rendezvous()


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "zero"}, "environment variable RANK must be an integer, got 'zero'"),
        ({"WORLD_SIZE": "1.0"}, "environment variable WORLD_SIZE must be an integer, got '1.0'"),
        ({"MASTER_PORT": "http"}, "environment variable MASTER_PORT must be an integer, got 'http'"),
        ({"MASTER_ADDR": " "}, "environment variable MASTER_ADDR must be a host, got ' '"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, got 0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535, got 65536"),
        ({"RANK": "1"}, "environment variable RANK must be from 0 to 0, got 1"),
        ({"RANK": "-1"}, "environment variable RANK must be from 0 to 0, got -1"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE must be at least 1, got 0"),
        ({"MASTER_ADDR": "192.0.2.1"}, r"MASTER_ADDR=192\.0\.2\.1, MASTER_PORT=29500: .*no address of this"),
    ],
)
def test_bad_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: str
) -> None:
    set_all(monkeypatch, **changes)
    with pytest.raises(RendezvousError, match=words):
        rendezvous()


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "url must begin with a scheme"),
        ("localhost:29500", "localhost://|must begin"),
        ("nonsense://x?rank=0&world_size=1", "No rendezvous handler for nonsense:// in 'nonsense"),
        ("tcp://127.0.0.1?rank=0&world_size=1", "port number missing"),
        ("tcp://127.0.0.1:0?rank=0&world_size=1", "port number missing, must be from 1 to 65535, got 0"),
        ("tcp://127.0.0.1:99999?rank=0&world_size=1", "Port out of range"),
        ("tcp://127.0.0.1:x?rank=0&world_size=1", "Port could not be cast"),
        ("tcp://:29500?rank=0&world_size=1", "host name missing"),
        ("tcp://127.0.0.1:29500?world_size=1", "rank parameter missing"),
        ("tcp://127.0.0.1:29500?rank=0", "world size parameter missing"),
        ("tcp://127.0.0.1:29500?rank=a&world_size=1", "rank in the url must be an integer, got 'a'"),
        ("tcp://127.0.0.1:29500?rank=2&world_size=2", "rank in the url must be from 0 to 1, got 2"),
        ("tcp://127.0.0.1:29500?rank=0&world_size=-1", "world_size in the url must be at least 1, got -1"),
        ("tcp://127.0.0.1:29500?rank", "query of url .* cannot be read"),
        ("tcp://[::1?rank=0&world_size=1", "cannot be read: Invalid IPv6 URL"),
        ("file://?rank=0&world_size=1", "path missing"),
        ("file://relative/path?rank=0&world_size=1", "path must be absolute"),
        ("file:///no/such/folder/x?rank=0&world_size=1", "'/no/such/folder/x': No such file"),
    ],
)
def test_bad_urls_are_named(url: str, words: str) -> None:
    with pytest.raises(RendezvousError, match=words):
        rendezvous(url)


def test_a_rank_that_is_given_twice_must_agree() -> None:
    with pytest.raises(RendezvousError, match="rank is 0 in the url and 1 in the argument"):
        rendezvous("tcp://127.0.0.1:29500?rank=0&world_size=2", rank=1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the thread that reports an error to other ranks: it tries briefly, as no rank comes."""
    monkeypatch.setattr("dist2.rendezvous.session._TELL_S", 0.1)
    yield
    for thread in threading.enumerate():
        if thread.name == "dist2-tell":
            thread.join()


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("rank", "world_size", "words"),
    [
        (2, 2, "argument rank must be from 0 to 1, got 2"),
        (-2, 2, "argument rank must be from 0 to 1, got -2"),
        (0, 0, "argument world_size must be at least 1, got 0"),
        (0, -3, "argument world_size must be at least 1, got -3"),
    ],
)
def test_wrong_numbers_raise_at_once(url: str, rank: int, world_size: int, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=words):
        dist2.new_group("socket", init_method=url, rank=rank, world_size=world_size)
    in_time(time.monotonic() - start, 0.5)


@pytest.mark.usefixtures("told")
def test_variables_that_do_not_go_together_raise_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, MASTER_PORT=str(unused_port()), RANK="3", WORLD_SIZE="2")
    start = time.monotonic()
    with pytest.raises(RendezvousError, match="environment variable RANK must be from 0 to 1, got 3"):
        dist2.new_group("socket")
    in_time(time.monotonic() - start, 0.5)


# As torch.distributed has it


def test_a_file_is_there_at_once_in_the_global_api(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    first, rank, world_size = next(dist2.legacy.rendezvous(url, 1, 3))
    assert (rank, world_size) == (1, 3)
    first.set("key", "value")
    second, *numbers = next(dist.rendezvous(url, 0, 3))
    assert second.get("key") == b"value"
    assert numbers == [0, 3]


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((5,), ArgumentTypeError, "`url` must be a string"),
        (("tcp://127.0.0.1:1", "0", 1), ArgumentTypeError, "rank must be an integer, got '0'"),
        (("tcp://127.0.0.1:1", 0, 1.0), ArgumentTypeError, r"world_size must be an integer, got 1\.0"),
        (("nonsense://", 0, 1), RendezvousError, "No rendezvous handler for nonsense://"),
        (("tcp://127.0.0.1", 0, 1), RendezvousError, "port number missing"),
        (("tcp://127.0.0.1:99999", 0, 1), RendezvousError, "Port out of range"),
        (("tcp://127.0.0.1:1",), RendezvousError, "rank parameter missing"),
        (("tcp://127.0.0.1:1", 1, 1), RendezvousError, "rank must be from 0 to 0, got 1"),
        (("file://", 0, 1), RendezvousError, "path missing"),
        (("file:///x?rank=0", 1, 2), RendezvousError, "rank is 0 in the url and 1 in the argument"),
        (("env://",), RendezvousError, "environment variable RANK expected"),
    ],
)
def test_wrong_arguments_of_the_global_api_raise_at_the_call(
    arguments: tuple[Any, ...], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        dist2.legacy.rendezvous(*arguments)


@pytest.mark.usefixtures("handlers")
def test_both_apis_have_the_same_handlers() -> None:
    dist2.legacy.register_rendezvous_handler("both", lambda url, **_: iter([(dist2.HashStore(), 0, 1)]))
    assert rendezvous("both://x").world_size == 1
    assert next(dist2.legacy.rendezvous("both://x"))[1:] == (0, 1)
    with pytest.raises(InvalidUsageError, match="already registered"):
        register_rendezvous_handler("both", print)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": b"env://"}, "url must be a str"),
        ({"rank": "0"}, "rank must be an integer, got '0'"),
        ({"world_size": 1.0}, r"world_size must be an integer, got 1\.0"),
        ({"rank": True}, "rank must be an integer, got True"),
        ({"timeout": "1"}, "timeout must be a timedelta or seconds"),
    ],
)
def test_wrong_types(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words):
        rendezvous(**options)


# One's own store, one's own scheme


def test_explicit_store() -> None:
    store = dist.HashStore()
    met = rendezvous(store=store, rank=1, world_size=2)
    assert met.store is store
    assert (met.rank, met.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"store": dist2.HashStore()}, "with store, give rank and world_size too, got rank=None"),
        ({"store": dist2.HashStore(), "rank": 2, "world_size": 2}, "rank must be from 0 to 1"),
        ({"store": "no store", "rank": 0, "world_size": 1}, "a torch or dist2 Store, got 'no store'"),
    ],
)
def test_explicit_stores_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises((RendezvousError, InvalidUsageError), match=words):
        rendezvous(**options)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = dict(url_module._handlers)
    yield
    url_module._handlers.clear()
    url_module._handlers.update(before)


@pytest.mark.usefixtures("handlers")
def test_own_schemes_as_in_torch() -> None:
    seen: list[Any] = []

    def generator(url: str, timeout: timedelta, **_: Any) -> Iterator[Any]:
        seen.append((url, timeout))
        yield dist2.HashStore(), 3, 4

    register_rendezvous_handler("mine", generator)
    met = rendezvous("mine://there?x=1", rank=3, world_size=4, timeout=7)
    assert (met.rank, met.world_size) == (3, 4)
    assert seen == [("mine://there?x=1&rank=3&world_size=4", timedelta(seconds=7))]
    with pytest.raises(InvalidUsageError, match="Rendezvous handler for mine:// already registered"):
        register_rendezvous_handler("mine", generator)
    register_rendezvous_handler("plain", lambda url, timeout: (dist2.HashStore(), 0, 1))
    assert rendezvous("plain://").world_size == 1


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    "gives", [None, (), iter(()), iter([(1, 2)]), 3], ids=["None", "a tuple", "nothing", "a pair", "a number"]
)
def test_handlers_that_give_something_else(gives: Any) -> None:
    register_rendezvous_handler("odd", lambda url, timeout: gives)
    with pytest.raises(RendezvousError, match=r"handler of odd:// must give \(store, rank, world_size\)"):
        rendezvous("odd://")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tcp", print), "tcp:// already registered"),
        (("", print), "scheme must be a non-empty str"),
        (("new", 3), "handler must be callable, got 3"),
    ],
)
def test_bad_handlers(arguments: tuple[Any, Any], words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        register_rendezvous_handler(*arguments)
