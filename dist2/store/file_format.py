"""The format of a FileStore's file: a log of records, without input or output.

It is that of torch 2.13, found by reading files that torch wrote: a record is a key and a value, each a
length (uint32, little-endian) and its bytes. The last record of a key is valid. Users' keys begin with
``/``; a record with a key of ``-/…`` deletes the key behind the ``-``.
"""

from __future__ import annotations

import struct

from dist2.errors import StoreError

_LENGTH = struct.Struct("<I")

REFERENCES = b"refcount/"
"""How many stores have the file open. The first record of every file has this key."""

FINISHED = b"cleanup/"
"""How many stores have had it open and closed it."""

SPACE = b"/"
_DELETED = b"-"

_FIRST = _LENGTH.pack(len(REFERENCES)) + REFERENCES


def encode_record(key: bytes, value: bytes) -> bytes:
    """Return the bytes of a record."""
    return _LENGTH.pack(len(key)) + key + _LENGTH.pack(len(value)) + value


def encode_deletion(key: bytes) -> bytes:
    """Return the bytes of a record that deletes a key."""
    return encode_record(_DELETED + key, b"")


def check_beginning(data: bytes) -> None:
    """Refuse a file that no FileStore wrote.

    Raises:
        StoreError: Its beginning shows it.
    """
    if data[: len(_FIRST)] != _FIRST[: len(data)]:
        raise StoreError(f"it is not a FileStore's: it begins with {data[: len(_FIRST)]!r}")


def replay(data: bytes, values: dict[bytes, bytes]) -> int:
    """Apply the whole records at the beginning of ``data``; return how many bytes they take."""
    at = 0
    while True:
        key_end = _string_end(data, at)
        value_end = _string_end(data, key_end) if key_end is not None else None
        if key_end is None or value_end is None:
            return at
        key = data[at + _LENGTH.size : key_end]
        if key.startswith(_DELETED + SPACE):
            values.pop(key[len(_DELETED) :], None)
        else:
            values[key] = data[key_end + _LENGTH.size : value_end]
        at = value_end


def _string_end(data: bytes, at: int) -> int | None:
    """Return where a string ends; None where the data ends earlier."""
    if len(data) - at < _LENGTH.size:
        return None
    end: int = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return end if end <= len(data) else None
