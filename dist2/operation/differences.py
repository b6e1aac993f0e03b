"""How the calls of ranks differ, in words: the attribute that differs, its values, and the ranks of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from dist2.errors import rank_names
from dist2.operation.description import Call

_MOST_GROUPS = 4
"""Groups of equal ranks that a message lists; it stays readable with thousands of ranks."""

_P2P = ("send", "recv")


def _shapes(call: Call) -> str:
    return ", ".join(str(list(shape)) for shape in call.shapes)


def _numels(call: Call) -> tuple[int, ...]:
    """Element counts: shapes of equal counts are compatible."""
    counts = []
    for shape in call.shapes:
        numel = 1
        for extent in shape:
            numel *= extent
        counts.append(numel)
    return tuple(counts)


Value = Callable[[Call], Hashable]
Text = Callable[[Call], object]

_ATTRIBUTES: tuple[tuple[str, Value, Text], ...] = (
    ("operation", lambda call: call.op, lambda call: call.op),
    ("reduction", lambda call: call.reduction, lambda call: call.reduction),
    ("root", lambda call: call.root, lambda call: f"root={call.root}"),
    ("dtype", lambda call: call.dtypes, lambda call: ", ".join(call.dtypes)),
    ("shape", _numels, _shapes),
)
"""Attributes to compare: name, value to compare, value to show. The first difference is named."""


def describe_difference(calls: Mapping[int, Call]) -> str:
    """Return the attribute in which calls differ first, with its values: ``dtype differs: ranks 0-6 ...``.

    Args:
        calls: The call of each rank. An unknown call has no operation.

    Returns:
        Text for an error; ``ranks called different operations`` if the calls do not tell the difference.
    """
    known = {rank: call for rank, call in calls.items() if call.op}
    messages = {rank: call for rank, call in known.items() if call.op in _P2P}
    attributes = _ATTRIBUTES
    if len({call.op for call in messages.values()}) == 2:  # a send and its receive; others only watch
        known, attributes = messages, _ATTRIBUTES[1:]
    for name, value, text in attributes:
        groups: dict[Hashable, list[int]] = {}
        for rank, call in sorted(known.items()):
            groups.setdefault(value(call), []).append(rank)
        if len(groups) > 1:
            return f"{name} differs: " + _listed(
                [f"{rank_names(ranks)} {text(known[ranks[0]])}" for ranks in groups.values()], ", "
            )
    return "ranks called different operations"


def describe_calls(calls: Mapping[int, Call]) -> str:
    """Return the call of each rank in words; ranks with the same call are listed together."""
    groups: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call.text, []).append(rank)
    return _listed([f"{rank_names(ranks)} called {text}" for text, ranks in groups.items()], "; ")


def _listed(parts: list[str], separator: str) -> str:
    """Join the first parts, and count the others."""
    left = len(parts) - _MOST_GROUPS
    if left > 1:
        parts = [*parts[:_MOST_GROUPS], f"and {left} other values"]
    return separator.join(parts)
