"""The sizes of exchanges, whose ranks may send different numbers of elements: compared before they move."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dist2.errors import MismatchError
from dist2.operation.kinds import OpKind
from dist2.operation.signature import Operation, Signature, TensorMeta

_MOST = 4
"""Differences that an error lists."""


def sizes_of(signature: Signature) -> list[int] | None:
    """Return the numbers of elements that a rank sends to each rank, then those that it receives from each.

    None for an operation whose fingerprint has all sizes.
    """
    kind, size = signature.kind, signature.group.world_size
    if kind is OpKind.ALL_TO_ALL:
        return [meta.numel for meta in (*signature.inputs, *signature.outputs)]
    if kind is OpKind.ALL_TO_ALL_SINGLE:
        (sent,), (received,) = signature.inputs, signature.outputs
        return _parts(sent, signature.input_splits, size) + _parts(received, signature.output_splits, size)
    return None


def _parts(meta: TensorMeta, splits: Sequence[int] | None, world_size: int) -> list[int]:
    """Return the elements of each rank's rows: of so many rows, or equal ones."""
    if not splits:
        return [meta.numel // world_size] * world_size
    row = math.prod(meta.shape[1:])
    return [rows * row for rows in splits]


def check_sizes(operation: Operation, everyone: Sequence[Sequence[int]]) -> None:
    """Compare what ranks send with what others receive.

    Args:
        operation: The caller's operation.
        everyone: The result of `sizes_of` of each rank.

    Raises:
        MismatchError: They differ; it is the same on all ranks.
    """
    size, group = len(everyone), operation.signature.group
    pairs = [(source, target) for source in range(size) for target in range(size)]
    found = [
        (source, f"sends {sent} elements to {group.names([target])}, which receives {received} from it")
        for source, target in pairs
        if (sent := everyone[source][target]) != (received := everyone[target][size + source])
    ]
    if not found:
        return
    shown = [f"{group.names([rank])} {text}" for rank, text in found[:_MOST]]
    if len(found) > _MOST:
        shown.append(f"and {len(found) - _MOST} others")
    raise MismatchError(
        f"sizes differ in {operation.describe()}: {'; '.join(shown)} (this is {group.names([group.rank])})",
        expected=operation.describe(),
        actual=dict(found),
    )
