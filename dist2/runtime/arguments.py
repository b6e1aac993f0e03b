"""Checks of arguments that are no tensors: ints, ranks, names, stores.

Each names the argument and its value in the error. `dist2.operation.validation` checks tensors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex

import torch
from torch.distributed import Store

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.runtime.rank_names import rank_names


def as_int(value: object) -> int | None:
    """Return an int for objects that act as one (numpy's do); None for others, and for True and tensors."""
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def check_world_size(world_size: object) -> int:
    """Return how many ranks there are."""
    size = as_int(world_size)
    if size is None or size < 1:
        raise InvalidUsageError(f"world_size must be a positive int, got {world_size!r}")
    return size


def check_rank(rank: object, argument: str, world_size: int) -> int:
    """Return a group rank."""
    found = as_int(rank)
    if found is None:
        raise ArgumentTypeError(
            f"{argument} must be a group rank (int), got {rank!r} ({type(rank).__name__})"
        )
    if not 0 <= found < world_size:
        raise InvalidUsageError(
            f"{argument} must be a group rank between 0 and {world_size - 1}, got {found} "
            f"(world_size {world_size})"
        )
    return found


def check_ranks(ranks: object, argument: str, world_size: int) -> tuple[int, ...]:
    """Return a non-empty list of distinct group ranks."""
    if not isinstance(ranks, (list, tuple)) and (not isinstance(ranks, Sequence) or isinstance(ranks, str)):
        raise ArgumentTypeError(f"{argument} must be a non-empty list of group ranks, got {ranks!r}")
    checked = tuple(ranks)
    if not checked:
        raise InvalidUsageError(f"{argument} must be a non-empty list of group ranks, got {ranks!r}")
    if [rank for rank in checked if type(rank) is not int or not 0 <= rank < world_size]:
        checked = tuple([check_rank(each, f"{argument}[{at}]", world_size) for at, each in enumerate(ranks)])
    if len(set(checked)) != len(checked):
        raise InvalidUsageError(f"{argument} names a rank twice: {list(checked)}")
    return checked


def check_names(name: object, desc: object, prefix: str = "") -> None:
    """Check the name and the description of a new group, either of which may be None.

    Args:
        name: The group's name.
        desc: The group's description.
        prefix: First part of the arguments' names.
    """
    for text, argument in ((name, f"{prefix}name"), (desc, f"{prefix}desc")):
        if text is not None:
            _check_text(text, argument)


def _check_text(text: object, argument: str) -> None:
    """Check that something can travel as UTF-8."""
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{argument} must be a str, got {shown(text)} ({type(text).__name__})")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidUsageError(f"{argument} cannot be written as UTF-8: {shown(text)}") from error


def check_store(store: object) -> None:
    """Check that something is a store."""
    if not isinstance(store, Store):
        raise ArgumentTypeError(
            f"store must be a torch or dist2 Store, got {shown(store)} ({type(store).__name__})"
        )


def check_tag(tag: object) -> int:
    """Return a tag: any int that fits 63 bits."""
    found = as_int(tag)
    if found is None or not 0 <= found < 1 << 62:
        raise InvalidUsageError(f"tag must be an int between 0 and 2**62 - 1, got {tag!r}")
    return found


def difference_of(asked: Mapping[int, Mapping[str, str]]) -> str:
    """Return the arguments that differ between ranks, with the ranks of each value; empty if none does."""
    for name in dict.fromkeys(itertools.chain.from_iterable(asked.values())):
        ranks: dict[str, list[int]] = {}
        for rank, each in asked.items():
            ranks.setdefault(each.get(name, "not known"), []).append(rank)
        if len(ranks) > 1:
            shown = " and ".join(f"{value[:80]} on {rank_names(having)}" for value, having in ranks.items())
            return f"{name} is {shown}"
    return ""


def shown(value: object) -> str:
    """Return the repr of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
