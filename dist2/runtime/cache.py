"""`keep`: a cache with a bound: when it is full, it is emptied.

Programs repeat the same few calls, so entries stay. A program whose calls are always new computes
values again now and then, instead of filling the memory.

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
        known: The cache; emptied first if it is full and the key is new.
        key: The key.
        value: The value.
        most: Largest number of entries.

    Returns:
        The value.
    """
    if len(known) >= most and key not in known:
        known.clear()
    known[key] = value
    return value
