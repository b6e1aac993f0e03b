"""Members spread over the cores while they wait, and leave no thread pinned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.boards import operation, words

from dist2.backends.socket.transport.boards.arrivals import new_arrivals
from dist2.backends.socket.transport.boards.control_words import CORE, RING
from dist2.backends.socket.transport.doorbell import Doorbell, PeerDoorbell
from dist2.operation.signature import Operation

MANY_WAITS = 400


class Crowd:
    """A member of a crowd, the last one, and the pages of the other members, which come once it sleeps."""

    def __init__(self, doorbell: Doorbell, members: int, spins: int = 0) -> None:
        self.own = words()
        self.doorbell = doorbell
        self.peers = [words() for _ in range(members - 1)]
        self.arrivals = new_arrivals(members - 1, self.own, doorbell, members, spins)
        for rank, page in enumerate(self.peers):
            self.arrivals.add(rank, page, PeerDoorbell(doorbell.locator))
        self.arrivals.spreads = True
        self.arrivals.stopped = True  # so that a wait is at its end at once
        self._call = operation(members - 1)

    def come(self, _: Operation) -> None:
        """Have all others come to the fence."""
        at = self.arrivals.phase % RING
        for page in self.peers:
            page[at] = self.own[at]

    def wait(self) -> int:
        """Wait for all at the next fence; return the core of it."""
        self.arrivals.cross(self._call, self.come)
        return self.own[CORE] - 1

    def tell(self, cores: list[int]) -> None:
        """Have the others say where they are."""
        for page, core in zip(self.peers, cores, strict=True):
            page[CORE] = core + 1

    @property
    def moves(self) -> int:
        return int(self.arrivals.moves)  # only in C


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    if len(os.sched_getaffinity(0)) < 2 or len(os.sched_getaffinity(0)) != os.cpu_count():
        pytest.skip("this process may not run on two cores or more, and all there are")
    with closing(Doorbell()) as doorbell:
        yield Crowd(doorbell, 2 * len(os.sched_getaffinity(0)) + 2)


def test_who_is_on_a_full_core_goes_to_another_and_may_run_anywhere(crowd: Crowd) -> None:
    allowed = os.sched_getaffinity(0)
    here = crowd.wait()
    for _ in range(MANY_WAITS):
        crowd.tell([here] * len(crowd.peers))
        if (here := crowd.wait()) >= 0 and crowd.moves:
            break
    assert crowd.moves == 1
    assert os.sched_getaffinity(0) == allowed


def test_nobody_goes_who_was_not_asked_to(crowd: Crowd) -> None:
    assert not new_arrivals(0, words(), crowd.doorbell, 2, 0).spreads
    crowd.arrivals.spreads = False
    here = crowd.wait()
    for _ in range(MANY_WAITS):
        crowd.tell([here] * len(crowd.peers))
        here = crowd.wait()
    assert not crowd.moves


def test_nobody_goes_where_all_cores_have_as_many(crowd: Crowd) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for _ in range(MANY_WAITS):
        here = crowd.wait()
        others = [core for core in cores if core != here]
        crowd.tell([here, *(others * len(crowd.peers))][: len(crowd.peers)])
        assert not crowd.moves


def test_only_the_last_rank_of_a_core_goes(crowd: Crowd) -> None:
    with closing(Doorbell()) as doorbell:
        page = words()
        crowd.peers.append(page)
        crowd.arrivals.add(len(crowd.peers), page, PeerDoorbell(doorbell.locator))  # behind this one
        for _ in range(MANY_WAITS):
            crowd.tell([max(0, crowd.own[CORE] - 1)] * len(crowd.peers))
            crowd.wait()
            assert not crowd.moves


def test_who_has_cores_chosen_for_it_stays_on_them(crowd: Crowd) -> None:
    allowed = os.sched_getaffinity(0)
    chosen = set(sorted(allowed)[:-1])
    os.sched_setaffinity(0, chosen)
    try:
        for _ in range(MANY_WAITS):
            crowd.tell([max(0, crowd.own[CORE] - 1)] * len(crowd.peers))
            crowd.wait()
        assert not crowd.moves
        assert os.sched_getaffinity(0) == chosen
    finally:
        os.sched_setaffinity(0, allowed)


def test_of_two_on_one_core_the_last_one_goes_at_once() -> None:
    if len(os.sched_getaffinity(0)) < 2 or len(os.sched_getaffinity(0)) != os.cpu_count():
        pytest.skip("this process may not run on two cores or more, and all there are")
    with closing(Doorbell()) as doorbell:
        pair = Crowd(doorbell, 2, spins=1)
        here, waits = pair.wait(), 1
        while not pair.moves and waits < MANY_WAITS:
            pair.tell([here])
            here, waits = pair.wait(), waits + 1
        assert pair.moves == 1
        assert waits < 16
