"""Long messages that are read by and by: shared with a sender that comes for whatever is read."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import attrs
import pytest
import torch
from desks import BUFFER, CLAIMS, DONE, FAILED, GUARD, OPEN, WAITS, blocks_written, stay_awake
from processes import run_processes

from dist2 import ProcessGroup
from dist2.backends.socket.transport import cross_memory, shared_memory
from dist2.backends.socket.transport.links.ring import HEADER_BYTES, RingReader
from dist2.backends.socket.transport.raw import address_of
from dist2.compiled import messages
from dist2.runtime.deadline import FOREVER_NS, PAST_NS

pytestmark = [
    pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory"),
    pytest.mark.skipif(messages is None, reason="needs the parts in C"),
]

ALL_LOANS = (1 << 64) - 1
BLOCK = 32 << 10
BLOCKS = 4
NBYTES = BLOCKS * BLOCK
MORE, WHOLE, NOT_SO = 0, 1, -1


@attrs.frozen
class Loan:
    """A message of this very process, which is its sender and its receiver."""

    ring: RingReader
    message: bytearray
    buffer: bytearray

    @property
    def words(self) -> memoryview:
        return self.ring._words

    def share(self, number: int) -> bool:
        return self.ring.share(os.getpid(), number, address_of(memoryview(self.buffer)), NBYTES)

    def read(self, until_ns: int = FOREVER_NS) -> int:
        there, here = address_of(memoryview(self.message)), address_of(memoryview(self.buffer))
        return self.ring.read_share(os.getpid(), there, here, NBYTES, until_ns)

    def write(self) -> bool:
        """Write the last block as the sender does; whether the kernel did."""
        nothing, offset = ctypes.c_uint64(), NBYTES - BLOCK
        stretch = cross_memory._Stretch
        message = address_of(memoryview(self.message)) + offset
        here = (stretch * 2)(stretch(ctypes.addressof(nothing), 8), stretch(message, BLOCK))
        there = (stretch * 2)(stretch(self.words[GUARD], 8), stretch(self.words[BUFFER] + offset, BLOCK))
        return bool(cross_memory._write(os.getpid(), here, 2, there, 2, 0) == 8 + BLOCK)


@pytest.fixture
def loan() -> Loan:
    memory = memoryview(bytearray(HEADER_BYTES + 4096))
    made = Loan(RingReader(memory, os.getpid()), bytearray(os.urandom(NBYTES)), bytearray(NBYTES))
    made.words[WAITS] = ALL_LOANS
    return made


@pytest.mark.parametrize("waits", [5, ALL_LOANS])
def test_whom_nobody_helps_reads_all(loan: Loan, waits: int) -> None:
    loan.words[WAITS] = waits
    assert loan.share(5)
    assert loan.words[OPEN] == 5
    assert loan.read() == WHOLE
    assert loan.buffer == loan.message


@pytest.mark.parametrize("waits", [0, 4])
def test_nothing_is_shared_with_a_sender_that_does_not_come(loan: Loan, waits: int) -> None:
    loan.words[WAITS] = waits
    assert not loan.share(5)
    assert loan.words[OPEN] == 0


def test_once_its_time_is_over_a_block_is_read_at_a_time(loan: Loan) -> None:
    assert loan.share(5)
    for block in range(1, BLOCKS + 1):
        assert loan.read(PAST_NS) == MORE
        assert loan.buffer == loan.message[: block * BLOCK] + bytes(NBYTES - block * BLOCK)
    assert loan.read(PAST_NS) == WHOLE


def test_a_part_that_the_sender_writes_is_waited_for(loan: Loan) -> None:
    assert loan.share(5)
    loan.words[CLAIMS] += 1
    assert loan.read() == MORE
    assert loan.buffer == loan.message[:-BLOCK] + bytes(BLOCK)
    assert not loan.share(6), "one at a time"
    assert loan.write()
    loan.words[DONE] += 1
    assert loan.read() == WHOLE
    assert loan.buffer == loan.message
    assert loan.share(6)


def test_what_the_sender_could_not_write_is_told(loan: Loan) -> None:
    assert loan.share(5)
    loan.words[CLAIMS] += 1
    loan.words[FAILED] = 5
    loan.words[DONE] += 1
    assert loan.read() == NOT_SO
    assert loan.share(6)
    assert loan.read() == WHOLE, "that was another message"


def test_what_cannot_be_read_is_told(loan: Loan) -> None:
    assert loan.share(5)
    here = address_of(memoryview(loan.buffer))
    assert loan.ring.read_share(os.getpid(), 0, here, NBYTES, FOREVER_NS) == NOT_SO
    assert loan.share(6)
    loan.words[CLAIMS] += 1
    for _ in range(2):
        assert loan.ring.read_share(os.getpid(), 0, here, NBYTES, FOREVER_NS) == MORE, "the sender is at it"
    loan.words[DONE] += 1
    assert loan.ring.read_share(os.getpid(), 0, here, NBYTES, FOREVER_NS) == NOT_SO


def test_claims_say_which_loan_they_are_for(loan: Loan) -> None:
    claimed = set()
    for number in (5, 6, (1 << 30) + 7):
        assert loan.share(number)
        claimed.add(loan.words[CLAIMS])
        assert loan.read() == WHOLE
        claimed.add(loan.words[CLAIMS])
    assert len(claimed) == 6, "who has one of these in mind finds it changed"


def test_what_is_given_up_is_written_no_more_and_its_sender_is_waited_for(loan: Loan) -> None:
    assert loan.share(5)
    loan.words[CLAIMS] += 1
    assert loan.read(PAST_NS) == MORE
    loan.ring.recall()
    assert not loan.write()
    assert loan.buffer == loan.message[:BLOCK] + bytes(NBYTES - BLOCK)
    assert not loan.share(6), "its sender is yet to count what it could not write"
    loan.words[FAILED] = 5
    loan.words[DONE] += 1
    assert loan.share(6)
    assert loan.read() == WHOLE
    assert loan.buffer == loan.message


def test_what_nobody_is_at_is_given_up_at_once(loan: Loan) -> None:
    assert loan.share(5)
    guard = loan.words[GUARD]
    assert loan.read(PAST_NS) == MORE
    loan.ring.recall()
    loan.ring.recall()
    assert loan.share(6)
    assert loan.words[GUARD] == guard, "the page is as good as before"


def _windows(pg: ProcessGroup) -> int:
    """Exchange windows of messages; return how many blocks senders have written."""
    rank, written = pg.rank(), torch.zeros(1)
    stay_awake(pg)
    end = time.monotonic() + 30  # it takes two ranks that have a core each at the same time
    while not written and time.monotonic() < end:
        for numel in (16_385, 100_003, (1 << 20) + 1):
            for turn in range(4):
                if turn % 2 == rank:
                    sent = [torch.arange(numel, dtype=torch.float32) + each for each in range(6)]
                    works = [pg.isend(each, 1 - rank, tag=tag % 2) for tag, each in enumerate(sent)]
                    for work in works if turn < 2 else reversed(works):
                        work.wait()
                        written += blocks_written(pg, 1 - rank)
                else:
                    got = [torch.zeros(numel) for _ in range(6)]
                    works = [pg.irecv(each, 1 - rank, tag=tag % 2) for tag, each in enumerate(got)]
                    for each, work in enumerate(works):
                        work.wait()
                        assert torch.equal(got[each], torch.arange(numel, dtype=torch.float32) + each)
        pg.all_reduce(written)
    return int(written)


@pytest.mark.alone
def test_who_waits_for_what_was_posted_moves_a_part_of_what_is_read(tmp_path: Path) -> None:
    one, two = run_processes(2, _windows, tmp_path, transport="shm")
    assert one == two > 0
