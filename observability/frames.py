"""`frames_of_threads`: the frames of all threads, to be read where no garbage collection can start.

Python 3.11 collects garbage wherever it allocates, and callbacks of a collection may give up the interpreter
lock (GIL). If that happens inside of `sys._current_frames`, which holds a lock of the runtime, the next
thread that asks for frames or starts a thread waits for that lock with the GIL: the process stands still
(CPython issue 106883, repaired in 3.11.9). If it happens inside of ``frame.f_back``, the frame that is read
may be gone. Python 3.12 and later collect between two instructions only.

A frame keeps the values of its variables: tensors, for example. The frames of the threads are reachable from
one of them, that of the reader; so this cycle is broken after reading, and values do not live longer by it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dist2.runtime.process import InChild, in_child

_reading = threading.RLock()
_paused = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from starting by itself in a `with` block, one thread at a time."""
    global _paused
    with _reading:  # or one thread would enable it inside of another's block
        if not gc.isenabled():  # by the program, or by this thread
            yield
            return
        _paused = True
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            _paused = False


@contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """Yield the innermost frame of each thread by its identifier. Keep none of them after the block.

    Of the calling thread it is the frame of the block.
    """
    with no_collection():
        frames = sys._current_frames()
        # The frame of this generator has no callers while it is suspended, as it is during the block.
        frames[threading.get_ident()] = sys._getframe(2)
        try:
            yield frames
        finally:
            frames.clear()


@in_child(InChild.FRAMES)
def _forked() -> None:
    """End the block of a thread of the parent, which the child does not have."""
    global _reading, _paused
    _reading = threading.RLock()
    if _paused:
        gc.enable()
        _paused = False
