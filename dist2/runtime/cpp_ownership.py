"""Keeping the Python half of an object alive while C++ holds the other half.

Stores, works and groups are Python subclasses of torch's classes: each has a half in C++, which C++ keeps by
an ``intrusive_ptr``. That does not keep the Python half: once Python drops its last reference, the next call
from C++ finds no method, and fails with an internal assertion or hangs. So a half without references asks
whether C++ still holds the other (`held_by_cpp`), and if so stays among `Pins` until C++ has dropped it too.

C++'s count of references is the 32-bit word behind the vtable of the object that pybind11's instance
points to. That layout is not promised, so it is tried out first on a store and a work of torch's own: the
count must grow and shrink as C++ takes and releases references. During the trial memory is read through
``/proc/self/mem``, which fails with an error where a pointer would crash. Where the trial fails, C++ is
presumed to hold everything.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections import deque
from contextlib import suppress
from functools import cache
from typing import Any, Generic, TypeVar

from torch.distributed import HashStore, PrefixStore, Work

_POINTER = struct.Struct("P")
_COUNT = struct.Struct("I")
_BEHIND_THE_OBJECT = object.__basicsize__


def held_by_cpp(half: object) -> bool:
    """Return whether C++ holds the other half of a store, work or group, beside its Python half."""
    if not layout_is_known():
        return True
    other = ctypes.c_void_p.from_address(id(half) + _BEHIND_THE_OBJECT).value
    if other is None:  # its __init__ failed before that
        return False
    return ctypes.c_uint32.from_address(other + _POINTER.size).value > 1


@cache
def layout_is_known() -> bool:
    """Return whether the count of references can be read."""
    try:
        store, work = HashStore(), Work()
        counts = [_references(store), _references(work)]
        wrapped: Any = (PrefixStore("", store), work.boxed())
        counts += [_references(store), _references(work)]
        del wrapped
        return [*counts, _references(store), _references(work)] == [1, 1, 2, 2, 1, 1]
    except (AttributeError, OSError, OverflowError, struct.error):
        return False


def _references(half: object) -> int:
    (other,) = _POINTER.unpack(_read(id(half) + _BEHIND_THE_OBJECT, _POINTER.size))
    (count,) = _COUNT.unpack(_read(other + _POINTER.size, _COUNT.size))
    return int(count)


def _read(address: int, nbytes: int) -> bytes:
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - a file of the kernel's
        memory.seek(address)
        return memory.read(nbytes)


_Half = TypeVar("_Half")


class Pins(Generic[_Half]):
    """Halves to which Python has no reference, while C++ has one.

    A half asks `held_by_cpp` and is pinned by its ``__del__``, which Python calls once in its life. So one
    that Python got back from C++ since then stays pinned until both have dropped it.
    """

    _LOOKS = 8
    """How many of them one call of `no_longer_held` looks at, so that a thousand cost no more."""

    def __init__(self) -> None:
        self._halves: deque[_Half] = deque()

    def __len__(self) -> int:
        return len(self._halves)

    def pin(self, half: _Half) -> None:
        """Keep a half until no other reference to it is left."""
        self._halves.append(half)

    def unpin(self, half: _Half) -> None:
        """Drop this queue's reference to a half; C++ may still hold its own."""
        with suppress(ValueError):  # it need not be pinned
            self._halves.remove(half)

    def no_longer_held(self) -> list[_Half]:
        """Unpin and return some of the halves without other references; to be called now and then."""
        free = []
        for _ in range(min(self._LOOKS, len(self._halves))):
            try:
                # The only references are this queue's and the argument's: the first is read in place.
                in_python = sys.getrefcount(self._halves[0]) > 2
                half = self._halves.popleft()
            except IndexError:  # another thread looks too
                break
            if in_python or held_by_cpp(half):
                self._halves.append(half)
            else:
                free.append(half)
        return free
