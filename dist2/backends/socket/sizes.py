"""The sizes of exchanges, whose ranks may send different numbers of elements: compared before they move.

Theory of operation. Each rank knows only its own sizes, so they are not in the fingerprint of a call. Where
ranks meet at a fence, each publishes a *note*. If a rank sends and receives the same number of elements
everywhere, the note is that number, so the notes of usual calls are equal. Otherwise it is a sum over the
other ranks: of coefficient times elements sent, less coefficient times elements received. Each pair of
sender and receiver has its own coefficient. The sums of all ranks add up to zero if each rank receives what
another sends to it; otherwise only by chance, once in 2^28. If they do not, the ranks exchange all sizes
and raise an error with those that differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dist2.errors import MismatchError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature, TensorMeta

if TYPE_CHECKING:
    from dist2.backends.socket.transport.boards.board import Board

_MOST = 4
"""Differences that an error lists."""
_NOTE_AT = 34
"""Position of a note in the number that a rank publishes; below are `MAPPED_NOTE` and numbers of blocks."""
BESIDE_NOTE = (1 << _NOTE_AT) - 1
"""Mask of that number's other bits."""
_BITS = 28
_MASK = (1 << _BITS) - 1
_EVEN = 1 << _BITS
"""Flag of a note that is a number of elements."""


def note_of(rank: int, sent: Sequence[int], received: Sequence[int]) -> int:
    """Return the note of a rank, in its place in a published number.

    Args:
        rank: The rank.
        sent: Elements that it sends to each rank.
        received: Elements that it receives from each rank.
    """
    if len({*sent, *received}) == 1 and sent[0] <= _MASK:
        return (_EVEN | sent[0]) << _NOTE_AT
    size = len(sent)
    out = sum(_coefficient(rank, peer) * sent[peer] for peer in range(size))
    into = sum(_coefficient(peer, rank) * received[peer] for peer in range(size))
    return (out - into & _MASK) << _NOTE_AT


def notes_agree(published: Sequence[int]) -> bool:
    """Whether each rank receives what another sends to it, by the numbers that the ranks published."""
    notes = [number >> _NOTE_AT for number in published]
    if len(set(notes)) == 1 and notes[0] & _EVEN:
        return True
    size = len(notes)
    sums = [
        (note & _MASK) * _balance(rank, size) if note & _EVEN else note for rank, note in enumerate(notes)
    ]
    return not sum(sums) & _MASK


@lru_cache(maxsize=4096)
def _balance(rank: int, world_size: int) -> int:
    """Return the sum of a note for one element everywhere."""
    peers = range(world_size)
    return sum(_coefficient(rank, peer) - _coefficient(peer, rank) for peer in peers)


def _coefficient(source: int, target: int) -> int:
    """Return the coefficient of a pair: pseudo-random, equal on all ranks."""
    mixed = (source << 20 | target) + 1
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = (mixed ^ mixed >> 15) * factor & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) & _MASK


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


def compare_sizes(board: Board, operation: Operation, published: int) -> None:
    """Compare the notes that the ranks of a board published with its last fence; they all do.

    Args:
        board: The board.
        operation: The caller's operation.
        published: The number that the caller published.

    Raises:
        MismatchError: Sizes differ; on all ranks.
    """
    if notes_agree(board.published(published)):
        return
    own = sizes_of(operation.signature)
    assert own is not None  # only exchanges have notes
    by_size = [board.share(operation, size) for size in own]
    check_sizes(operation, list(zip(*by_size, strict=True)))


def check_sizes(operation: Operation, everyone: Sequence[Sequence[int]]) -> None:
    """Compare what ranks send with what others receive.

    Args:
        operation: The caller's operation.
        everyone: The result of `sizes_of` of each rank.

    Raises:
        MismatchError: They differ, on all ranks; `actual` has the ranks that differ from the caller, or, if
            none do, those that differ from each other.
    """
    size, group = len(everyone), operation.signature.group
    found = [
        (source, target)
        for source in range(size)
        for target in range(size)
        if everyone[source][target] != everyone[target][size + source]
    ]
    if not found:
        return
    texts = {
        (source, target): f"{group.names([source])} sends {everyone[source][target]} elements to "
        f"{group.names([target])}, which receives {everyone[target][size + source]} from it"
        for source, target in found
    }
    shown = list(texts.values())[:_MOST]
    if len(found) > _MOST:
        shown.append(f"and {len(found) - _MOST} others")
    concerned = [pair for pair in found if group.rank in pair] or found
    actual = {rank: texts[pair] for pair in concerned for rank in pair}
    if len(actual) > 1:
        actual.pop(group.rank, None)
    raise MismatchError(
        f"sizes differ in {operation.describe()}: {'; '.join(shown)} (this is {group.names([group.rank])})",
        expected=operation.describe(),
        actual=actual,
    )
