"""`Reach`: steps bound to addresses, in this process and in others.

A script of these steps contains no addresses, but places in the tensors of a call and in those that others
expose: so it also serves tensors at other addresses, as long as they can be accessed in the same way.

The action of a bound step is called with the operation alone. Its arguments are made beforehand: in the
kernel's form for moves by the kernel, and as tensors for folds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from dist2.backends.socket import bound_steps
from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Fold, Span, Step
from dist2.backends.socket.bound_steps import (
    FIXED,
    Bound,
    Folding,
    Way,
    copying,
    copying_own,
    fencing,
    folding,
    reading,
)
from dist2.backends.socket.layout import Layout, Parts
from dist2.backends.socket.memory import copy_bytes, tensor_at
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.lending import Lent
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.errors import PeerLostError
from dist2.operation.signature import Operation

FOLD_BYTES = 256 << 10
"""Blocks in which memory of other processes is fetched and folded: all of them fit the second-level cache."""
LEAST_FOLD_BYTES = 64 << 10
"""Shorter ones take more system calls than the cache saves."""

Action = Callable[[Operation], object]


@attrs.frozen
class Place:
    """The begin of a span.

    Attributes:
        pid: In which process; 0: this one.
        address: Where in its memory.
        any_call: The same for a script.
        owner: Which rank lent it; -1: it is the caller's.
    """

    pid: int
    address: int
    any_call: bound_steps.Place
    owner: int = -1

    def after(self, nbytes: int) -> Place:
        """Return a place further on."""
        tensor, at = self.any_call[:2]
        return Place(self.pid, self.address + nbytes, (tensor, at + nbytes), self.owner)


def fold_bytes(world_size: int) -> int:
    """Return how long blocks are, a power of two: each rank has one, and several share a cache."""
    block = FOLD_BYTES
    while block > LEAST_FOLD_BYTES and block * world_size > 2 * FOLD_BYTES:
        block //= 2
    return block


class Scratch:
    """Blocks of memory that the programs of a group use in turn, each for one fold.

    Args:
        blocks: How many; each is `FOLD_BYTES` long.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._memory: torch.Tensor | None = None

    def block(self, index: int) -> int:
        """Return where a block begins; it stays there."""
        if self._memory is None:
            self._memory = torch.empty(self._blocks * FOLD_BYTES, dtype=torch.uint8)
        return self._memory.data_ptr() + index * FOLD_BYTES


