"""`Bound`: a step of a program with its addresses bound, to run in Python or in a script in C.

A bound step is a closure that does its work. For a script the same step is a tuple of a kind and its
arguments, in the order of ``reading.c``; it contains places in the tensors of a call instead of addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import attrs
import torch

from dist2.backends.socket.reduction import Fold, bind_fold
from dist2.backends.socket.transport.boards.control_words import ALL
from dist2.compiled import steps
from dist2.operation.kinds import ReduceKind, Reduction
from dist2.operation.signature import Operation

Tensors = Sequence[torch.Tensor]
Call = tuple[Tensors, Tensors]
Place = tuple[int, int] | tuple[int, int, int]
"""A tensor of a call (its inputs, then its outputs, then the parts that others lend: see `finding`) and a
number of bytes; or `FIXED` and an address; or `PIECE` and an address, to which is added where the piece
begins that was claimed last. Of three numbers the last is a rank, and the address counts from where its
region begins: such a place is one on any board."""
FIXED, PIECE = -1, -2


class Way(IntEnum):
    """Ways in which a script copies memory; numbers as in `script.h`.

    The first two copy in any order, and from the end if the copy is long; the third copies into a slot. The
    others are for blocks of data longer than the caches: into a slot, which stays in them; out of one, and
    past one, to memory that does not; and into a slot past the caches.
    """

    FORWARDS, BACKWARDS, FILL, IN, OUT, PAST, AWAY = range(7)


ONE_THREAD = 1 << 15
"""Elements up to which torch folds on one thread, as C does."""

_SUMS = {
    torch.float32: "sum_float32",
    torch.float64: "sum_float64",
    torch.complex64: "sum_float32",
    torch.complex128: "sum_float64",
    torch.int32: "sum_int32",
    torch.uint32: "sum_int32",
    torch.int64: "sum_int64",
    torch.uint64: "sum_int64",
}
_AVERAGES = {dtype: name.replace("sum", "average") for dtype, name in _SUMS.items() if "float" in name}


@attrs.frozen
class Folding:
    """How a program folds.

    Attributes:
        function: Folds tensors.
        native: Name of the equivalent in C; empty without one.
        divisor: Divisor of the final sum; 1: none.
    """

    function: Fold
    native: str = ""
    divisor: float = 1.0

    @classmethod
    def of(cls, reduction: Reduction, dtype: torch.dtype, world_size: int, final: bool = True) -> Folding:
        """Return how contributions of one dtype are folded; see `bind_fold`."""
        function = bind_fold(reduction, dtype, world_size, final)
        is_average = reduction.kind is ReduceKind.AVG and final
        if reduction.kind in (ReduceKind.SUM, ReduceKind.PREMUL_SUM, ReduceKind.AVG) and not is_average:
            return cls(function, _SUMS.get(dtype, ""))
        if is_average:
            return cls(function, _AVERAGES.get(dtype, ""), float(world_size))
        return cls(function)


@attrs.frozen
class Bound:
    """A step made ready to run.

    Attributes:
        action: Does it, or returns a callable that does; the program defines its arguments.
        native: The same for a script, which calls ``action`` where it cannot do it; None: only Python can.
    """

    action: Callable[[Any], Any]
    native: tuple[object, ...] | None = None


def further(step: Bound, nbytes: int) -> Bound:
    """Return a step of a flat program that works so many bytes further on in the tensors of a call.

    Only scripts need that: an action in Python finds its place in the frame.
    """
    if step.native is None:
        return step
    return Bound(step.action, tuple([_further(each, nbytes) for each in step.native]))


def _further(argument: object, nbytes: int) -> object:
    """Move one or more places of a step, and keep the rest."""
    if not isinstance(argument, tuple):
        return argument
    if isinstance(argument[0], tuple):
        return tuple([_further(place, nbytes) for place in argument])
    tensor, start, *owner = argument
    return (tensor, start + nbytes, *owner) if tensor >= 0 else argument


def copying(
    action: Callable[[Any], Any], dst: Place, src: Place, nbytes: int, way: Way = Way.FORWARDS
) -> Bound:
    """Bind a copy inside this process."""
    return _bound(action, "COPY", dst, src, nbytes, way)


def copying_own(
    action: Callable[[Any], Any], dst: Place, src: Place, nbytes: int, way: Way = Way.FORWARDS
) -> Bound:
    """Bind a copy between private memory of the caller, right before a fence."""
    return _bound(action, "OWN", dst, src, nbytes, way)


def copying_both(
    action: Callable[[Any], Any], slot: Place, passed: Place, src: Place, nbytes: int, way: Way
) -> Bound:
    """Bind a copy of a block to two places, for data longer than the caches: to a slot, and `Way.PAST`."""
    return _bound(action, "BOTH", slot, passed, src, nbytes, way)


def beside(step: Bound) -> Bound:
    """Return a copy that a script makes in turn with the one behind it; its action does it alone."""
    assert step.native is not None
    return _bound(step.action, "BESIDE", *step.native[1:])


def is_copy(step: Bound, *ways: Way) -> bool:
    """Whether a script copies a block in one of some ways, perhaps to two places."""
    if step.native is None:
        return False
    kind, *arguments = step.native
    return kind in (steps.COPY, steps.BOTH) and arguments[-1] in ways


def fencing(
    action: Callable[[Any], Any], check: Callable[[Operation], None] | None = None, whom: int = ALL
) -> Bound:
    """Bind a fence; ``check`` is called behind it if a member has given up an operation in which it lent."""
    return _bound(action, "FENCE", check, whom)


def claiming(action: Callable[[Any], Any], kind: int) -> Bound:
    """Bind logging the call, and the claim of a piece of one kind."""
    return _bound(action, "CLAIM", kind)


def folding(
    action: Callable[[Any], Any], fold: Folding, dst: Place, srcs: Sequence[Place], nbytes: int, numel: int
) -> Bound:
    """Bind a fold; several threads of torch's, where it has them, fold long vectors sooner than C."""
    if numel > ONE_THREAD and torch.get_num_threads() > 1:
        return Bound(action)
    if fold.native not in steps.FOLDS:
        return Bound(action)
    return _bound(action, "FOLD", fold.native, fold.divisor, dst, tuple(srcs), nbytes)


