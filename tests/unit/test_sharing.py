"""Long messages that both sides move: whole whoever moves what, and not written once they have ended."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from desks import BUFFER, CLAIMS, DONE, FAILED, GUARD, OPEN, WAITS, blocks_written, stay_awake
from processes import run_processes
from promises import in_time
from ranks import Tenant, run_ranks

from dist2 import OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.transport import cross_memory, shared_memory
from dist2.backends.socket.transport.links.ring import RingWriter
from dist2.compiled import messages

pytestmark = [
    pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory"),
    pytest.mark.skipif(messages is None, reason="needs the parts in C"),
]

SHM = Tenant("shm", "socket", {"transport": "shm"})
NUMEL = 16 << 20
BLOCK = 1 << 20


class Sender:
    """A rank that has sent a long message and waits at the desk, played by a test."""

    def __init__(self, pg: ProcessGroup, tensor: torch.Tensor) -> None:
        self.work = pg.isend(tensor, 1)
        endpoint = pg.backend.endpoint  # type: ignore[attr-defined]  # the socket backend's
        mailbox = endpoint._mailbox
        (self.number,) = mailbox.sending
        ring = endpoint._fabric.outgoing(mailbox.fabric_ids[1]).tx
        assert isinstance(ring, RingWriter)
        self.words = ring._words
        self.words[WAITS] = self.number
        self._tensor = tensor

    def claim(self) -> int:
        """Claim the last block, once the desk is open; return its offset."""
        end = time.monotonic() + 10
        while self.words[OPEN] != self.number:
            assert time.monotonic() < end, "the receiver opens the desk"
        self.words[CLAIMS] += 1
        return self._tensor.nbytes - BLOCK

    def write(self, offset: int) -> None:
        """Do what the sender's part in C does: all of it in one call of the kernel."""
        nothing = ctypes.c_uint64()
        here = (_Stretch * 2)(
            _Stretch(ctypes.addressof(nothing), 8), _Stretch(self._tensor.data_ptr() + offset, BLOCK)
        )
        there = (_Stretch * 2)(_Stretch(self.words[GUARD], 8), _Stretch(self.words[BUFFER] + offset, BLOCK))
        moved = cross_memory._write(os.getpid(), here, 2, there, 2, 0)
        if moved != 8 + BLOCK:
            raise OSError(ctypes.get_errno(), "not written")


_Stretch = cross_memory._Stretch


Send = Callable[[ProcessGroup, torch.Tensor, Callable[[], None]], None]
Receive = Callable[[ProcessGroup, torch.Tensor], None]


def crossing(send: Send, receive: Receive) -> None:
    """Have rank 1 receive while rank 0 plays the sender. The first messages go before there are rings."""
    sent, free, ready = threading.Event(), threading.Event(), threading.Event()

    def body(pg: ProcessGroup) -> None:
        first = torch.zeros(1)
        for _ in range(3):
            if pg.rank() == 0:
                pg.send(first, 1)
                pg.recv(first, 1)
            else:
                pg.recv(first, 0)
                pg.send(first, 0)
        if pg.rank() == 0:
            tensor = torch.arange(NUMEL, dtype=torch.float32)
            pg.send(tensor[:20_000], 1)  # tells what a long message is
            pg.isend(tensor, 1).wait()
            sent.set()
            assert free.wait(10)
            send(pg, tensor, ready.set)
        else:
            got = torch.zeros(NUMEL)
            pg.recv(got[:20_000], 0)
            pg.recv(got, 0)
            got.fill_(-1.0)
            endpoint = pg.backend.endpoint  # type: ignore[attr-defined]  # the socket backend's
            # It would take in what is here, ten times a second; the rest of that goes the long way.
            endpoint._fabric._link_watch.stop()
            assert sent.wait(10)
            endpoint.attend()  # one that had to wait long may have asked the other what it calls
            free.set()
            assert ready.wait(10)
            receive(pg, got)

    run_ranks(2, body, SHM)


def whole(pg: ProcessGroup, got: torch.Tensor) -> None:
    pg.recv(got, 0)
    assert torch.equal(got, torch.arange(NUMEL, dtype=torch.float32))


