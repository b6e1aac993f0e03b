"""`Bindings`: the steps of calls that expose tensors, computed once for each set of addresses.

The steps of a call are bound to the addresses of its own tensors and of the exposed ones of others (see
`reaching`). A script in C does the same steps for tensors at any address, as long as they can be accessed in
the same way: so Python binds again only for a kind of memory that no call had before.

A binding has a *variant* for either parity of a call's first fence, because the parity selects the tables of
exposed memory; and two more if a schedule can also run from its end (see `mirroring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import attrs
import torch

from dist2.backends.shared_tensors import locator_of
from dist2.backends.socket.algorithms.mirroring import mirrored
from dist2.backends.socket.algorithms.schedule import Buffer, Copy, Fence, Schedule, Step
from dist2.backends.socket.bound_steps import (
    Bound,
    Call,
    being_shared,
    expecting,
    finding,
    having_noted,
    noting,
    storing,
)
from dist2.backends.socket.flat import addresses
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.reaching import Reach
from dist2.backends.socket.script import Script, script_of
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.lending import HEADER_BYTES, MAX_LENT, Lending, Tables
from dist2.operation.signature import Operation
from dist2.runtime.cache import keep

MAX_KEPT = 64
"""Number of cached bindings, by addresses or kinds of memory; if there are more, the cache is cleared."""

LEAST_MIRRORED, MOST_MIRRORED = 256 << 10, 32 << 20
"""Calls that move so many bytes on a rank alternate in direction. Fewer bytes stay in the caches anyway; of
more, hardly any do, and libc may copy past the caches if it gets them in one call."""


@attrs.frozen(eq=False)
class Binding:
    """The steps after the first fence, bound to the memory that the members expose.

    Attributes:
        bound: All steps: check whether the exposed memory is shared, expose it, the steps before the first
            fence, the fence, check the others' exposed memory, the steps after it.
        fence: Number of the fence among them.
        behind: Number of the first step behind the second check.
        reached: Whether the others' exposed memory can be accessed; if not, the last step stops the script.
        by_kernel: Whether the kernel may move memory that is not mapped.
        script: The same in C, where there is one: for tensors anywhere.
    """

    bound: tuple[Bound, ...]
    fence: int
    behind: int
    reached: bool
    by_kernel: bool
    script: Script | None

    @property
    def is_native(self) -> bool:
        """Whether the script does all steps."""
        return self.script is not None and all(each.native is not None for each in self.bound)


@attrs.frozen(eq=False)
class Caller:
    """Cached facts about calls on the same memory of this process.

    Attributes:
        own: Where the caller's parts lie.
        lends: The exposed memory.
        shared: Which of it is shared memory.
        before: The steps before the first fence, by variant.
        bindings: By variant, exposed memory, and whether the kernel may move it.
    """

    own: dict[Buffer, list[int]]
    lends: tuple[int, ...]
    shared: tuple[bool, ...]
    before: dict[int, tuple[Bound, ...]] = attrs.field(factory=dict)
    bindings: dict[tuple[int, Tables, bool], Binding] = attrs.field(factory=dict)


@attrs.frozen
class _Halves:
    """The steps of a schedule before the first fence, and those after it."""

    before: Sequence[Step]
    after: Sequence[Step]

    @classmethod
    def of(cls, schedule: Schedule, asks: bool) -> _Halves:
        """Split a schedule at its first fence; if the call ``asks``, no copy precedes that fence."""
        steps = schedule.steps
        first = next(at for at, step in enumerate(steps) if isinstance(step, Fence))
        before, after = steps[:first], steps[first + 1 :]
        return cls((), (*after[:-1], *before, after[-1])) if asks else cls(before, after)


class Bindings:
    """Binds the steps of one rank in calls of one signature.

    Attributes:
        variants: How many there are: 2 or 4.

    Args:
        board: The group's shared memory.
        lending: That board's lending.
        reach: Binds steps to addresses.
        schedule: The steps of this rank.
        layout: The division of the tensors into parts.
        asks: The first fence only determines whether all memory can be accessed.
        noted: Number published with the first fence if the others may run another program.
    """

    def __init__(
        self,
        board: Board,
        lending: Lending,
        reach: Reach,
        schedule: Schedule,
        layout: Layout,
        asks: bool,
        noted: int | None,
    ) -> None:
        self._board = board
        self._lending = lending
        self._reach = reach
        self._layout = layout
        self._lends = schedule.lends
        self._noted = noted
        self._ways = _ways(schedule, layout.dtype.itemsize, asks)
        self.variants = 2 * len(self._ways)
        self._callers: dict[tuple[int, ...], Caller] = {}
        self._anywhere: dict[tuple[int, tuple[bool, ...], Tables, bool], Binding] = {}

    def caller(self, tensors: Call) -> Caller:
        """Return the cached facts about calls on this memory."""
        where = tuple([tensor.data_ptr() for side in tensors for tensor in side])
        caller = self._callers.get(where)
        return keep(self._callers, where, self._new_caller(*tensors), MAX_KEPT) if caller is None else caller

    def _new_caller(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Caller:
        layout, itemsize = self._layout, self._layout.dtype.itemsize
        own = {
            Buffer.INPUT: addresses(inputs, layout.inputs, itemsize),
            Buffer.OUTPUT: addresses(outputs, layout.outputs, itemsize),
        }
        lends = () if self._lends is None else tuple(own[self._lends])
        return Caller(own, lends, tuple([locator_of((address,)) is not None for address in lends]))

    def before(self, caller: Caller, variant: int) -> tuple[Bound, ...]:
        """Return the steps before the first fence: expose memory, publish it, and the first copies."""
        found = caller.before.get(variant)
        if found is None:
            steps = self._reach.bind(self._ways[variant >> 1].before, caller.own, {})
            found = caller.before[variant] = (self._offer(caller, variant & 1), *self._note(), *steps)
        return found

    def binding(self, caller: Caller, variant: int, by_kernel: bool) -> Binding:
        """Return a binding with a script for the exposed memory; its Python steps may have other addresses.

        All members have arrived at the first fence.

        Raises:
            PeerLostError: A member is gone.
        """
        key = variant, caller.shared, self._lending.kinds(variant & 1), by_kernel
        found = self._anywhere.get(key)
        if found is None:
            found = self.binding_here(caller, variant, by_kernel)
            if found.is_native:
                keep(self._anywhere, key, found, MAX_KEPT)
        return found

    def binding_here(self, caller: Caller, variant: int, by_kernel: bool) -> Binding:
        """Return the steps for the memory exposed now, on these tensors.

        Raises:
            PeerLostError: A member is gone.
        """
        key = variant, self._lending.tables(variant & 1), by_kernel
        found = caller.bindings.get(key)
        return keep(caller.bindings, key, self._bind(caller, *key), MAX_KEPT) if found is None else found

    def _bind(self, caller: Caller, variant: int, tables: Tables, by_kernel: bool) -> Binding:
        inputs, outputs = self._layout.inputs.tensors, self._layout.outputs.tensors
        lent = self._lending.reached(tables, by_kernel, inputs + outputs)
        before = (*self._look_at_own(caller), *self.before(caller, variant))
        looks, parts = [], 0
        for rank in [each.rank for each in self._board.members]:
            place, how = self._lending.place(rank, variant & 1), tables[rank][:HEADER_BYTES]
            if lent is None:
                looks.append(expecting(_never, place, how))
            else:
                theirs = lent[rank]
                looks.append(finding(_never, place, how, theirs.first, len(theirs.addresses), theirs.shift))
                parts += len(theirs.addresses)
        head = (*before, self._reach.fence(), *self._look_at_notes(), *looks)
        after: tuple[Bound, ...] = (Bound(_never),)
        if lent is not None:
            after = self._reach.bind(self._ways[variant >> 1].after, caller.own, lent)
        bound = (*head, *after)
        script = script_of(self._board, bound, inputs, outputs, parts)
        return Binding(bound, len(before), len(head), lent is not None, by_kernel, script)

    def _look_at_own(self, caller: Caller) -> list[Bound]:
        """Return a step that checks whether the own memory is of the same kind as before."""
        places = self._places(caller)
        return [being_shared(_never, *each) for each in zip(places, caller.shared, strict=False)]

    def _offer(self, caller: Caller, parity: int) -> Bound:
        """Return a callable that lends memory."""
        table, place = self._lending.table(caller.lends), self._lending.place(self._board.rank, parity)
        return storing(
            partial(self._lending.offer, caller.lends), place, table, HEADER_BYTES, self._places(caller)
        )

    def _places(self, caller: Caller) -> list[tuple[int, int]]:
        """Return where in the tensors of any call that lies whose addresses a table has."""
        if self._lends is None or len(caller.lends) > MAX_LENT:
            return []
        return [self._reach.part_of_call(self._lends, part) for part in range(len(caller.lends))]

    def _note(self) -> list[Bound]:
        """Return a callable that publishes, with the first fence, that this member runs this program."""
        board, noted = self._board, self._noted
        return [] if noted is None else [noting(lambda operation: board.note(operation, noted), noted)]

    def _look_at_notes(self) -> list[Bound]:
        """Return a callable that checks whether all published this."""
        return [] if self._noted is None else [having_noted(_never, self._noted)]


def _never(operation: Operation) -> None:
    raise AssertionError("a look that fails sends a program another way")


def _ways(schedule: Schedule, itemsize: int, asks: bool) -> tuple[_Halves, ...]:
    """Return the one way to run a schedule; or two, to be taken in turn."""
    moved = itemsize * sum(step.dst.numel for step in schedule.steps if isinstance(step, Copy))
    turned = mirrored(schedule) if LEAST_MIRRORED <= moved <= MOST_MIRRORED else None
    return tuple([_Halves.of(each, asks) for each in (schedule, turned) if each is not None])
