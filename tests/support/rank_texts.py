"""Finds ranks in texts, and checks that each is named by its rank in the job and in its group."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERS = r"\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*"
_ARGUMENT = re.compile(r"\b(?:root|peer)=(\d+) \(rank (\d+)\)")
_BARE_ARGUMENT = re.compile(r"\b(?:root|peer)=(\d+)")
_NAMED = re.compile(
    rf"\b[Rr]anks? ({_NUMBERS})"
    rf"(?: \(ranks? ({_NUMBERS}) of ([^,() ]+)(?:, host [^,()]+, pid \d+)?\))?"
)


def _spelled(numbers: str) -> list[int]:
    spelled: list[int] = []
    for part in numbers.split(", "):
        first, _, last = part.partition("-")
        spelled += range(int(first), int(last or first) + 1)
    return spelled


def misnamed(text: str, group: str, global_ranks: Sequence[int]) -> list[str]:
    """Return the parts of a text that name ranks of a group in another way than all of dist2.

    Args:
        text: An error, a log line, a note.
        group: Name of the group that it is about, all of whose ranks differ from the job's.
        global_ranks: The job's rank of each group rank.
    """
    given = _ARGUMENT.finditer(text)
    wrong = [each[0] for each in given if int(each[2]) != global_ranks[int(each[1])]]
    text = _ARGUMENT.sub("", text)
    wrong += [each[0] for each in _BARE_ARGUMENT.finditer(text)]
    for found in _NAMED.finditer(text):
        of_group = _spelled(found[2]) if found[2] else []
        if found[3] != group or [global_ranks[each] for each in of_group] != _spelled(found[1]):
            wrong.append(found[0])
    return wrong