class Reach:
    """Binds the steps of one program.

    Args:
        board: The group's shared memory.
        recall: That board's recall.
        scratch: Of the group: a block for each rank.
        layout: How the tensors are cut into parts.
        fold: For reductions.
        lends: Which buffer the others reach into.
    """

    def __init__(
        self,
        board: Board,
        recall: Recall,
        scratch: Scratch,
        layout: Layout,
        fold: Folding | None,
        lends: Buffer | None,
    ) -> None:
        self._board = board
        self._recall = recall
        self._scratch = scratch
        self._dtype = layout.dtype
        self._parts = {Buffer.INPUT: layout.inputs, Buffer.OUTPUT: layout.outputs}
        self._firsts = {Buffer.INPUT: 0, Buffer.OUTPUT: layout.inputs.tensors}
        self._fold = fold
        self._fold_bytes = fold_bytes(1 + len(board.members))
        self._lends_inputs = lends is Buffer.INPUT
        self._pidfds = {each.rank: each.neighbour.fileno() for each in board.members}

    def bind(
        self, steps: Sequence[Step], own: Mapping[Buffer, Sequence[int]], lent: Mapping[int, Lent]
    ) -> tuple[Bound, ...]:
        """Return steps made ready to run.

        Args:
            steps: Of a schedule that lends; they end with a fence, or one comes behind them.
            own: Where the caller's parts lie.
            lent: Where those of the others do.
        """
        bound: list[Bound] = []
        for step, behind in zip(steps, [*steps[1:], Fence()], strict=False):
            if isinstance(step, Fence):
                bound.append(self.fence())
            elif isinstance(step, Copy) and step.is_own and isinstance(behind, Fence) and self._lends_inputs:
                # Others reach into nothing that it writes: it may be made while they come to the fence.
                bound += self._own_copy(step, own)
            elif isinstance(step, Copy):
                dst, src = self._place(step.dst, own, lent), self._place(step.src, own, lent)
                bound += self._moves(dst, src, step.dst.numel * self._dtype.itemsize, step.backwards)
            elif isinstance(step, Fold):
                places = [self._place(span, own, lent) for span in step.srcs]
                nbytes = step.dst.numel * self._dtype.itemsize
                bound += self._folds(self._place(step.dst, own, lent), places, nbytes)
            else:
                raise TypeError(f"a schedule that lends has no {type(step).__name__}")
        return tuple(bound)

    def fence(self) -> Bound:
        """Return a fence of an operation that lends."""
        return fencing(self._recall.fence, self._recall.check)

    def _own_copy(self, step: Copy, own: Mapping[Buffer, Sequence[int]]) -> list[Bound]:
        dst, src = self._place(step.dst, own, {}), self._place(step.src, own, {})
        nbytes = step.dst.numel * self._dtype.itemsize
        action = self._copies(dst.address, src.address, nbytes)
        return [copying_own(action, dst.any_call, src.any_call, nbytes, _way(step.backwards))]

    def _copies(self, to: int, start: int, nbytes: int) -> Action:
        return lambda operation: copy_bytes(to, start, nbytes)

    def _place(self, span: Span, own: Mapping[Buffer, Sequence[int]], lent: Mapping[int, Lent]) -> Place:
        itemsize = self._dtype.itemsize
        if span.buffer is Buffer.LENT:
            theirs, start = lent[span.owner], span.start * itemsize
            any_call = theirs.first + span.part, start
            return Place(theirs.pid, theirs.addresses[span.part] + start, any_call, span.owner)
        part, before = _part_of(self._parts[span.buffer], span)
        start = (span.start - before) * itemsize
        tensor, shift = self.part_of_call(span.buffer, part)
        return Place(0, own[span.buffer][part] + start, (tensor, shift + start))

    def part_of_call(self, buffer: Buffer, part: int) -> tuple[int, int]:
        """Return in which tensor of a call a part lies, and how many bytes from its beginning."""
        parts, first = self._parts[buffer], self._firsts[buffer]
        if parts.single:
            return first, sum(parts.numels[:part]) * self._dtype.itemsize
        return first + part, 0

    def _moves(self, dst: Place, src: Place, nbytes: int, backwards: bool = False) -> list[Bound]:
        """Return the one copy."""
        to, start = dst.address, src.address
        places = dst.any_call, src.any_call
        if src.pid:
            read = self._reaching(cross_memory.bound_read(src.pid, to, start, nbytes), src)
            return [reading(read, src.owner, src.pid, self._pidfds[src.owner], *places, nbytes, backwards)]
        return [copying(self._copies(to, start, nbytes), *places, nbytes, _way(backwards))]

    def _folds(self, dst: Place, srcs: Sequence[Place], nbytes: int) -> list[Bound]:
        if not any(src.pid for src in srcs):
            return [self._folding(dst, srcs, nbytes)]
        bound: list[Bound] = []
        for start in range(0, nbytes, self._fold_bytes):
            sources = [src.after(start) for src in srcs]
            bound += self._fold_block(dst.after(start), sources, min(self._fold_bytes, nbytes - start))
        return bound

    def _fold_block(self, dst: Place, srcs: Sequence[Place], nbytes: int) -> list[Bound]:
        """Fetch a block of other processes' memory, and fold it."""
        bound: list[Bound] = []
        here = []
        for index, src in enumerate(srcs):
            local = self._block(index) if src.pid else src
            if local is not src:
                bound += self._moves(local, src, nbytes)
            here.append(local)
        return [*bound, self._folding(dst, here, nbytes)]

    def _block(self, index: int) -> Place:
        address = self._scratch.block(index)
        return Place(0, address, (FIXED, address))

    def _folding(self, dst: Place, srcs: Sequence[Place], nbytes: int) -> Bound:
        assert self._fold is not None  # only reductions have folds, and theirs is bound
        fold, dtype = self._fold.function, self._dtype
        numel = nbytes // dtype.itemsize
        target, *views = [tensor_at(each.address, dtype, numel) for each in (dst, *srcs)]
        places = [src.any_call for src in srcs]
        return folding(lambda operation: fold(target, views), self._fold, dst.any_call, places, nbytes, numel)

    def _reaching(self, move: Callable[[], None], place: Place) -> Action:
        board, owner = self._board, place.owner
        pidfd = self._pidfds[owner]

        def reach(operation: Operation) -> None:
            try:
                move()
                cross_memory.check_alive(pidfd)
            except OSError as error:
                board.check(operation, owner)  # it died, left or aborted: that is the better answer
                message = f"memory of {board.names([owner])} cannot be reached: {error}"
                raise PeerLostError(message, ranks=[owner]) from error

        return reach


def _way(backwards: bool) -> Way:
    return Way.BACKWARDS if backwards else Way.FORWARDS


def _part_of(parts: Parts, span: Span) -> tuple[int, int]:
    """Return the part that a span lies in, and the elements before that part."""
    before = 0
    for part, count in enumerate(parts.numels):
        if span.start < before + count:
            assert span.stop <= before + count  # schedules that lend never reach across parts
            return part, before
        before += count
    raise IndexError(f"{span} lies outside of the parts {parts.numels}")
