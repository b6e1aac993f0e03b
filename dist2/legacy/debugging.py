"""Debug levels, as torch reads and keeps them, and names for torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import (
    DebugLevel,
    distributed_c10d,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)

__all__ = ["DebugLevel", "get_debug_level", "record_comm", "set_debug_level", "set_debug_level_from_env"]


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Show the operations of a block under a name in torch's profiler.

    torch renames the event of each operation. dist2's operations keep theirs, ``dist2:all_reduce``, inside of
    one for the block. Backends of torch's get their events renamed too.

    Args:
        name: The name of the event.
    """
    with ExitStack() as blocks:
        theirs: Any = getattr(distributed_c10d, "record_comm", None)  # torch 2.8 has none
        if theirs is not None:
            blocks.enter_context(theirs(name))
        blocks.enter_context(torch.profiler.record_function(name))
        yield