def test_a_sender_that_is_late_with_its_part_is_waited_for() -> None:
    def send(pg: ProcessGroup, tensor: torch.Tensor, ready: Callable[[], None]) -> None:
        sender = Sender(pg, tensor)
        ready()
        offset = sender.claim()
        time.sleep(0.05)
        sender.write(offset)
        sender.words[DONE] = 1
        sender.work.wait()

    crossing(send, whole)


@pytest.mark.parametrize("late_s", [0.0, 0.05])
def test_what_a_sender_could_not_write_is_read(late_s: float) -> None:
    def send(pg: ProcessGroup, tensor: torch.Tensor, ready: Callable[[], None]) -> None:
        sender = Sender(pg, tensor)
        ready()
        sender.claim()
        time.sleep(late_s)
        sender.words[FAILED] = sender.number
        sender.words[DONE] = 1
        sender.work.wait()

    crossing(send, whole)


@pytest.mark.alone
def test_a_sender_that_is_stopped_with_a_block_writes_nothing_once_the_receive_has_ended() -> None:
    ended, looked = threading.Event(), threading.Event()

    def send(pg: ProcessGroup, tensor: torch.Tensor, ready: Callable[[], None]) -> None:
        fabric = pg.backend.endpoint._fabric  # type: ignore[attr-defined]  # the socket backend's
        with fabric.poller.role:  # nobody polls here: so far, it is stopped
            sender = Sender(pg, tensor)
            ready()
            offset = sender.claim()
            assert ended.wait(10)
            with pytest.raises(OSError, match="not written"):
                sender.write(offset)
            looked.set()
        with pytest.raises(PeerLostError):
            sender.work.wait()

    def receive(pg: ProcessGroup, got: torch.Tensor) -> None:
        start = time.monotonic()
        with pytest.raises(OperationTimeoutError):
            pg.recv(got, 0, timeout=0.5)
        took_s = time.monotonic() - start
        assert took_s >= 0.5
        got.fill_(-2.0)
        ended.set()
        assert looked.wait(10)
        assert torch.equal(got, torch.full((NUMEL,), -2.0))
        in_time(took_s, 0.75)

    crossing(send, receive)


def _to_and_fro(pg: ProcessGroup) -> int:
    """Exchange messages of many lengths; return how many blocks their senders have written."""
    rank, written = pg.rank(), torch.zeros(1)
    stay_awake(pg)
    end = time.monotonic() + 30  # it takes two ranks that have a core each at the same time
    while not written and time.monotonic() < end:
        for numel in (16_385, 65_536, 100_003, (1 << 20) + 1):
            mine, got = torch.arange(numel, dtype=torch.float32), torch.zeros(numel)
            for turn in range(6):
                if turn % 2 == rank:
                    pg.send(mine + turn, 1 - rank)
                    written += blocks_written(pg, 1 - rank)
                else:
                    pg.recv(got, 1 - rank)
                    assert torch.equal(got, mine + turn), (numel, turn)
        pg.all_reduce(written)
    return int(written)


@pytest.mark.alone
def test_both_sides_move_long_messages(tmp_path: Path) -> None:
    one, two = run_processes(2, _to_and_fro, tmp_path, transport="shm")
    assert one == two > 0


def _stopped(pg: ProcessGroup, pids: Path) -> bool:
    """Receive from a rank that is stopped in a message; return whether memory is let alone then."""
    tensor = torch.zeros(NUMEL)
    if pg.rank() == 0:
        pids.write_text(str(os.getpid()))
        try:
            while True:
                pg.send(tensor, 1)
        except (PeerLostError, OperationTimeoutError):
            return True
    for _ in range(5):
        pg.recv(tensor, 0)
    sender = int(pids.read_text())
    stop = threading.Timer(0.03, os.kill, (sender, signal.SIGSTOP))
    stop.start()
    try:
        with pytest.raises(OperationTimeoutError):
            while True:
                pg.recv(tensor, 0, timeout=0.4)
    finally:
        tensor.fill_(-2.0)
        os.kill(sender, signal.SIGCONT)
        stop.join()
    time.sleep(0.1)
    pg.abort()  # or the sender goes on to its limit
    return bool((tensor == -2.0).all())


def test_a_stopped_process_writes_nothing_once_the_receive_has_ended(tmp_path: Path) -> None:
    assert run_processes(2, _stopped, tmp_path, tmp_path / "pid", transport="shm") == [True, True]
