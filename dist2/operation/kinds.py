"""The vocabulary of operations: their kinds and their reductions, as values."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import lru_cache

import attrs
import torch
from torch.distributed import ReduceOp

from dist2.errors import ArgumentTypeError, InvalidUsageError

__all__ = ["AVG", "MAX", "SUM", "OpKind", "ReduceKind", "ReduceOp", "Reduction", "premul_sum"]


class OpKind(enum.Enum):
    """The kind of an operation. The value is its name in methods, metrics, logs and errors.

    Attributes:
        is_p2p: Whether it involves two ranks instead of all.
    """

    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_COALESCED = "all_reduce_coalesced"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    ALL_GATHER_SINGLE = "all_gather_single"
    ALL_GATHER_SINGLE_COALESCED = "all_gather_single_coalesced"
    ALL_GATHER_V = "all_gather_v"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_SINGLE = "reduce_scatter_single"
    REDUCE_SCATTER_SINGLE_COALESCED = "reduce_scatter_single_coalesced"
    REDUCE_SCATTER_V = "reduce_scatter_v"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    BARRIER = "barrier"
    SEND = "send"
    RECV = "recv"

    __hash__ = object.__hash__  # each is one object; that of `Enum` is Python, and plans are found by it

    def __init__(self, word: str) -> None:
        self.is_p2p = word in ("send", "recv")


class ReduceKind(enum.Enum):
    """How contributions combine."""

    __hash__ = object.__hash__  # as of `OpKind`

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"


@attrs.frozen(eq=False)
class Reduction:
    """A reduction as a value: ours in place of torch's `ReduceOp`, which hashes and compares slowly.

    One instance a kind, and one a factor while it is among the latest, so that plans are found by identity: a
    second instance of a factor is equal to the ranks that compare calls, and costs another plan.

    Attributes:
        kind: How contributions combine.
        factor: The factor by which `PREMUL_SUM` multiplies each contribution first.
    """

    kind: ReduceKind
    factor: float | None = None

    def __reduce__(self) -> tuple[Callable[..., Reduction], tuple[ReduceKind, float | None]]:
        """Have copies, also those that are sent to other processes, be the instance there is."""
        return _the_one, (self.kind, self.factor)

    def __str__(self) -> str:
        return self.kind.value if self.factor is None else f"{self.kind.value}({self.factor})"

    @classmethod
    def of(cls, op: object, argument: str = "op") -> Reduction:
        """Return the reduction that a torch `ReduceOp` (or a `Reduction`) stands for.

        Raises:
            InvalidUsageError: It is neither.
        """
        found = _BY_IDENTITY.get(id(op))
        if found is not None:
            return found
        if isinstance(op, Reduction):
            return op
        # Members count as ReduceOps for isinstance, but are enums: PREMUL_SUM is none without its factor.
        if isinstance(op, ReduceOp) and not isinstance(op, ReduceOp.RedOpType):
            # torch's stubs do not declare the type of the state
            state: tuple[ReduceOp.RedOpType, float | torch.Tensor | None] = op.__getstate__()  # type: ignore[assignment]  # as torch makes it
            member, multiplier = state
            return _BY_NAME[member.name] if multiplier is None else premul_sum(multiplier)
        if isinstance(op, ReduceOp.RedOpType) and op.name in _BY_NAME:
            return _BY_NAME[op.name]
        raise ArgumentTypeError(
            f"{argument} must be a ReduceOp, got {op!r} ({type(op).__name__}): pass one such as "
            f"dist2.ReduceOp.SUM, or dist2.premul_sum(factor)"
        )


AnyReduceOp = ReduceOp | ReduceOp.RedOpType | Reduction
"""Types of the argument ``op``: torch's reductions, and those that `premul_sum` returns."""


def premul_sum(factor: float | torch.Tensor) -> Reduction:
    """Return the reduction that multiplies every contribution by ``factor`` before summing.

    Args:
        factor: A number, or a tensor of one element whose value counts at the time of this call.

    Raises:
        InvalidUsageError: It is neither.

    Examples:
        >>> tensor = torch.ones(2)
        >>> pg.all_reduce(tensor, dist2.premul_sum(0.5))
        >>> tensor
        tensor([1., 1.])
    """
    try:
        if isinstance(factor, (str, bytes, bytearray)):  # which `float` would read
            raise TypeError(f"a text: {factor!r}")
        return _premul_sum(float(factor).hex())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidUsageError(
            f"factor must be a number or a tensor of one element, got {factor!r}"
        ) from error


@lru_cache(maxsize=1024)
def _premul_sum(factor: str) -> Reduction:
    """One object a factor, as plans are kept by identity; as a text, which has the sign of a zero."""
    return Reduction(ReduceKind.PREMUL_SUM, float.fromhex(factor))


def _the_one(kind: ReduceKind, factor: float | None) -> Reduction:
    return _BY_NAME[kind.name] if factor is None else premul_sum(factor)


_BY_NAME = {kind.name: Reduction(kind) for kind in ReduceKind if kind is not ReduceKind.PREMUL_SUM}
# torch keeps one object a member for as long as the process lives, so its id can stand for it.
_MEMBERS = {name: getattr(ReduceOp, name) for name in _BY_NAME}
_BY_IDENTITY = {id(member): _BY_NAME[name] for name, member in _MEMBERS.items()}

SUM = _BY_NAME["SUM"]
AVG = _BY_NAME["AVG"]
MAX = _BY_NAME["MAX"]
