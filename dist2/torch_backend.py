"""dist2 under torch's own global API, in two ways.

``init_process_group("dist2")``::

    import dist2.torch_backend
    torch.distributed.init_process_group("dist2")

Importing this module registers the backend ``dist2`` for CPU tensors: the `socket` backend.

`default_group` makes a group that is there already torch's default one. Much of torch takes a group as an
object (DDP, functional collectives by name). `DeviceMesh` and the parts built on it (FSDP2, DTensor,
checkpoints), and ``torch.distributed`` itself, look in the tables of ``init_process_group`` instead. This
enters a group there, and takes it out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

from dist2.c10d.dynamo import keep_out
from dist2.errors import InvalidUsageError
from dist2.group.context import check_open_group
from dist2.group.creation import new_group
from dist2.group.open_groups import also_named
from dist2.group.process_group import ProcessGroup

NAME = "dist2"

DEFAULT_GROUP_NAME = "dist2-default"
"""Name of torch's default group, for every group that `default_group` is given.

torch keeps results for a mesh by the names of its groups, and looks the group of an equal mesh up by the name
that the first one had.
"""


def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
    """Return the group that torch asks for; its store is already private to it."""
    return new_group("socket", timeout, store=store, rank=rank, world_size=world_size)


if not hasattr(dist.Backend, NAME.upper()):
    dist.Backend.register_backend(NAME, create, devices=["cpu"])


@contextmanager
def default_group(pg: ProcessGroup) -> Iterator[ProcessGroup]:
    """Make ``pg`` the default group of ``torch.distributed`` for the length of a ``with`` block.

    For the whole process, as torch's tables are: all threads see it. Meshes and modules made inside
    are to be used inside: groups that torch makes meanwhile, for a mesh of two dimensions or by its
    ``new_group``, are closed at the end of the block.

    Args:
        pg: The group; it stays open when the block ends.

    Raises:
        InvalidUsageError: torch has a default group already, or ``pg`` is not a process group.
        GroupAbortedError: ``pg`` is closed; where something else broke it before, that error.
    """
    check_open_group(pg, "torch's default group")
    if distributed_c10d.is_initialized():
        raise InvalidUsageError(
            f"torch.distributed has a default group already, so {pg!r} cannot be it: "
            f"destroy_process_group() first"
        )
    with also_named(pg, DEFAULT_GROUP_NAME), _entered(pg):
        yield pg


@contextmanager
def _entered(pg: ProcessGroup) -> Iterator[None]:
    world = distributed_c10d._world
    count = world.group_count  # torch names the groups that it makes by it
    world.pg_map[pg] = ("dist2", pg.get_group_store())
    world.pg_names[pg] = pg.group_name  # type: ignore[assignment]  # a NewType that older torch lacks
    world.pg_group_ranks[pg] = {rank: rank for rank in range(pg.size())}
    world.pg_backend_config[pg] = "cpu:dist2"
    world.pg_to_tag[pg] = ""
    world.tags_to_pg.setdefault("", []).append(pg)
    distributed_c10d._update_default_pg(pg)
    try:
        yield
    finally:
        for made in [each for each in reversed(world.pg_map) if each is not pg]:
            distributed_c10d.destroy_process_group(made)
        distributed_c10d._update_default_pg(None)
        world.group_count = count
        world.tags_to_pg[""].remove(pg)
        for table in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ):
            table.pop(pg, None)


keep_out(__name__)
