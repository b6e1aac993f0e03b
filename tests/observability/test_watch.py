"""The rank that a waiting rank asks, and how often: also where the whole job answers late."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError

import pytest
from support.fake_groups import FakeGroup, info_of

from dist2 import HashStore
from dist2.runtime.other_process import Process
from dist2.security.authenticator import Credentials
from observability.client import Asker
from observability.flight_recorder import FlightRecorder
from observability.job import watch as module
from observability.job.directory import Directory, Entry, hubs_of
from observability.job.member import Member
from observability.job.watch import Watch
from observability.metrics import Metrics


class Network(Asker):
    """Control planes that are alive, dead, or late with a diagnosis. Notes the requests."""

    def __init__(self, dead: set[int], late: set[int]) -> None:
        super().__init__()
        self.dead, self.late = dead, late
        self.asked: list[int] = []

    def ask(
        self, url: str, token: str | None = None, *, body: object = None, timeout_s: float = 5.0
    ) -> bytes:
        rank = int(url.split("/")[2].partition(".")[0])
        if rank in self.dead:
            raise ConnectionRefusedError(url)
        if url.endswith("/livez"):
            return b"{}"
        self.asked.append(rank)
        if rank in self.late:
            raise URLError(TimeoutError(url))  # as the client does
        return json.dumps({"waiting": [], "culprits": [3]}).encode()


def watch_of(world: int, rank: int, dead: Any = (), late: Any = ()) -> tuple[Watch, Network]:
    """Return the watch of a rank that knows all control planes."""
    metrics, network = Metrics(), Network(set(dead), set(late))
    group = FakeGroup(info_of(rank=rank, world_size=world), metrics)
    member = Member(metrics, FlightRecorder(), group.info, asker=network)
    member.directory.entries = {
        each: Entry(each, f"http://{each}.example", Process.here()) for each in range(world)
    }
    return Watch(member, f"http://{rank}.example", 5.0, network), network


def test_hubs_are_few_and_far_apart() -> None:
    assert [hubs_of(range(count)) for count in (0, 1, 2, 3, 5)] == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 4]]
    assert hubs_of(range(1000)) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_the_lowest_hub_that_answers_is_asked() -> None:
    watch, network = watch_of(64, 40, dead=range(32))
    watch._ask()
    assert watch._ask() == ((), frozenset({3}))
    assert network.asked == [32, 32]


def test_a_hub_that_is_late_once_is_asked_again_and_replaced_only_then() -> None:
    watch, network = watch_of(8, 5, late={0})
    assert watch._ask() is None
    watch._ask()
    watch._ask()
    assert network.asked == [0, 0, 1, 1]


def test_a_rank_pauses_after_an_answer_that_took_long() -> None:
    watch, _ = watch_of(64, 40)
    now = time.monotonic()
    watch._rest(now - 4, 1)
    assert watch._next_ask - now == pytest.approx(16, abs=0.5)


def test_a_rank_that_asks_all_by_itself_pauses_as_if_all_did(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watch_of(64, 40, dead=range(40))
    watch._member.directory.entries = {}
    rests: list[float] = []
    monkeypatch.setattr(watch, "_rest", lambda began, times: rests.append(times))
    watch._ask()
    assert rests == [64 / module.REST]


def test_ranks_of_a_large_job_read_the_entries_of_the_hubs() -> None:
    store = HashStore()
    for rank in range(6):
        directory = Directory(store, Credentials(), "g")
        directory.publish(
            Entry(rank, f"http://{rank}.example", Process.here()), is_hub=rank in hubs_of(range(6))
        )
    reader = Directory(store, Credentials(), "g")
    reader.refresh(range(6), only_hubs=True)
    assert sorted(reader.entries) == [0, 1, 2, 4]


def test_a_rank_that_waits_itself_does_not_say_that_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask seldom: it rests after slow answers."""
    watch, _ = watch_of(64, 0)
    in_flight = [Mock(created_ns=0)]
    main: dict[str, Any] = {"place": "", "inside": None, "for_s": 0.0}
    witness = Mock(look=lambda: main, in_flight=lambda: in_flight)
    monkeypatch.setattr(watch._member, "witness", witness)
    monkeypatch.setattr(watch, "_find_out", lambda: None)
    monkeypatch.setattr(watch, "_key", lambda operation: ("uid", 7, False, -1))
    looks: list[int] = []
    monkeypatch.setattr(watch._waiting_log, "look", looks.append)
    watch.look()
    assert not looks
    in_flight.clear()
    watch.look()
    assert looks == [0]
