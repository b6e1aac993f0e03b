"""Keeping the Python half of a store alive while C++ holds the other half.

torch's C++ keeps an ``intrusive_ptr`` to the C++ half of a store (a `PrefixStore`, a process group).
That does not keep the Python half: once Python lets go of it, the next call from C++ finds no method and
dies with an internal assertion. So a store that is let go asks here whether C++ still holds it.

C++'s count of references is the 32-bit word behind the vtable of the object that pybind11's instance
points to. That layout is not promised, so it is tried out first on a store of torch's own, and memory is
read through ``/proc/self/mem``, which fails with an error where a pointer would crash. Where the trial
fails, C++ is presumed to hold every store: they live on until `close`.
"""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress
from functools import cache

from torch.distributed import HashStore, PrefixStore
from torch.distributed import Store as TorchStore

_POINTER = struct.Struct("P")
_COUNT = struct.Struct("I")


def held_by_cpp(store: TorchStore) -> bool:
    """Return whether C++ holds a store beside its Python half."""
    try:
        return not _layout_is_known() or _references(store) > 1
    except OSError:  # no descriptor left, say: rather keep a store too long
        return True


def _references(store: TorchStore) -> int:
    (half,) = _POINTER.unpack(_read(id(store) + object.__basicsize__, _POINTER.size))
    (count,) = _COUNT.unpack(_read(half + _POINTER.size, _COUNT.size))
    return int(count)


def _read(address: int, nbytes: int) -> bytes:
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - hot in destructors
        memory.seek(address)
        return memory.read(nbytes)


@cache
def _layout_is_known() -> bool:
    store = HashStore()
    try:
        alone = _references(store)
        wrapped = PrefixStore("", store)
        shared = _references(store)
        del wrapped
        return (alone, shared, _references(store)) == (1, 2, 1)
    except (OSError, OverflowError, struct.error):
        return False


_LOOKS = 8
"""How many pinned stores one call of `no_longer_held` looks at, so that a thousand cost no more."""

_pinned: deque[TorchStore] = deque()


def pin(store: TorchStore) -> None:
    """Keep a store until C++ lets go of it."""
    _pinned.append(store)


def unpin(store: TorchStore) -> None:
    """Let go of a store, whoever else holds it."""
    with suppress(ValueError):  # it need not be pinned
        _pinned.remove(store)


def no_longer_held() -> list[TorchStore]:
    """Unpin and return some of the stores that C++ has let go of meanwhile; call now and then."""
    free = []
    for _ in range(min(_LOOKS, len(_pinned))):
        try:
            store = _pinned.popleft()
        except IndexError:  # another thread looks too
            break
        if held_by_cpp(store):
            _pinned.append(store)
        else:
            free.append(store)
    return free
