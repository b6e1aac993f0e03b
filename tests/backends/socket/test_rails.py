"""Rails: scripts that send and receive. If any condition stops a script, the long path continues its
transfers."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from support.oracle import check_sum
from support.ranks import Tenant, run_ranks
from support.time_limits import in_time

from dist2 import GroupAbortedError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.overlap import Message
from dist2.backends.socket.passing import Passing
from dist2.backends.socket.transport.messages import rails
from dist2.backends.socket.transport.messages.credit import REPORTED_BYTES
from dist2.backends.socket.transport.messages.express_socket import SocketReceive
from dist2.backends.socket.transport.messages.rails import Left, Rails
from dist2.backends.socket.transport.messages.ways import ShortWays
from dist2.compiled import steps
from dist2.operation.kinds import MAX

TWO_BY_TWO = Tenant("2+2", "socket", layout=(0, 0, 1, 1))
UNEVEN = Tenant("2+1", "socket", layout=(0, 0, 1))
THREE_HOSTS = Tenant("2+2+1", "socket", layout=(0, 0, 1, 1, 2))
NUMELS = (300_000, 3_000_000, 1_000_001)


def sums(pg: ProcessGroup, dtype: torch.dtype = torch.float32) -> None:
    """Sum vectors of several lengths, and see that all is there."""
    for turn, numel in enumerate(NUMELS):
        check_sum(pg, numel, turn, dtype=dtype)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Left]:
    """The unfinished transfers each time that rails were closed."""
    found: list[Left] = []
    close = Rails.close

    def noting(self: Rails, find: rails.Find, coming: int | None) -> Left:
        found.append(close(self, find, coming))
        return found[-1]

    monkeypatch.setattr(Rails, "close", noting)
    return found


@pytest.mark.parametrize("tenant", [TWO_BY_TWO, UNEVEN, THREE_HOSTS], ids=str)
def test_a_script_moves_all_of_a_call(tenant: Tenant, left: list[Left]) -> None:
    run_ranks(len(tenant.layout), lambda pg: [sums(pg) for _ in range(3)], tenant)
    assert any(not each.transfers and not each.unsent for each in left)


def test_what_only_python_folds_is_folded_between(left: list[Left]) -> None:
    run_ranks(4, lambda pg: sums(pg, torch.bfloat16), TWO_BY_TWO)
    assert any(not each.transfers and not each.unsent for each in left)


@pytest.mark.parametrize("tenant", [TWO_BY_TWO, THREE_HOSTS], ids=str)
def test_rails_may_be_closed_at_any_time(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(7)

    def sometimes(method: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *arguments: dice.random() < 0.5 and method(*arguments)

    monkeypatch.setattr(Rails, "open", sometimes(Rails.open))
    monkeypatch.setattr(Rails, "go_on", sometimes(Rails.go_on))
    run_ranks(len(tenant.layout), sums, tenant)


def test_frames_that_are_half_out_or_half_here_are_gone_on_with(
    left: list[Left], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = rails._Track.open

    def narrow(self: rails._Track, seq: int) -> None:
        assert self._links is not None
        for link in self._links:
            assert isinstance(link.sock, socket.socket)
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        opening(self, seq)

    monkeypatch.setattr(rails._Track, "open", narrow)
    monkeypatch.setattr(Rails, "go_on", lambda self, deadline_ns: False)
    run_ranks(4, lambda pg: [sums(pg) for _ in range(2)], TWO_BY_TWO)
    assert any(each.transfers for each in left)


@pytest.mark.parametrize("tenant", [TWO_BY_TWO, THREE_HOSTS], ids=str)
def test_what_has_come_early_is_received_by_scripts(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, taking, taken = Rails.open, Rails.take, list[bool]()

    def late(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        for _ in range(5):
            time.sleep(0.002)
            self._fabric.poller.attend()
        return opening(self, seq, early)

    def noting(self: Rails, coming: rails.Freight) -> bool:
        taken.append(taking(self, coming))
        return taken[-1]

    monkeypatch.setattr(Rails, "open", late)
    monkeypatch.setattr(Rails, "take", noting)
    run_ranks(len(tenant.layout), sums, tenant)
    assert any(taken)


def parts(pg: ProcessGroup) -> None:
    """Exchange parts of several messages each."""
    numel, ranks = 200_000, range(pg.size())
    sent = torch.cat([torch.arange(numel) + 10 * pg.rank() + rank for rank in ranks])
    received = torch.zeros_like(sent)
    pg.all_to_all_single(received, sent)
    expected = [torch.arange(numel) + 10 * rank + pg.rank() for rank in ranks]
    assert torch.equal(received, torch.cat(expected))


@pytest.mark.parametrize("tenant", [TWO_BY_TWO, THREE_HOSTS], ids=str)
def test_scripts_do_not_wait_for_what_was_received_before_its_step(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for long posts all receives; a message received that way must not come over a rail
    again."""
    opening, receiving, opened = Rails.open, Passing.receive, list[bool]()

    def late(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        if early and opening(self, seq, early):
            opened.append(True)
        return self.is_open

    def lasting(self: Passing, message: Message) -> None:
        receiving(self, message)
        self._endpoint.wait(self._started, self._operation.deadline_ns)

    monkeypatch.setattr(Rails, "open", late)
    monkeypatch.setattr(Passing, "receive", lasting)
    monkeypatch.setattr(SocketReceive, "wait", lambda self, address, deadline_ns, seq=0: False)
    monkeypatch.setattr(rails, "PATIENCE_NS", 60 * 10**9)  # else the long path finds it after a while
    run_ranks(len(tenant.layout), parts, tenant)
    assert opened


def test_what_a_script_received_last_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise that member would lack this credit until it sends again."""
    opening, closing, owed = Rails.open, rails._Track.close, list[int]()

    def late(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        for _ in range(5):
            time.sleep(0.002)
            self._fabric.poller.attend()
        return opening(self, seq, early)

    def noting(self: rails._Track, seq: int, find: rails.Find, coming: int | None, left: Left) -> None:
        closing(self, seq, find, coming, left)
        owed.append(self._account.owed)

    monkeypatch.setattr(Rails, "open", late)
    monkeypatch.setattr(rails._Track, "close", noting)
    run_ranks(4, lambda pg: [parts(pg) for _ in range(3)], TWO_BY_TWO)
    assert owed
    assert max(owed) < REPORTED_BYTES


def test_ranks_with_and_without_scripts_that_send_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShortWays.rails

    def some(self: ShortWays, fingerprint: int) -> Rails | None:
        return None if self._mailbox.rank in (1, 2) else made(self, fingerprint)

    monkeypatch.setattr(ShortWays, "rails", some)
    run_ranks(4, lambda pg: [sums(pg) for _ in range(2)], TWO_BY_TWO)


def test_messages_of_others_have_their_turn(left: list[Left]) -> None:
    """A thread sends messages over links that scripts use."""
    count, ends = 30, [threading.Event() for _ in range(4)]

    def body(pg: ProcessGroup) -> None:
        peer = (pg.rank() + 2) % 4
        works = []
        failures: list[BaseException] = []

        def talk() -> None:
            try:
                for number in range(count):
                    got = torch.empty(1000 * number + 1)
                    works.append((pg.irecv(got, peer, 3), got))
                    pg.isend(torch.full_like(got, number), peer, 3).wait()
            except BaseException as error:  # noqa: BLE001 - reported to the test
                failures.append(error)
            ends[pg.rank()].set()

        talker = threading.Thread(target=talk)
        talker.start()
        turns, talking = 0, torch.ones(1)
        while talking.item():
            sums(pg)
            turns += 1
            talking = torch.tensor([float(not ends[pg.rank()].is_set() or turns < 2)])
            pg.all_reduce(talking, MAX)
        talker.join()
        assert not failures
        for number, (work, got) in enumerate(works):
            work.wait()
            assert got.eq(number).all()

    run_ranks(4, body, TWO_BY_TWO)
    assert left


def test_who_does_not_come_is_named() -> None:
    given_up = threading.Barrier(4, timeout=20)

    def body(pg: ProcessGroup) -> None:
        mine = torch.ones(NUMELS[0])
        pg.all_reduce(mine)
        pg.barrier()
        if pg.rank() < 2:
            with pytest.raises(OperationTimeoutError) as caught:
                pg.all_reduce(mine, timeout=0.3)
            assert set(caught.value.missing) <= {2, 3}
        given_up.wait()

    run_ranks(4, body, TWO_BY_TWO)


def test_abort_frees_who_waits_in_a_script() -> None:
    def body(pg: ProcessGroup) -> None:
        mine = torch.ones(NUMELS[0])
        pg.all_reduce(mine)
        pg.barrier()
        if pg.rank() >= 2:
            time.sleep(0.5)
            return
        aborted: list[float] = []

        def abort() -> None:
            aborted.append(time.monotonic())
            pg.abort()

        timer = threading.Timer(0.2, abort)
        timer.start()
        with pytest.raises((GroupAbortedError, PeerLostError)):
            pg.all_reduce(mine)
        timer.join()
        in_time(time.monotonic() - aborted[0], 0.5)

    run_ranks(4, body, TWO_BY_TWO)


def test_a_call_that_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, go_on = 0, Rails.go_on

    def fails(self: Rails, deadline_ns: int) -> bool:
        nonlocal turns
        turns += 1
        if turns == 9:
            raise ZeroDivisionError
        return go_on(self, deadline_ns)

    monkeypatch.setattr(Rails, "go_on", fails)

    def body(pg: ProcessGroup) -> None:
        mine = torch.ones(NUMELS[1])
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            for _ in range(100):
                pg.all_reduce(mine, timeout=5)
        mine.zero_()
        time.sleep(0.1)
        assert not mine.any()

    run_ranks(4, body, TWO_BY_TWO)


def test_a_rail_refuses_what_it_cannot_be_made_of() -> None:
    with pytest.raises(ValueError, match="header"):
        steps.Rail(b"short", 1, 1, 1)
    rail = steps.Rail(bytes(56), 1, 1, 1)
    with pytest.raises(OSError, match="descriptor"):
        rail.open(-1, -1, 1, 0, 0)
    first, second = socket.socketpair()
    with first, second:
        rail.open(first.fileno(), first.fileno(), 1, 7, 9)
        with pytest.raises(RuntimeError, match="open"):
            rail.open(first.fileno(), first.fileno(), 1, 0, 0)
        assert rail.close() == (7, 9, [], b"", b"", 0)
        with pytest.raises(RuntimeError, match="kept"):
            rail.took(1)
        rail.open(first.fileno(), first.fileno(), 2, 0, 9, 1)
        assert rail.kept == 1
        rail.took(4)
        assert rail.kept == 0
        assert rail.close() == (0, 13, [], b"", b"", 0)
