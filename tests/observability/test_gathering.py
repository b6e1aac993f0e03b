"""Asking all ranks over a tree: each once, no rank by many, and those below a dead rank all the same."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from typing import Any
from urllib.error import URLError

import attrs
import pytest

from dist2.runtime.other_process import Process
from observability.client import Asker
from observability.job.answer import RANK_S, Answer
from observability.job.directory import Entry
from observability.job.fan_out import ask_each
from observability.job.gathering import FAN_OUT, Gatherer, read_request
from observability.job.lines import Line, encoded
from observability.job.state import PROTOCOL

WORLD = 200
RANKS_A_HOST = 8
HERE = Process.here()
AHEAD_NS = 5_000_000_000


class Network(Asker):
    """Ranks that answer each other without sockets; some are dead. Counts requests."""

    def __init__(self, *dead: int) -> None:
        super().__init__()
        self._dead = dead
        self.entries, self.here = ENTRIES, HERE
        self._lock = threading.Lock()
        self.requests: Counter[tuple[int, int]] = Counter()

    def gather_from(self, rank: int, entries: list[Entry], limit_s: float = 1.0) -> dict[int, Answer]:
        """Return the answers that a rank gathers, its own included; clocks but that of rank 0 are ahead."""
        lines = self._lines(rank, entries, {}, limit_s)
        return {each: line.answer("") for each, line in lines.items()}

    def _lines(self, rank: int, entries: list[Entry], wanted: Any, limit_s: float) -> dict[int, Line]:
        here = next((each.process for each in self.entries if each.rank == rank), self.here)
        state = {"rank": rank, "after_ns": wanted.get("after_ns")}
        lines = {rank: Line.of(Answer(state=state))}
        return lines | Gatherer(_As(self, rank), "token", here).gather(entries, wanted, limit_s)

    def request(self, source: int, url: str, body: Any) -> bytes:
        """Answer a request of a rank to another one."""
        rank = int(url.split("/")[2].partition(".")[0])
        with self._lock:
            self.requests[source, rank] += 1
        if rank in self._dead:
            raise URLError(ConnectionRefusedError("nobody there"))
        received_ns = time.time_ns() + AHEAD_NS
        entries, wanted, limit_s = read_request(json.loads(json.dumps(body)))
        lines = self._lines(rank, entries, wanted, limit_s)
        process = next(each.process.text for each in self.entries if each.rank == rank)
        head = {"protocol": PROTOCOL, "process": process, "received_ns": received_ns}
        return encoded({**head, "answered_ns": time.time_ns() + AHEAD_NS}, lines)


class _As(Asker):
    def __init__(self, network: Network, rank: int) -> None:
        super().__init__()
        self._network, self._rank = network, rank

    def ask(
        self, url: str, token: str | None = None, *, body: object = None, timeout_s: float = 5.0
    ) -> bytes:
        return self._network.request(self._rank, url, body)


ENTRIES = [Entry(rank, f"http://{rank}.example", HERE) for rank in range(1, WORLD)]


def test_every_rank_is_asked_once_and_none_asks_many() -> None:
    network = Network()
    answers = network.gather_from(0, ENTRIES)
    assert sorted(answers) == list(range(WORLD))
    assert all(answer.state is not None and answer.state["rank"] == rank for rank, answer in answers.items())
    assert set(network.requests.values()) == {1}
    assert len(network.requests) == WORLD - 1
    by_source = Counter(source for source, _ in network.requests)
    assert max(by_source.values()) <= FAN_OUT


@pytest.mark.parametrize("dead", [(1,), (1, 2, 3), (7, 13, 150, 151, 199)])
def test_ranks_below_a_dead_one_answer_all_the_same(dead: tuple[int, ...]) -> None:
    answers = Network(*dead).gather_from(0, ENTRIES)
    assert sorted(answers) == list(range(WORLD))
    silent = {rank: answer.silence for rank, answer in answers.items() if answer.state is None}
    assert tuple(silent) == dead
    assert set(silent.values()) == {"its control plane is gone: connection refused"}


def on_hosts(ranks_a_host: int, count: int = WORLD - 1) -> list[Entry]:
    """Return entries of ranks that share hosts with their neighbours."""
    return [
        attrs.evolve(each, process=attrs.evolve(HERE, host=f"node-{each.rank // ranks_a_host}"))
        for each in ENTRIES[:count]
    ]


def test_the_lowest_rank_of_a_host_asks_the_others_of_its_host() -> None:
    network = Network()
    network.entries = on_hosts(RANKS_A_HOST)
    network.here = network.entries[0].process
    assert sorted(network.gather_from(0, network.entries)) == list(range(WORLD))
    assert set(network.requests.values()) == {1}
    for source, rank in network.requests:
        host = rank // RANKS_A_HOST
        assert rank % RANKS_A_HOST == 0 or source == (host * RANKS_A_HOST if host else 0), (source, rank)


def test_each_rank_is_told_up_to_when_its_operations_are_known() -> None:
    network = Network()
    network.entries = [attrs.evolve(each, after_ns=each.rank * 10) for each in ENTRIES]
    answers = network.gather_from(0, network.entries)
    assert all(answers[rank].state == {"rank": rank, "after_ns": rank * 10} for rank in range(1, WORLD))


@pytest.mark.parametrize("is_one_host", [False, True])
def test_offsets_of_clocks_are_told_with_their_error(is_one_host: bool) -> None:
    network = Network()  # without an inner rank, whose clock is the real one
    network.entries = ENTRIES[:FAN_OUT] if is_one_host else on_hosts(1, FAN_OUT)
    answers = network.gather_from(0, network.entries)
    assert len(answers) == FAN_OUT + 1
    for rank, answer in answers.items():
        if is_one_host:  # processes of one kernel have one clock, in spite of the network's delays
            assert answer.offset_s == answer.error_s == 0
        else:
            wrong_s = abs(answer.offset_s - (AHEAD_NS / 1e9 if rank else 0.0))
            assert wrong_s <= answer.error_s + 1e-3, rank


def test_threads_that_ask_do_not_keep_a_program_from_ending() -> None:
    together = threading.Barrier(3)

    def ask(rank: int) -> threading.Thread:
        together.wait(20)
        return threading.current_thread()

    asking = ask_each(range(3), ask)
    assert list(asking) == [0, 1, 2]
    assert len(set(asking.values()) - {threading.current_thread()}) >= 2
    assert all(each.daemon for each in asking.values() if each is not threading.current_thread())


def test_ranks_that_do_not_answer_hold_up_no_request_to_the_others() -> None:
    silent, well = range(30), range(30, 32)
    asked = {rank: threading.Event() for rank in range(32)}

    def ask(rank: int) -> bool:
        asked[rank].set()
        return rank in well or all(asked[each].wait(20) for each in well)

    assert all(ask_each([*silent, *well], ask, FAN_OUT).values())


def test_no_level_of_the_tree_is_wider_than_its_depth_needs() -> None:
    network = Network()
    network.gather_from(0, ENTRIES)
    asking = {source for source, _ in network.requests}
    assert len(asking) <= math.isqrt(WORLD) + 2


@pytest.mark.parametrize("error", [ValueError, IndexError])
def test_an_error_of_a_request_is_raised_whatever_its_type(error: type[Exception]) -> None:
    def ask(rank: int) -> None:
        raise error(rank)

    with pytest.raises(error):
        ask_each(range(40), ask)


def test_ranks_that_were_silent_have_less_time_for_the_next_request() -> None:
    class Asked(Asker):
        def __init__(self) -> None:
            super().__init__()
            self.limits: dict[str, float] = {}

        def ask(
            self, url: str, token: str | None = None, *, body: object = None, timeout_s: float = 5.0
        ) -> bytes:
            self.limits[url] = timeout_s
            return b"{}"

    asker = Asked()
    answers = Gatherer(asker, "token", HERE).each(ENTRIES[:2], "/acts", {}, 10.0, silent={2})
    assert answers == {1: {}, 2: {}}
    assert asker.limits == {"http://1.example/acts": 10.0, "http://2.example/acts": RANK_S}
