"""Memory by address."""

from __future__ import annotations

import ctypes


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins. Keep it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
