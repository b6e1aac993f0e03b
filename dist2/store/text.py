"""Keys and values as callers may give them, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

from dist2.errors import ArgumentTypeError, InvalidUsageError

Text = str | bytes
"""Type of keys and values; a `str` stands for its UTF-8 bytes."""


def as_key(key: Text) -> bytes:
    """Return a key as bytes.

    Raises:
        ArgumentTypeError: It is neither `str` nor `bytes`.
        InvalidUsageError: It is text that UTF-8 has no bytes for: half of a surrogate pair.
    """
    if isinstance(key, str):
        return _encoded(key, "key", "surrogateescape")
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
        InvalidUsageError: It is text that UTF-8 has no bytes for.
    """
    if isinstance(value, str):
        return _encoded(value, "value", "strict")
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise ArgumentTypeError(f"value must be a str or bytes, got {value!r} ({type(value).__name__})")


def _encoded(text: str, argument: str, errors: str) -> bytes:
    try:
        return text.encode(errors=errors)
    except UnicodeEncodeError as error:
        raise InvalidUsageError(f"{argument} cannot be written as UTF-8: {text[:80]!r}") from error


def as_name(key: bytes) -> str:
    """Return a key as text."""
    return key.decode(errors="surrogateescape")
