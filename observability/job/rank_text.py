"""Sets of ranks as short text: ``0-3``, ``0-60:4``, ``0, 2, 5``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def rank_text(ranks: Iterable[int]) -> str:
    """Return ranks in a text that `ranks_of` reads: runs with a constant step are one part."""
    rest = list(ranks)
    parts = []
    while rest:
        run = _run(rest)
        step = rest[1] - rest[0] if run > 1 else 1
        if run < 3:
            parts.append(str(rest[0]))
            rest = rest[1:]
            continue
        parts.append(f"{rest[0]}-{rest[run - 1]}" + (f":{step}" if step > 1 else ""))
        rest = rest[run:]
    return ",".join(parts)


def ranks_of(text: str) -> list[int]:
    """Return the ranks that `rank_text` has written, in their order.

    Raises:
        ValueError: It is no such text.
    """
    return [rank for part in text.split(",") if part for rank in _expanded(part)]


def named(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks in words: ``rank 2``, ``ranks 0, 1, 3``, ``ranks 0-96 in steps of 8``.

    Args:
        ranks: The ranks, in their order.
        most: Number of parts at most.
    """
    parts = [part.replace(":", " in steps of ") for part in rank_text(ranks).split(",")]
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts[:most])}{more}"


def _run(ranks: list[int]) -> int:
    """Return how many ranks from the first on ascend by one step."""
    if len(ranks) < 2 or ranks[1] <= ranks[0]:
        return 1
    step, count = ranks[1] - ranks[0], 2
    while count < len(ranks) and ranks[count] - ranks[count - 1] == step:
        count += 1
    return count


def _expanded(part: str) -> Iterator[int]:
    span, _, step = part.partition(":")
    first, dash, last = span.partition("-")
    yield from range(int(first), int(last) + 1, int(step) if step else 1) if dash else (int(first),)


def place_of(rank: int, state: Mapping[str, Any], uid: str) -> str:
    """Return where a rank is in a group, if its rank there is another one; else an empty text."""
    group = state["groups"].get(uid)
    if group is None or group.get("rank", rank) == rank:
        return ""
    return f"rank {group['rank']} of {group['name']}, host {state['host']}, pid {state['pid']}"