def reading(
    action: Callable[[Any], Any],
    rank: int,
    pid: int,
    pidfd: int,
    dst: Place,
    src: Place,
    nbytes: int,
    backwards: bool = False,
) -> Bound:
    """Bind a read of memory that a member exposes; backwards: a long read begins at its end."""
    return _bound(action, "READ", rank, pid, pidfd, dst, src, nbytes, backwards)


def expecting(action: Callable[[Any], Any], address: int, expected: bytes) -> Bound:
    """Bind a look at memory: the action is called if something else is there."""
    return _bound(action, "SAME", address, expected)


def being_shared(action: Callable[[Any], Any], place: Place, shared: bool) -> Bound:
    """Bind a look whether a tensor of the call is of `shared_empty`; the action is called if that differs."""
    return _bound(action, "SHARED", place, shared)


def storing(
    action: Callable[[Any], Any], address: int, stored: bytes, first: int = 0, places: Sequence[Place] = ()
) -> Bound:
    """Bind putting bytes at an address, where others read them behind the next fence: see `Board.prepare`.

    From byte ``first`` on a script puts where places lie in its call.
    """
    return _bound(action, "STORE", address, stored, first, tuple(places))


def finding(
    action: Callable[[Any], Any], address: int, expected: bytes, first: int, count: int, shift: int
) -> Bound:
    """Bind a check of the memory that a member exposes; the action is called if it has changed.

    The expected bytes are followed by ``count`` addresses, which are higher by ``shift`` in this process. In
    a script they are places from tensor ``first`` on.
    """
    return _bound(action, "LENT", address, expected, first, count, shift % (1 << 64))


def noting(action: Callable[[Any], Any], number: int) -> Bound:
    """Bind telling the other members a number with the next fence; the action is `Board.note`."""
    return _bound(action, "NOTE", number)


def having_noted(action: Callable[[Any], Any], number: int) -> Bound:
    """Bind a look whether all others noted a number for the last fence; the action is called if not."""
    return _bound(action, "NOTED", number)


def sending(
    action: Callable[[Any], Any], rail: object, header: bytes, src: Place, nbytes: int, number: int
) -> Bound:
    """Bind the send of a message over a rail; see `transport.messages.rails`."""
    return _bound(action, "SEND", rail, header, src, nbytes, number)


def receiving(
    action: Callable[[Any], Any], rail: object, header: bytes, dst: Place, nbytes: int, number: int
) -> Bound:
    """Bind a receive over a rail, and waiting for it."""
    return _bound(action, "RECEIVE", rail, header, dst, nbytes, number)


def seeing_off(action: Callable[[Any], Any], rail: object, number: int) -> Bound:
    """Bind waiting until the messages over a rail are sent, up to one."""
    return _bound(action, "SENT", rail, number)


def _bound(action: Callable[[Any], Any], kind: str, *arguments: object) -> Bound:
    return Bound(action, (getattr(steps, kind), *arguments))
