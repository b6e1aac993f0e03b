"""Keys and values as callers may give them, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

from dist2.errors import ArgumentTypeError

Text = str | bytes
"""What keys and values may be; a `str` stands for its UTF-8 bytes."""


def as_key(key: Text) -> bytes:
    """Return a key as bytes.

    Raises:
        ArgumentTypeError: It is neither `str` nor `bytes`.
    """
    if isinstance(key, str):
        return key.encode(errors="surrogateescape")
    if isinstance(key, bytes):
        return key
    raise ArgumentTypeError(f"key must be a str, got {key!r} ({type(key).__name__})")


def as_keys(keys: Sequence[Text]) -> tuple[bytes, ...]:
    """Return keys as bytes.

    Raises:
        ArgumentTypeError: They are no sequence of `str` or `bytes`.
    """
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise ArgumentTypeError(f"keys must be a list of str, got {keys!r} ({type(keys).__name__})")
    return tuple(map(as_key, keys))


def as_value(value: Text) -> bytes:
    """Return a value as bytes.

    Raises:
        ArgumentTypeError: It is neither `str` nor bytes-like.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise ArgumentTypeError(f"value must be a str or bytes, got {value!r} ({type(value).__name__})")


def as_name(key: bytes) -> str:
    """Return a key as text."""
    return key.decode(errors="surrogateescape")
