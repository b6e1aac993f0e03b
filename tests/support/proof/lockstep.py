"""The state of a run in lockstep: ranks with symbols in their memory, and the messages in flight."""

from __future__ import annotations

from collections import deque

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import Buffer, Schedule, Span
from dist2.backends.socket.algorithms.spans import offsets_of
from dist2.operation.kinds import OpKind
from support.proof.contract import Promise
from support.proof.races import Moment
from support.proof.symbols import UNDEFINED, BrokenScheduleError

_ONE_PART = frozenset(
    {
        (OpKind.ALL_GATHER, Buffer.INPUT),
        (OpKind.GATHER, Buffer.INPUT),
        (OpKind.SCATTER, Buffer.OUTPUT),
        (OpKind.REDUCE_SCATTER, Buffer.OUTPUT),
    }
)
"""One part in an operation of many parts."""


class Rank:
    """One rank in the run: its memory, its position, and the message or fence that it waits for."""

    def __init__(
        self,
        number: int,
        schedule: Schedule,
        promise: Promise,
        in_place: bool,
        moment: Moment,
        request: Request,
    ) -> None:
        self.number = number
        self.schedule = schedule
        self.steps = schedule.steps
        self.position = 0
        self.pending = 0
        self.moment = moment
        self.heard = 1 << number
        self.memory = _memory_of(promise, schedule.scratch, in_place)
        self._request = request

    @property
    def lent_bounds(self) -> list[int]:
        """Bounds of the parts that the rank exposes: one part if its caller has one tensor."""
        counts = self._request.counts
        if (self._request.family, self.schedule.lends) in _ONE_PART:
            counts = (counts[self.number % len(counts)],)
        return offsets_of(counts)

    @property
    def is_waiting(self) -> bool:
        return self.pending > 0

    @property
    def has_finished(self) -> bool:
        return self.position == len(self.steps) and not self.is_waiting

    @property
    def output(self) -> list[int]:
        cells, start, length = self.memory[Buffer.OUTPUT.value]
        return cells[start : start + length]

    def __str__(self) -> str:
        return f"rank {self.number} waits in step {self.position - 1}: {self.steps[self.position - 1]}"


Sent = tuple[Rank, Span, list[int], int]  # source, span, values, ranks known to the sender
Posted = tuple[Rank, Span]


class Channel:
    """One direction between two ranks: the unmatched messages, in order."""

    __slots__ = ("recvs", "sends")

    def __init__(self) -> None:
        self.sends: deque[Sent] = deque()
        self.recvs: deque[Posted] = deque()


class Meeting:
    """A fence of one host: the ranks that have arrived, and the ranks that each one waits for.

    Attributes:
        came: By rank: its knowledge at its arrival, and the ranks known to it.
    """

    def __init__(self, beside: tuple[int, ...]) -> None:
        self.came: dict[int, tuple[Moment, int]] = {}
        self._beside = beside
        self._for_all: list[Rank] = []
        self._for_one: list[tuple[int, Rank]] = []

    def come(self, rank: Rank, awaited: tuple[int, ...] | None) -> list[Rank]:
        """Have a rank arrive and wait for some ranks, or for all; return the ranks whose wait is over."""
        rank.moment = rank.moment.after_coming()
        self.came[rank.number] = (rank.moment, rank.heard)
        if awaited is None:
            self._for_all.append(rank)
        freed = [waiter for one, waiter in self._for_one if one == rank.number]
        for waiter in freed:
            _hear(waiter, *self.came[rank.number])
        if awaited is not None:
            freed += self._wait_for_some(rank, awaited)
        if len(self.came) == len(self._beside):
            freed += self._free_all()
        return freed

    def _wait_for_some(self, rank: Rank, awaited: tuple[int, ...]) -> list[Rank]:
        if len(awaited) > 1:
            raise BrokenScheduleError(f"waits for {awaited}: boards wait for all, for one, or for none")
        missing = [one for one in awaited if one not in self.came]
        for one in awaited:
            if one in self.came:
                _hear(rank, *self.came[one])
            else:
                self._for_one.append((one, rank))
        return [] if missing else [rank]

    def _free_all(self) -> list[Rank]:
        known, heard = self.known(), 0
        for _, each in self.came.values():
            heard |= each
        for rank in self._for_all:
            rank.moment = rank.moment.after_waiting(known)
            rank.heard |= heard
        return self._for_all

    def known(self) -> tuple[int, ...]:
        """Return the knowledge of a rank that has waited for all."""
        return tuple(map(max, *[moment.knows for moment, _ in self.came.values()]))


def _hear(rank: Rank, moment: Moment, heard: int) -> None:
    rank.moment = rank.moment.after_waiting(moment.knows)
    rank.heard |= heard


_Memory = dict[str, tuple[list[int], int, int]]  # by value: members of an Enum hash slowly


def _memory_of(promise: Promise, scratch: int, in_place: bool) -> _Memory:
    """Lay out the buffers of a rank: cells, where the buffer starts in them, its length."""
    inputs = list(promise.inputs)
    memory = {Buffer.SCRATCH.value: ([UNDEFINED] * scratch, 0, scratch)}
    if not in_place or promise.shared is None:
        memory[Buffer.INPUT.value] = (inputs, 0, len(inputs))
        memory[Buffer.OUTPUT.value] = ([UNDEFINED] * promise.output_numel, 0, promise.output_numel)
        return memory
    input_start, output_start = promise.shared
    cells = [UNDEFINED] * max(input_start + len(inputs), output_start + promise.output_numel)
    cells[input_start : input_start + len(inputs)] = inputs
    memory[Buffer.INPUT.value] = (cells, input_start, len(inputs))
    memory[Buffer.OUTPUT.value] = (cells, output_start, promise.output_numel)
    return memory
