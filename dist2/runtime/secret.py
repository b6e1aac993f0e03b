"""`Secret`: bytes that only the processes of a job know. It never appears in its repr."""

from __future__ import annotations

import hmac
import os
import stat
from hashlib import sha256
from pathlib import Path

from dist2.errors import InvalidUsageError

LEAST_BYTES = 16
"""Shorter secrets can be guessed offline from a recorded handshake."""
MOST_BYTES = 4096


class Secret:
    """A shared secret, good for nothing but to compute with: it has no repr, and is not pickled.

    Args:
        value: At least 16 bytes; ``openssl rand -hex 32`` makes a good one.
        source: Its origin, for messages.

    Raises:
        InvalidUsageError: It is too short or too long. The message does not have its value.
    """

    __slots__ = ("_key",)

    def __init__(self, value: bytes, source: str = "secret") -> None:
        if not LEAST_BYTES <= len(value) <= MOST_BYTES:
            raise InvalidUsageError(
                f"{source} must have {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(value)}: "
                "make one with 'openssl rand -hex 32'"
            )
        self._key = hmac.new(value, b"dist2 secret", sha256).digest()

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return a MAC of 32 bytes under a key that is different for each purpose.

        Args:
            purpose: Name of the use.
            parts: The authenticated bytes. Their division into parts is authenticated too.
        """
        code = hmac.new(self._key, digestmod=sha256)
        for part in (purpose.encode(), *parts):
            code.update(len(part).to_bytes(8, "little"))
            code.update(part)
        return code.digest()

    def vouches(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether ``mac`` is the result of `mac`, compared in constant time."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(Secret)

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled: give it to each process by its environment")


def read_secret(path: str, source: str) -> Secret:
    """Read a secret from a file, without the line end.

    Args:
        path: The file.
        source: The setting that named it, for messages.

    Raises:
        InvalidUsageError: It cannot be read, or others than its owner may read or write it.
    """
    file = require_private(path, source)
    try:
        value = file.read_bytes()
    except OSError as error:
        raise InvalidUsageError(f"{source}: {path!r} cannot be read: {error.strerror}") from error
    return Secret(value.strip(b"\r\n"), f"{source} ({path!r})")


def require_private(path: str, source: str) -> Path:
    """Return the path of a file that only its owner, this user or root, can open.

    Raises:
        InvalidUsageError: It is no such file.
    """
    file = Path(path)
    try:
        found = file.stat()
    except OSError as error:
        raise InvalidUsageError(f"{source}: {path!r} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidUsageError(f"{source}: {path!r} is not a file")
    if found.st_uid not in (0, os.geteuid()):
        raise InvalidUsageError(f"{source}: {path!r} belongs to another user ({found.st_uid})")
    if found.st_mode & 0o077:
        raise InvalidUsageError(
            f"{source}: others may read or write {path!r} (mode {found.st_mode & 0o777:04o}): "
            f"chmod 600 {path}"
        )
    return file
