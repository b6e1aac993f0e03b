"""dist2 under torch's own global API: ``torch.distributed.init_process_group("dist2")``.

    import dist2.torch_backend
    torch.distributed.init_process_group("dist2")

Importing this module registers the backend ``dist2`` for CPU tensors: the `socket` backend.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from dist2.creation import new_group
from dist2.group import ProcessGroup

NAME = "dist2"


def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
    """Return the group that torch asks for; its store is already private to it."""
    return new_group("socket", timeout, store=store, rank=rank, world_size=world_size)


if not hasattr(dist.Backend, NAME.upper()):
    dist.Backend.register_backend(NAME, create, devices=["cpu"])
