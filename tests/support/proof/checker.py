"""A proof by running: the schedules of all ranks in lockstep, on symbols instead of numbers.

    prove([request] * world_size, schedules, ordered=True)

An element is the ordered list of its contributions. The run finds deadlocks, messages that do not match,
reads of unwritten elements, memory that one step both sends and overwrites, and races in shared memory; at
the end every element must fulfil the contract of the operation: from every rank exactly once, or in rank
order if the algorithm claims to be *ordered*.

Messages complete only when both sides have posted them, which is the strictest behaviour of a transport. Only
waits at fences order the accesses of two ranks to shared or exposed memory; the order of this run does not
count. A fence is one of the ranks of one host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import (
    Buffer,
    Copy,
    Exchange,
    Fence,
    Fold,
    Schedule,
    Span,
    Step,
)
from dist2.operation.kinds import OpKind
from support.proof.contract import promises_of
from support.proof.lockstep import Channel, Meeting, Posted, Rank, Sent
from support.proof.races import Accesses, Moment
from support.proof.symbols import UNDEFINED, BrokenScheduleError, Symbols

_INPUT, _SLOT, _LENT = Buffer.INPUT, Buffer.SLOT, Buffer.LENT
_PIECES = 2
"""How many pieces the boards have here: as few as any may have, for more make it easier."""
_CALLERS = frozenset({Buffer.INPUT, Buffer.OUTPUT})
"""Buffers that may be one memory."""


def prove(
    requests: Sequence[Request], schedules: Sequence[Schedule], ordered: bool, in_place: bool = False
) -> None:
    """Check the schedules of one operation.

    Args:
        requests: The request of each rank; they differ for `all_to_all` alone.
        schedules: The steps of each rank.
        ordered: Whether results must be folded in rank order.
        in_place: Whether ``INPUT`` and ``OUTPUT`` share memory, where the operation allows it.

    Raises:
        BrokenScheduleError: They break the contract of the operation; the message says where.
    """
    machine = Machine(len(schedules), max(schedule.slot for schedule in schedules), requests[0].layout)
    machine.run(requests, schedules, ordered, in_place)
    machine.check_races()


class Machine:
    """All ranks of a group, with symbols in their memory; runs one operation after another.

    Flat operations use the two slots of each rank in turn, and those that stream use pieces in turn: the next
    one once all have come to a fence behind its last use. Their contents stay, and the run checks for races
    across operations.

    Args:
        world_size: Ranks of the group.
        slot: Elements of each of a rank's two slots, and of each piece.
        layout: Number of each rank's host; empty: all share one.
    """

    def __init__(self, world_size: int, slot: int, layout: tuple[int, ...] = ()) -> None:
        self.symbols = Symbols(world_size, layout)
        self._host_of = layout or (0,) * world_size
        self._slot = slot
        self._slots = [[UNDEFINED] * ((2 + _PIECES) * slot) for _ in range(world_size)]
        self._turn = 0
        self._piece = 0  # how many were claimed so far
        self._slot_at = 0  # of the current operation: a slot, or a piece behind the two
        self._moments = [self._first_moment(rank) for rank in range(world_size)]
        self._uses: dict[
            int, list[int]
        ] = {}  # of each piece: to how many fences each rank had come after its use
        self._operations = 0
        self._accesses = Accesses()
        self._ranks: list[Rank] = []
        self._ready: list[Rank] = []
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._channels: defaultdict[tuple[int, int], Channel] = defaultdict(Channel)

    def run(
        self, requests: Sequence[Request], schedules: Sequence[Schedule], ordered: bool, in_place: bool
    ) -> None:
        """Run one operation and check its result against its contract."""
        if len({(schedule.slot, schedule.streams) for schedule in schedules}) != 1:
            raise BrokenScheduleError("ranks disagree about the slot")
        self._claim(schedules[0])
        promises = promises_of(requests, self.symbols)
        self._operations += 1
        self._ranks = [
            Rank(number, schedule, promise, in_place, self._moments[number], request)
            for number, (request, schedule, promise) in enumerate(
                zip(requests, schedules, promises, strict=True)
            )
        ]
        self._callers_touch()
        self._ready = list(self._ranks)
        while self._ready:
            self._advance(self._ready.pop())
        stuck = [rank for rank in self._ranks if not rank.has_finished]
        if stuck:
            raise BrokenScheduleError(f"deadlock: {'; '.join(map(str, stuck))}")
        self._callers_touch()
        for rank, promise in zip(self._ranks, promises, strict=True):
            try:
                promise.check(rank.output, self.symbols, ordered)
            except BrokenScheduleError as error:
                raise BrokenScheduleError(f"rank {rank.number}: {error}") from None
        if requests[0].family is OpKind.BARRIER:
            self._check_heard()
        self._moments = [rank.moment for rank in self._ranks]
        self._check_fences()
        if schedules[0].streams:
            self._uses[self._slot_at] = [moment.came for moment in self._moments]
        elif schedules[0].slot or any(isinstance(step, Fence) for each in schedules for step in each.steps):
            self._turn = 1 - self._turn

    def _first_moment(self, rank: int) -> Moment:
        host = self._host_of[rank]
        beside = tuple([other for other, where in enumerate(self._host_of) if where == host])
        return Moment(rank, 0, (0,) * len(self._host_of), beside)

    def _claim(self, schedule: Schedule) -> None:
        """Find where in the slots an operation has its place; for a piece used before, wait for all."""
        self._slot_at = self._turn
        if not schedule.streams:
            return
        self._slot_at = 2 + self._piece % _PIECES
        self._piece += 1
        if self._slot_at not in self._uses:
            return
        for rank, came in enumerate(self._uses[self._slot_at]):
            meeting = self._meetings[self._host_of[rank], came + 1]
            self._moments[rank] = self._moments[rank].after_waiting(meeting.known())

    def _callers_touch(self) -> None:
        """Note that callers own exposed memory before the first and after the last fence."""
        for rank in self._ranks:
            if rank.schedule.lends is not None:
                cells, base, length = rank.memory[rank.schedule.lends.value]
                self._accesses.wrote(self._memory_id(rank, cells), rank.moment, base, base + length)

    def check_races(self) -> None:
        """Check that between two fences no rank read memory that another one wrote, in all operations so far.

        Raises:
            BrokenScheduleError: A rank did.
        """
        self._accesses.check()

    def _advance(self, rank: Rank) -> None:
        """Run steps of a rank until it has to wait."""
        try:
            while not rank.pending and not rank.has_finished:
                step = rank.steps[rank.position]
                rank.position += 1
                self._start(rank, step)
        except BrokenScheduleError as error:
            raise BrokenScheduleError(f"rank {rank.number}, step {rank.position - 1}: {error}") from None

    def _start(self, rank: Rank, step: Step) -> None:
        if isinstance(step, Exchange):
            self._exchange(rank, step)
        elif isinstance(step, Copy):
            self._check_operands(rank, step.dst, (step.src,))
            values = self._read(rank, step.src)
            if not self._is_itself(rank, step):  # runners leave such copies out
                self._write(rank, step.dst, values)
        elif isinstance(step, Fold):
            self._check_operands(rank, step.dst, step.srcs)
            columns = zip(*(self._read(rank, span) for span in step.srcs), strict=True)
            fold = self.symbols.fold
            self._write(rank, step.dst, [fold(column, step.final) for column in columns])
        else:
            self._fence(rank, step)

    # Memory

    def _locate(self, rank: Rank, span: Span) -> tuple[list[int], int, int]:
        """Return the cells that a span lies in, and where."""
        start, stop = span.start, span.stop
        if span.buffer is _LENT:
            if self._host_of[span.owner] != self._host_of[rank.number]:
                raise BrokenScheduleError(f"reaches into memory lent on another host: {span}")
            return self._locate_lent(span)
        if span.buffer is not _SLOT:
            cells, base, length = rank.memory[span.buffer._value_]
            if not 0 <= start <= stop <= length:
                raise BrokenScheduleError(f"{span} leaves its buffer of {length}")
            return cells, base + start, base + stop
        if not 0 <= start <= stop <= rank.schedule.slot:
            raise BrokenScheduleError(f"{span} leaves its slot of {rank.schedule.slot}")
        if self._host_of[span.owner] != self._host_of[rank.number]:
            raise BrokenScheduleError(f"reaches into a slot on another host: {span}")
        base = self._slot_at * self._slot
        return self._slots[span.owner], base + start, base + stop

    def _locate_lent(self, span: Span) -> tuple[list[int], int, int]:
        owner = self._ranks[span.owner]
        if owner.schedule.lends is None:
            raise BrokenScheduleError(f"{span} is not lent")
        cells, base, _ = owner.memory[owner.schedule.lends._value_]
        bounds = owner.lent_bounds
        first, end = bounds[span.part], bounds[span.part + 1]
        if not first <= first + span.start <= first + span.stop <= end:
            raise BrokenScheduleError(f"{span} leaves its part of {end - first}")
        return cells, base + first + span.start, base + first + span.stop

    def _memory_id(self, rank: Rank, cells: list[int]) -> tuple[object, ...]:
        """Name a caller's memory in this operation: one name where ``INPUT`` and ``OUTPUT`` are one."""
        is_input = cells is rank.memory[_INPUT._value_][0]
        return (self._operations, rank.number, "INPUT" if is_input else "OUTPUT")

    def _watched(self, rank: Rank, span: Span, cells: list[int]) -> tuple[object, ...] | None:
        """Return the name of memory that several ranks may touch; None for a rank's own."""
        if span.buffer is _SLOT:
            return ("slot", span.owner)
        if span.buffer is _LENT:
            return self._memory_id(self._ranks[span.owner], cells)
        if span.buffer in _CALLERS and rank.schedule.lends is not None:
            return self._memory_id(rank, cells)
        return None

    def _read(self, rank: Rank, span: Span) -> list[int]:
        cells, start, stop = self._locate(rank, span)
        memory = self._watched(rank, span, cells)
        if memory is not None:
            self._accesses.read(memory, rank.moment, start, stop)
        values = cells[start:stop]
        if UNDEFINED in values:
            raise BrokenScheduleError(f"reads {span}, which is undefined from {values.index(UNDEFINED)} on")
        return values

    def _write(self, rank: Rank, span: Span, values: list[int]) -> None:
        if span.buffer is _INPUT:
            raise BrokenScheduleError(f"writes {span}")
        if span.buffer is _SLOT and span.owner != rank.number:
            raise BrokenScheduleError(f"writes the slot of another: {span}")
        if span.buffer is _LENT:
            raise BrokenScheduleError(f"writes the memory of another: {span}")
        cells, start, stop = self._locate(rank, span)
        memory = self._watched(rank, span, cells)
        if memory is not None:
            self._accesses.wrote(memory, rank.moment, start, stop)
        cells[start:stop] = values

    def _is_itself(self, rank: Rank, step: Copy) -> bool:
        """Whether a copy's source and destination are one memory, in operations in place."""
        (cells, start, _), (others, other_start, _) = (self._locate(rank, s) for s in (step.dst, step.src))
        return cells is others and start == other_start and step.dst.buffer is not _INPUT

    def _check_operands(self, rank: Rank, dst: Span, srcs: Sequence[Span]) -> None:
        """Check that operands are of one length, and the same memory or none of it."""
        for src in srcs:
            if src.stop - src.start != dst.stop - dst.start:
                raise BrokenScheduleError(f"lengths differ: {dst} from {src}")
            if src.buffer is dst.buffer or _CALLERS.issuperset((src.buffer, dst.buffer)):
                cells, start, stop = self._locate(rank, dst)
                others, other_start, other_stop = self._locate(rank, src)
                if cells is others and start != other_start and start < other_stop and other_start < stop:
                    raise BrokenScheduleError(f"overlap in part: {dst} and {src}")

    # Messages and fences

    def _exchange(self, rank: Rank, step: Exchange) -> None:
        self._check_disjoint(rank, step)
        rank.pending = len(step.sends) + len(step.recvs)
        for send in step.sends:
            waiting = self._channels[rank.number, send.peer]
            message = (rank, send.span, self._read(rank, send.span), rank.heard)
            if waiting.recvs:
                self._deliver(message, waiting.recvs.popleft())
            else:
                waiting.sends.append(message)
        for recv in step.recvs:
            waiting = self._channels[recv.peer, rank.number]
            if waiting.sends:
                self._deliver(waiting.sends.popleft(), (rank, recv.span))
            else:
                waiting.recvs.append((rank, recv.span))

    def _deliver(self, sent: Sent, posted: Posted) -> None:
        sender, send, values, heard = sent
        receiver, recv = posted
        if len(values) != recv.stop - recv.start:
            raise BrokenScheduleError(f"rank {sender.number} sends {send} to {receiver.number} into {recv}")
        self._write(receiver, recv, values)
        receiver.heard |= heard
        for side in (sender, receiver):
            side.pending -= 1
            if not side.pending:
                self._ready.append(side)

    def _check_disjoint(self, rank: Rank, step: Exchange) -> None:
        """Check that received spans overlap neither sent spans nor each other."""
        places = [(*self._place(rank, recv.span), True) for recv in step.recvs]
        if not places:
            return
        places += [(*self._place(rank, send.span), False) for send in step.sends]
        if len(places) > 1:
            places.sort()
        memory, reach, received = 0, 0, 0  # where the spans so far end, and where the received ones do
        for cells, start, stop, is_received in places:
            if cells != memory:
                memory, reach, received = cells, 0, 0
            if start < (reach if is_received else received) and start < stop:
                raise BrokenScheduleError(
                    f"receives into memory that the step also sends or receives: {step}"
                )
            if stop > reach:
                reach = stop
            if is_received and stop > received:
                received = stop

    def _place(self, rank: Rank, span: Span) -> tuple[int, int, int]:
        cells, start, stop = self._locate(rank, span)
        return id(cells), start, stop

    def _fence(self, rank: Rank, step: Fence) -> None:
        where = self._host_of[rank.number], rank.moment.came + 1
        meeting = self._meetings.get(where)
        if meeting is None:
            meeting = self._meetings[where] = Meeting(rank.moment.beside)
        rank.pending = 1
        for freed in meeting.come(rank, step.awaited):
            freed.pending = 0
            if freed is not rank:  # that one goes on by itself
                self._ready.append(freed)

    def _check_fences(self) -> None:
        for moment in self._moments:
            first = self._moments[moment.beside[0]]
            if moment.came != first.came:
                counts = f"{moment.came} fences, and rank {first.rank} to {first.came}"
                raise BrokenScheduleError(f"rank {moment.rank} has come to {counts}")

    def _check_heard(self) -> None:
        everybody = (1 << len(self._ranks)) - 1
        for rank in self._ranks:
            if rank.heard != everybody:
                raise BrokenScheduleError(f"rank {rank.number} leaves the barrier before all are in")
