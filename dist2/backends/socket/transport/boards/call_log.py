"""`CallLog`: the last calls of a member, which others can read later.

A member that does not wait for all at a fence may be computing when others find that they made another call.
So it logs its calls: for each signature and line in user code, a text in its region, written once; and with
each such fence it publishes a number, made of the numbers of the text and of the operation.
"""

from __future__ import annotations

import struct

from dist2.operation.description import Call
from dist2.operation.engine import CALL_FLAG, CALL_TEXTS
from dist2.operation.record import Operation
from dist2.runtime.cache import keep

_ENTRIES, _ENTRY_BYTES = CALL_TEXTS, 2048
CALL_LOG_BYTES = _ENTRIES * _ENTRY_BYTES
"""The size that they take of a region."""

_HEADER = struct.Struct("=QQ")  # the text's number, and its length
_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_SEQ_MASK = (1 << 31) - 1

_Key = tuple[int, int, int]


class CallLog:
    """A member's own.

    Attributes:
        count: How many texts there have been.

    Args:
        memory: `CALL_LOG_BYTES` in this member's region.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.count = 0
        # The objects of the keys are kept alive, so that no other object gets their ids.
        self._known: dict[_Key, tuple[int, object, object]] = {}

    def word(self, operation: Operation) -> int:
        """Return the number that names a call; its text is in memory by then."""
        key = (id(operation.signature), id(operation.code), operation.instruction)
        found = self._known.get(key)
        if found is None or found[0] <= self.count - _ENTRIES:
            found = self._write(key, operation)
        word: int = CALL_FLAG | (operation.seq & _SEQ_MASK) << _NUMBER_BITS | found[0] & _NUMBER_MASK
        return word

    def _write(self, key: _Key, operation: Operation) -> tuple[int, object, object]:
        self.count += 1
        text = operation.call().encode()
        at = self.count % _ENTRIES * _ENTRY_BYTES
        _HEADER.pack_into(self._memory, at, 0, 0)  # a reader of the old text finds it gone
        self._memory[at + _HEADER.size : at + _HEADER.size + len(text)] = text
        _HEADER.pack_into(self._memory, at, self.count & _NUMBER_MASK, len(text))
        return keep(self._known, key, (self.count, operation.signature, operation.code), 2 * _ENTRIES)


def names_call(word: int, seq: int) -> bool:
    """Whether a published number names the call of an operation."""
    return bool(word & CALL_FLAG) and _seq_in(word) == seq & _SEQ_MASK


def _seq_in(word: int) -> int:
    return word >> _NUMBER_BITS & _SEQ_MASK


def read_call_log(memory: memoryview, word: int) -> Call | None:
    """Return the call of a member.

    Args:
        memory: The call_log of that member.
        word: The published number.

    Returns:
        None if that names no call, or the text was overwritten.
    """
    if not word & CALL_FLAG:
        return None
    number = word & _NUMBER_MASK
    at = number % _ENTRIES * _ENTRY_BYTES
    found, length = _HEADER.unpack_from(memory, at)
    if found != number:
        return None
    start = at + _HEADER.size
    text = bytes(memory[start : start + min(length, _ENTRY_BYTES - _HEADER.size)])
    if _HEADER.unpack_from(memory, at)[0] != number:
        return None
    return Call.decode(text).numbered(_seq_in(word))
