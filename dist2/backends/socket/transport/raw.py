"""Memory by address, moved by functions of the C library."""

from __future__ import annotations

import ctypes

SHORT_BYTES = 16 << 10
"""Copies up to this long keep the interpreter lock: taking it again may cost more than they do."""

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_short = ctypes.PyDLL(None).memmove
move_long = ctypes.CDLL(None).memmove
"""``move_long(dst, src, nbytes)``: gives up the interpreter lock for the length of the copy."""
for _move in (_move_short, move_long):
    _move.argtypes = _ARGUMENTS
    _move.restype = None


def move(dst: int, src: int, nbytes: int) -> None:
    """Copy bytes from one address of this process to another."""
    if nbytes <= SHORT_BYTES:
        _move_short(dst, src, nbytes)
    else:
        move_long(dst, src, nbytes)


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins. Keep it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
