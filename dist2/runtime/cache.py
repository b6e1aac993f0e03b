"""`keep`: remember what was worked out, up to a number of values; then start over.

Programs repeat the same few calls, so what is known of them stays. A program whose calls are always new works
the same things out again now and then, instead of filling the memory.

Functions of hashable arguments use `functools.lru_cache`. This helper is for the other cases, where the value
is made from more than the key (tensors, a plan), or C reads the dict. The package cachetools was weighed: its
caches would replace these few lines by a dependency, and each look-up, of which a call makes several, by a
function in Python that notes which entry was used last.
"""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def keep(known: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> _Value:
    """Remember a value.

    Args:
        known: All that is remembered; emptied first if it is full and the key is new.
        key: What to find the value by.
        value: What to remember.
        most: How many values there may be.

    Returns:
        The value.
    """
    if len(known) >= most and key not in known:
        known.clear()
    known[key] = value
    return value
