"""Memory by address, moved by a function of the C library."""

from __future__ import annotations

import ctypes

move_long = ctypes.CDLL(None).memmove
"""``move_long(dst, src, nbytes)``: gives up the interpreter lock for the length of the copy."""
move_long.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
move_long.restype = None


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins. Keep it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
