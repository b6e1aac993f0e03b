"""Groups and reductions as texts: the arguments of a custom operator that graphs can hold.

A group is ``rank/size name``. In a graph the rank is ``*``: every rank may compile or export the same
program, and a saved program runs in another process that has a group of that name and size. In a call
outside of graphs the rank is a number, because ranks may be threads of one process, where a name stands for
several groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.group.open_groups import named
from dist2.group.process_group import ProcessGroup
from dist2.operation.kinds import AnyReduceOp, ReduceOp, Reduction, premul_sum

_BY_WORD = {
    name.lower(): Reduction.of(getattr(ReduceOp, name))
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_FACTOR = "premul_sum("


def handle_of(x: torch.Tensor, pg: ProcessGroup) -> str:
    """Return the text that stands for a group in a call with a tensor.

    Raises:
        InvalidUsageError: ``x`` is no dense tensor, or ``pg`` no group of dist2.
        Dist2Error: The group is closed.
    """
    if torch.compiler.is_compiling():
        return f"*/{pg.size()} {pg.group_name}"
    if not isinstance(pg, ProcessGroup):
        raise ArgumentTypeError(
            f"pg must be a dist2.ProcessGroup, got {pg!r} ({type(pg).__name__}): make one with "
            f"dist2.new_group"
        )
    if not isinstance(x, torch.Tensor):
        remedy = ": pass torch.from_dlpack(x)" if hasattr(x, "__dlpack__") else ""
        raise ArgumentTypeError(f"x must be a tensor, got {x!r} ({type(x).__name__}){remedy}")
    if x.layout is not torch.strided:
        raise InvalidUsageError(
            f"x must be a dense (strided) tensor, got layout {x.layout}: pass x.to_dense(), or the tensors "
            f"that it consists of"
        )
    pg._runner.check_open()  # operators find groups by name, and could not tell why one is gone
    return f"{pg.info.rank}/{pg.info.world_size} {pg.info.name}"


def size_of(handle: str) -> int:
    """Return the number of ranks of the group that a text stands for."""
    return int(handle.partition(" ")[0].partition("/")[2])


def group_of(handle: str) -> ProcessGroup:
    """Return the group that a text stands for.

    Raises:
        InvalidUsageError: No open group of this process, or more than one, has the name.
    """
    place, _, name = handle.partition(" ")
    rank, _, size = place.partition("/")
    found = [each for each in named(name) if rank in ("*", str(each.info.rank))]
    if len(found) == 1 and found[0].info.world_size == int(size):
        return found[0]
    if not found:
        raise InvalidUsageError(
            f"no open group of this process has the name {name!r}, in which this program was compiled, "
            f"exported or run forward: make one with dist2.new_group(..., name={name!r}), or keep the group "
            f"open until the backward pass is done"
        )
    if len(found) == 1:
        raise InvalidUsageError(
            f"this program was compiled or exported for {size} ranks, and group {name!r} has "
            f"{found[0].info.world_size}: compile or export it again"
        )
    raise InvalidUsageError(
        f"group {name!r} has {len(found)} ranks that are threads of this process: a compiled or exported "
        f"program knows its group by name, so run it in one process for each rank"
    )


def _reduction_name(op: AnyReduceOp) -> str:
    return str(Reduction.of(op))


_constant_name: Callable[[AnyReduceOp], str] = torch.compiler.assume_constant_result(_reduction_name)


def reduction_name(op: AnyReduceOp) -> str:
    """Return the text that stands for a reduction."""
    # Before torch 2.12, Dynamo reads a member of an enumeration in C++, but does not take it for a constant.
    word = op.name.lower() if isinstance(op, type(ReduceOp.SUM)) else ""
    return word if word in _BY_WORD else _constant_name(op)


@lru_cache(maxsize=1024)
def reduction_of(word: str) -> Reduction:
    """Return the reduction that a text stands for."""
    if word.startswith(_FACTOR):
        return premul_sum(float(word.removeprefix(_FACTOR).removesuffix(")")))
    return _BY_WORD[word]
