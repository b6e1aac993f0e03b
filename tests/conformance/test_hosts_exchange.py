"""`all_to_all` on several hosts with several ranks each: parts of all lengths, and sizes that differ."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping

import attrs
import pytest
import torch
from support.lending_offers import note_offers
from support.ranks import Tenant, run_ranks

from dist2 import GroupAbortedError, MismatchError, OperationTimeoutError, ProcessGroup
from dist2.backends.socket.algorithms import hosts_exchange
from dist2.backends.socket.journey import Itinerary
from dist2.backends.socket.overlap import Action, Messages
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.backends.socket.transport.messages.ways import ShortWays

TWO_BY_TWO = Tenant("2+2", "socket", layout=(0, 0, 1, 1))
FOUR = Tenant("2+2+2+2", "socket", layout=(0, 0, 1, 1, 2, 2, 3, 3))
LAYOUTS = (
    TWO_BY_TWO,
    Tenant("dealt", "socket", layout=(0, 1, 0, 1)),
    Tenant("2+1", "socket", layout=(0, 0, 1)),
    Tenant("3+1+2", "socket", layout=(0, 1, 0, 2, 0, 2)),
    FOUR,
)
ON_ALL = pytest.mark.parametrize("tenant", LAYOUTS, ids=str)
LONG = 20_000


def part(src: int, dst: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) + 1000 * src + dst


def exchange(pg: ProcessGroup, length: Callable[[int, int], int]) -> None:
    """Have each rank send to each as much as a function of both says."""
    me, ranks = pg.rank(), range(pg.size())
    sent, received = [length(me, rank) for rank in ranks], [length(rank, me) for rank in ranks]
    output = torch.zeros(sum(received), dtype=torch.int32)
    whole = torch.cat([part(me, rank, sent[rank]) for rank in ranks])
    for _ in range(2):
        pg.all_to_all_single(output.zero_(), whole, received, sent)
        for rank, got in enumerate(output.split(received)):
            assert torch.equal(got, part(rank, me, received[rank])), (rank, me)


def evenly(src: int, dst: int) -> int:
    return LONG


def unevenly(src: int, dst: int) -> int:
    return (3 * src + 5 * dst) % 4 * LONG + src


def in_pieces(src: int, dst: int) -> int:
    """As many as there may be, or fewer."""
    return (1 << 19) - 100_000 * ((src + 2 * dst) % 5)


def one_way(src: int, dst: int) -> int:
    """Some send much more to a rank than they receive of it, or only one of both anything."""
    return 1_500_000 if (src, dst) in ((0, 2), (2, 1), (3, 0)) else 20 * LONG * (src < dst)


@ON_ALL
@pytest.mark.parametrize("scripts", [True, False], ids=["in scripts", "one by one"])
@pytest.mark.parametrize("length", [evenly, unevenly, in_pieces, one_way], ids=lambda each: each.__name__)
def test_parts_of_all_lengths(
    tenant: Tenant, scripts: bool, length: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not scripts:
        monkeypatch.setattr(ShortWays, "rails", lambda self, fingerprint: None)
    run_ranks(len(tenant.layout), lambda pg: exchange(pg, length), tenant)


def test_parts_that_are_too_long_to_be_cut() -> None:
    run_ranks(3, lambda pg: exchange(pg, lambda src, dst: 4_500_000 * (src + dst == 2)), LAYOUTS[2])


@pytest.mark.parametrize("tenant", [TWO_BY_TWO, LAYOUTS[2]], ids=str)
@pytest.mark.parametrize("opens", ["never", "on some ranks", "at times"])
@pytest.mark.parametrize("awaits", [False, True], ids=["all at the end", "round by round"])
def test_more_pieces_than_credit_covers(
    tenant: Tenant, opens: str, awaits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for a waiting rank, at any point where scripts stop and Python continues."""
    monkeypatch.setattr(hosts_exchange, "MOST_PIECES", 64)
    opening, dice, add = Rails.open, random.Random(7), Itinerary.add

    def sometimes(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        may = {"never": False, "on some ranks": self._mailbox.rank % 2, "at times": dice.random() < 0.5}
        return bool(may[opens]) and opening(self, seq, early)

    def add_and_await(self: Itinerary, action: Action) -> None:
        add(self, action)
        if isinstance(action, Messages) and action.sends:
            self._need(sorted(self._awaited)[: len(action.sends)])

    monkeypatch.setattr(Rails, "open", sometimes)
    if awaits:
        monkeypatch.setattr(Itinerary, "add", add_and_await)
    run_ranks(len(tenant.layout), lambda pg: exchange(pg, lambda src, dst: 1_300_000), tenant)


def test_scripts_have_the_links_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    opening = Rails.open

    def noting(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        opened.append(opening(self, seq, early))
        return opened[-1]

    monkeypatch.setattr(Rails, "open", noting)
    run_ranks(4, lambda pg: [exchange(pg, evenly) for _ in range(3)], TWO_BY_TWO)
    assert any(opened)


@pytest.mark.parametrize("refused", [(), (3,)], ids=str)
def test_ranks_lend_what_is_for_their_host_or_none_do(
    refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = note_offers(monkeypatch)
    run_ranks(4, lambda pg: exchange(pg, evenly), attrs.evolve(TWO_BY_TWO, refused=refused))
    assert offers == ([] if refused else [2 * 2] * 2 * 4)


@pytest.mark.parametrize(("src", "wrong"), [(1, 0), (1, 7), (1, LONG + 1), (2, 7), (2, LONG + 1)])
def test_sizes_that_do_not_agree_are_told_on_all_hosts(src: int, wrong: int) -> None:
    """Rank 0 expects another number of elements than a rank sends, on its own host or on the other."""

    def body(pg: ProcessGroup) -> None:
        sent, received = [LONG] * 4, [LONG] * 4
        if pg.rank() == 0:
            received[src] = wrong
        output = torch.zeros(sum(received), dtype=torch.int32)
        exchange(pg, evenly)
        with pytest.raises(MismatchError) as caught:
            pg.all_to_all_single(output, torch.zeros(4 * LONG, dtype=torch.int32), received, sent)
            pg.barrier()  # a rank that had all of its part by then gets the error here
        if pg.rank() == 0 and src == 1:
            assert f"rank 1 sends {LONG} elements to rank 0 that expects {wrong}" in str(caught.value)
            assert caught.value.actual == {1: f"{LONG} elements"}

    run_ranks(4, body, TWO_BY_TWO)


@pytest.mark.parametrize("late", range(4))
def test_who_does_not_come_is_named_beside_it_and_noticed_elsewhere(late: int) -> None:
    seen = threading.Barrier(4)

    def body(pg: ProcessGroup) -> None:
        exchange(pg, evenly)
        if pg.rank() == late:
            seen.wait(20)
            return
        mine = torch.ones(4 * LONG)
        with pytest.raises(OperationTimeoutError) as caught:
            pg.all_to_all_single(torch.zeros(4 * LONG), mine, timeout=0.3)
        if pg.rank() // 2 == late // 2:
            assert caught.value.missing == (late,)
        seen.wait(20)

    run_ranks(4, body, TWO_BY_TWO)


def test_abort_frees_who_waits_at_the_first_fence() -> None:
    freed = threading.Event()

    def body(pg: ProcessGroup) -> None:
        exchange(pg, evenly)
        if pg.rank() != 0:
            assert freed.wait(20)
            return
        timer = threading.Timer(0.1, pg.abort)
        timer.start()
        with pytest.raises(GroupAbortedError):
            pg.all_to_all_single(torch.zeros(4 * LONG), torch.ones(4 * LONG))
        freed.set()
        timer.join()

    run_ranks(4, body, TWO_BY_TWO)
