"""Argument checks with torch's types of error and texts, on which programs may match."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import ReduceOp

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.legacy.names import default_pg_timeout
from dist2.operation import kinds
from dist2.operation.kinds import Reduction
from dist2.runtime.deadline import seconds

_PREMUL_SUM = ReduceOp.RedOpType.PREMUL_SUM  # type: ignore[attr-defined]  # not in stubs


def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """Return torch's `ReduceOp` that multiplies every contribution by a factor before summing.

    `dist2.premul_sum` returns a faster object, which c10d's options do not take. As in torch, it equals
    ``ReduceOp.PREMUL_SUM`` for any factor.

    Raises:
        InvalidUsageError: The factor is neither a number nor a tensor of one element.
    """
    made = ReduceOp.__new__(ReduceOp)
    made.__setstate__((_PREMUL_SUM, Reduction.of(kinds.premul_sum(factor)).factor))  # type: ignore[attr-defined]  # not in stubs
    return made


Tensors = Sequence[torch.Tensor]


def one(tensor: object, argument: str) -> torch.Tensor:
    """Return a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"Invalid function argument. Expected parameter `{argument}` of type torch.Tensor "
            f"but got {type(tensor)} instead."
        )
    return tensor


def many(tensors: object, argument: str, like: torch.Tensor | None = None) -> Tensors:
    """Return a list of tensors, of one dtype: that of ``like``, if given.

    Complex tensors may stand beside tensors of their parts' dtype, as in torch.
    """
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
        kinds = [type(t) for t in tensors] if isinstance(tensors, (list, tuple)) else type(tensors)
        raise ArgumentTypeError(
            f"Invalid function argument. Expected parameter `{argument}` of type List[torch.Tensor] "
            f"but got {kinds} instead."
        )
    dtypes = {tensor.dtype for tensor in ([like, *tensors] if like is not None else tensors)}
    if len({dtype.to_real() for dtype in dtypes}) > 1:
        found = sorted(map(str, dtypes))
        raise InvalidUsageError(
            f"Invalid usage of tensors with different dtypes. Found {found} in `{argument}`"
        )
    return tensors


def list_at_root(tensors: object, argument: str, at_root: bool, root: str, like: torch.Tensor) -> Tensors:
    """Return the list that the root alone must give: empty elsewhere.

    Args:
        tensors: The caller's argument.
        argument: Its name.
        at_root: Whether the caller is the root.
        root: torch's word for the root: ``"destination"`` or ``"source"``.
        like: The tensor whose dtype it must have.
    """
    given = many([] if tensors is None else tensors, argument, like)
    if at_root and not given:
        raise InvalidUsageError(f"Argument ``{argument}`` must be specified on {root} rank.")
    if given and not at_root:
        raise InvalidUsageError(f"Argument ``{argument}`` must NOT be specified on non-{root} ranks.")
    return given


def split_sizes(sizes: Sequence[int] | None) -> list[int] | None:
    """Return split sizes as ints, which may be given as tensors of one or as a tensor of all; None for none.

    Raises:
        ArgumentTypeError: They are something else.
    """
    if sizes is None or len(sizes) == 0:
        return None
    try:
        return list(map(operator.index, sizes))
    except TypeError:
        raise ArgumentTypeError(f"split sizes must be a list of ints, got {sizes!r}") from None


def limit(timeout: object) -> timedelta | None:
    """Return a timeout as it is: a `timedelta` or None.

    Raises:
        ArgumentTypeError: It is something else.
    """
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    raise ArgumentTypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout!r}")


def limit_or_default(timeout: object) -> timedelta:
    """Return a timeout as it is, torch's default for None.

    Raises:
        ArgumentTypeError: It is something else.
        InvalidUsageError: It is not positive.
    """
    allowed = limit(timeout)
    if allowed is None:
        return default_pg_timeout
    seconds(allowed)
    return allowed
