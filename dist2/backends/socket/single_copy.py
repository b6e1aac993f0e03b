"""Runs schedules whose steps reach into the tensors of other ranks: no slots, no blocks.

What is mapped in this process (tensors of `dist2.shared_empty`, ranks that are threads) is folded and copied
straight out of. What only the kernel can reach is copied straight, and folded in blocks that stay in the
cache. If something cannot be reached, all ranks find out together and run another program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Fold, Schedule, Span
from dist2.backends.socket.flat import FoldFunction, Layout, Parts, addresses
from dist2.backends.socket.memory import copy_bytes, tensor_at
from dist2.backends.socket.staging import Program
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.board import Board
from dist2.backends.socket.transport.lending import Lending, Lent
from dist2.errors import PeerLostError
from dist2.operation import Operation

FOLD_BYTES = 256 << 10
"""Blocks in which memory of other processes is fetched and folded: all of them fit the second-level cache."""

Tensors = Sequence[torch.Tensor]


@attrs.frozen
class Place:
    """Where a span lies in any call.

    Attributes:
        buffer: Whose memory: the caller's (``INPUT``, ``OUTPUT``) or another rank's (``LENT``).
        owner: That rank.
        part: Which part of it.
        offset: Bytes from its start.
    """

    buffer: Buffer
    owner: int
    part: int
    offset: int


class Call:
    """One call: its addresses."""

    __slots__ = ("lent", "operation", "own")

    def __init__(self, operation: Operation, inputs: list[int], outputs: list[int]) -> None:
        self.operation = operation
        self.own = {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs}
        self.lent: dict[int, Lent] = {}

    def locate(self, place: Place) -> tuple[int, int]:
        """Return the process (0: this one) and the address."""
        if place.buffer is not Buffer.LENT:
            return 0, self.own[place.buffer][place.part] + place.offset
        lent = self.lent[place.owner]
        return lent.pid, lent.addresses[place.part] + place.offset


Action = Callable[[Call], None]


class Scratch:
    """Blocks of memory that the programs of a group use in turn."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, nbytes: int) -> int:
        """Return where so many bytes lie, as long as this object lives and nobody asks for more."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory.data_ptr()


class SingleCopyProgram:
    """An algorithm that lends memory, made ready for one signature.

    Args:
        board: The group's shared memory.
        lending: Of that board.
        scratch: Of the group.
        schedule: What this rank does.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        by_kernel: Whether the kernel may move what is not mapped.
        otherwise: What runs where memory cannot be reached.
    """

    def __init__(
        self,
        board: Board,
        lending: Lending,
        scratch: Scratch,
        schedule: Schedule,
        layout: Layout,
        fold: FoldFunction | None,
        by_kernel: bool,
        otherwise: Program,
    ) -> None:
        self._board = board
        self._lending = lending
        self._scratch = scratch
        self._dtype = layout.dtype
        self._parts = {Buffer.INPUT: layout.inputs, Buffer.OUTPUT: layout.outputs}
        self._lends = schedule.lends
        self._fold_function = fold
        self._by_kernel = by_kernel
        self._otherwise = otherwise
        first = next(at for at, step in enumerate(schedule.steps) if isinstance(step, Fence))
        self._before = [self._action(step) for step in schedule.steps[:first]]
        self._after = [self._action(step) for step in schedule.steps[first + 1 :]]

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors."""
        board, itemsize = self._board, self._dtype.itemsize
        call = Call(
            operation,
            addresses(inputs, self._parts[Buffer.INPUT], itemsize),
            addresses(outputs, self._parts[Buffer.OUTPUT], itemsize),
        )
        board.meet(operation)
        for action in self._before:
            action(call)
        self._lending.offer(() if self._lends is None else call.own[self._lends])
        board.fence(operation)
        lent = self._lending.taken(self._by_kernel)
        if lent is None:
            self._otherwise(operation, inputs, outputs)
            return
        call.lent = lent
        for action in self._after:
            action(call)

    # Steps

    def _action(self, step: object) -> Action:
        if isinstance(step, Fence):
            fence = self._board.fence
            return lambda call: fence(call.operation)
        if isinstance(step, Copy):
            return self._copying(step)
        if isinstance(step, Fold):
            return self._folding(step)
        raise TypeError(f"a schedule that lends has no {type(step).__name__}")

    def _place(self, span: Span) -> Place:
        itemsize = self._dtype.itemsize
        if span.buffer is Buffer.LENT:
            return Place(span.buffer, span.owner, span.part, span.start * itemsize)
        part, before = _part_of(self._parts[span.buffer], span)
        return Place(span.buffer, -1, part, (span.start - before) * itemsize)

    def _copying(self, step: Copy) -> Action:
        to, source = self._place(step.dst), self._place(step.src)
        nbytes = step.dst.numel * self._dtype.itemsize

        def copy(call: Call) -> None:
            target_pid, dst = call.locate(to)
            source_pid, src = call.locate(source)
            if target_pid:
                self._reach(cross_memory.write, call, to.owner, target_pid, dst, src, nbytes)
            elif source_pid:
                self._reach(cross_memory.read, call, source.owner, source_pid, dst, src, nbytes)
            elif dst != src:
                copy_bytes(dst, src, nbytes)

        return copy

    def _folding(self, step: Fold) -> Action:
        to, sources = self._place(step.dst), [self._place(span) for span in step.srcs]
        nbytes = step.dst.numel * self._dtype.itemsize
        fold, dtype = self._fold_function, self._dtype
        assert fold is not None  # only reductions have folds, and theirs is bound

        def run(call: Call) -> None:
            target = call.locate(to)
            found = [call.locate(source) for source in sources]
            if not any(pid for pid, _ in (target, *found)):
                numel = nbytes // dtype.itemsize
                views = [tensor_at(address, dtype, numel) for _, address in found]
                fold(tensor_at(target[1], dtype, numel), views)
                return
            for start in range(0, nbytes, FOLD_BYTES):
                self._fold_block(call, step, target, found, start, min(FOLD_BYTES, nbytes - start))

        return run

    def _fold_block(
        self,
        call: Call,
        step: Fold,
        target: tuple[int, int],
        sources: Sequence[tuple[int, int]],
        start: int,
        nbytes: int,
    ) -> None:
        """Fetch a block of what other processes have, fold it, and put the result where it belongs."""
        numel, dtype = nbytes // self._dtype.itemsize, self._dtype
        place = self._scratch.address((len(sources) + 1) * FOLD_BYTES)
        views = []
        for span, (pid, address) in zip(step.srcs, sources, strict=True):
            address += start
            if pid:
                self._reach(cross_memory.read, call, span.owner, pid, place, address, nbytes)
                address, place = place, place + FOLD_BYTES
            views.append(tensor_at(address, dtype, numel))
        pid, address = target
        result = place if pid else address + start
        assert self._fold_function is not None  # `_folding` has seen to it
        self._fold_function(tensor_at(result, dtype, numel), views)
        if pid:
            self._reach(cross_memory.write, call, step.dst.owner, pid, address + start, result, nbytes)

    def _reach(
        self,
        move: Callable[[int, int, int, int], None],
        call: Call,
        owner: int,
        pid: int,
        dst: int,
        src: int,
        nbytes: int,
    ) -> None:
        try:
            move(pid, dst, src, nbytes)
        except OSError as error:
            self._board.check(call.operation, owner)  # it died, left or aborted: that is the better answer
            raise PeerLostError(
                f"memory of rank {owner} cannot be reached: {error}", ranks=[owner]
            ) from error


def _part_of(parts: Parts, span: Span) -> tuple[int, int]:
    """Return the part that a span lies in, and the elements before that part."""
    before = 0
    for part, count in enumerate(parts.numels):
        if span.start < before + count:
            assert span.stop <= before + count  # schedules that lend never reach across parts
            return part, before
        before += count
    raise IndexError(f"{span} lies outside of the parts {parts.numels}")
