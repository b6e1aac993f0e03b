"""Long messages over sockets without announcements: read whole, in both directions at any time."""

from __future__ import annotations

import ctypes
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from support.oracle import check_sum
from support.ranks import Tenant, run_ranks
from support.time_limits import in_time

from dist2 import ProcessGroup
from dist2.backends.socket.passing import Passing
from dist2.backends.socket.transport.messages import express_socket_long
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.backends.socket.transport.messages.express_socket_long import SocketTake
from dist2.backends.socket.transport.messages.ways import ShortWays
from dist2.compiled import steps

NBYTES = 1 << 20
TWO_BY_TWO = Tenant("2+2", "socket", layout=(0, 0, 1, 1))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    first.setblocking(False)
    with first, second:
        yield first, second


@pytest.fixture
def place() -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * NBYTES)()


Place = ctypes.Array[ctypes.c_char]
Ends = tuple[socket.socket, socket.socket]


def test_what_comes_in_pieces_is_read_whole(ends: Ends, place: Place) -> None:
    sent = random.Random(7).randbytes(NBYTES)
    sender = threading.Thread(target=ends[1].sendall, args=(sent + b"next",))
    sender.start()
    came = 0
    while came < NBYTES:  # the sender may be held up for longer than one call waits
        came += steps.read_whole(ends[0].fileno(), ctypes.addressof(place) + came, NBYTES - came, False)
    sender.join()
    assert place.raw == sent
    assert ends[0].recv(10) == b"next"


def test_the_end_shows_behind_what_came(ends: Ends, place: Place) -> None:
    ends[1].sendall(b"some")
    ends[1].close()
    assert steps.read_whole(ends[0].fileno(), ctypes.addressof(place), 10, False) == ~4
    assert place.raw[:4] == b"some"


def test_who_waits_in_vain_is_back_in_a_moment(ends: Ends, place: Place) -> None:
    start = time.monotonic()
    assert steps.read_whole(ends[0].fileno(), ctypes.addressof(place), 10, False) == 0
    took_s = time.monotonic() - start
    assert took_s > 0.0005
    in_time(took_s, 1.0)


def test_room_to_write_ends_the_wait(ends: Ends, place: Place) -> None:
    ends[1].sendall(b"some")
    assert steps.read_whole(ends[0].fileno(), ctypes.addressof(place), 10, True) == 4


def test_no_bytes_are_read_at_once(ends: Ends, place: Place) -> None:
    assert steps.read_whole(ends[0].fileno(), ctypes.addressof(place), 0, False) == 0


def test_a_broken_socket_is_an_end(place: Place) -> None:
    with socket.socket() as closed:
        fd = closed.fileno()
    assert steps.read_whole(fd, ctypes.addressof(place), 10, False) == ~0


@pytest.fixture
def without_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have messages go one by one, as they do without C."""
    monkeypatch.setattr(ShortWays, "rails", lambda self, fingerprint: None)


def _sums(pg: ProcessGroup) -> None:
    for turn, numel in enumerate((300_000, 3_000_000, 1_000_001)):
        check_sum(pg, numel, turn, period=100)


@pytest.mark.usefixtures("without_rails")
def test_the_rails_of_two_hosts_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    wait = SocketTake.wait

    def noting(self: SocketTake, address: int, deadline_ns: int, seq: int = 0) -> object:
        received = wait(self, address, deadline_ns, seq)
        taken.append(received is True)
        return received

    monkeypatch.setattr(SocketTake, "wait", noting)
    run_ranks(4, lambda pg: [_sums(pg) for _ in range(3)], TWO_BY_TWO)
    assert any(taken)


@pytest.mark.usefixtures("without_rails")
@pytest.mark.parametrize("seed", range(2))
def test_either_way_may_be_refused_at_any_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)

    def sometimes(method: Callable[..., object]) -> Callable[..., object]:
        def either(self: SocketSend | SocketReceive, *arguments: object) -> object:
            if dice.random() < 0.4:
                if isinstance(self, SocketSend):
                    self.held_up = dice.random() < 0.5
                return False
            return method(self, *arguments)

        return either

    monkeypatch.setattr(SocketSend, "send", sometimes(SocketSend.send))
    monkeypatch.setattr(SocketReceive, "wait", sometimes(SocketReceive.wait))
    run_ranks(4, _sums, TWO_BY_TWO)


@pytest.mark.usefixtures("without_rails")
def test_what_is_read_may_stop_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and payloads may have come by half when the wait ends."""
    dice = random.Random(3)

    def a_part(fd: int, address: int, nbytes: int, writes: bool, /) -> int:
        return steps.read_whole(fd, address, dice.randint(0, nbytes), writes)

    monkeypatch.setattr(express_socket_long, "steps", SimpleNamespace(read_whole=a_part))
    monkeypatch.setattr(express_socket_long, "_PATIENCE_NS", 0)
    run_ranks(4, _sums, TWO_BY_TWO)


@pytest.mark.usefixtures("without_rails")
def test_a_call_that_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the failure no rank owns the messages that the call was about to send or receive."""
    start = Passing.start
    calls = 0

    def fails(self: Passing, messages: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise ZeroDivisionError
        start(self, messages)

    monkeypatch.setattr(Passing, "start", fails)

    def body(pg: ProcessGroup) -> None:
        mine = torch.ones(3_000_000)
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            pg.all_reduce(mine, timeout=5)
        mine.zero_()
        time.sleep(0.1)
        assert not mine.any()

    run_ranks(4, body, TWO_BY_TWO)
