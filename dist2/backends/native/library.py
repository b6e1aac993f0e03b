"""`Library`: what is particular to one of torch's backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from dist2.backends.base import GroupSpec

C10dBackend = Any
"""A `torch.distributed.distributed_c10d.Backend` of C++; its stubs lack most of its methods."""


@attrs.frozen(eq=False)
class Library:
    """One of torch's backends.

    Attributes:
        name: How users spell it.
        connect: Returns torch's backend for a group, connected. Raises what torch raises.
        options: Names of the options it takes.
        max_tag: Largest tag of a point-to-point message.
    """

    name: str
    connect: Callable[[GroupSpec], C10dBackend]
    options: tuple[str, ...] = ()
    max_tag: int = (1 << 31) - 1
