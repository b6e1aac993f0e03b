"""A group as the default group of torch's own global API, for torch code that insists on one.

Much of torch takes a group as an object (DDP, functional collectives by name). `DeviceMesh` and what is
built on it (FSDP2, DTensor, distributed checkpoint), and ``torch.distributed`` itself, ask the tables of
``init_process_group`` instead. This enters a group there, and takes it out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from torch.distributed import distributed_c10d

from dist2.context import check_open_group
from dist2.errors import InvalidUsageError
from dist2.group import ProcessGroup
from dist2.open_groups import also_named

NAME = "dist2-default"
"""What torch calls its default group, whichever group that is.

It remembers by name what it has worked out for a mesh, and finds the group of a later mesh that is equal by
the name that the first one had.
"""


@contextmanager
def default_group(pg: ProcessGroup) -> Iterator[ProcessGroup]:
    """Make ``pg`` the default group of ``torch.distributed`` for the length of a ``with`` block.

    For the whole process, as torch's tables are: all threads see it. Meshes and modules made inside
    are to be used inside: groups that torch makes meanwhile, for a mesh of two dimensions or by its
    ``new_group``, are closed at the end of the block. Registers the backend ``dist2`` with torch for them.

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
    import_module("dist2.torch_backend")  # registers the backend that torch makes groups of
    with also_named(pg, NAME), _entered(pg):
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
