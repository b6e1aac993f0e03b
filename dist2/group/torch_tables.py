"""`TorchDefaultGroup`: a dist2 group in the tables of torch's own ``init_process_group``.

Much of torch takes a group as an object (DDP, functional collectives by name). Samplers, meshes and the parts
built on meshes (FSDP2, DTensor, checkpoints), and ``torch.distributed`` itself, look in these tables. A group
is entered as torch's default group; other groups of the same ranks may be entered beside it. When the default
group leaves, all of them leave, and groups that torch has made of it meanwhile are closed.

torch makes such groups by the name of a backend, so entering registers the backend ``dist2`` with torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dist2.errors import InvalidUsageError
from dist2.group.creation import new_group
from dist2.group.open_groups import call_also, call_only_by_its_name
from dist2.group.process_group import ProcessGroup
from dist2.group.torch_options import TORCHS_OPTIONS, from_torch
from dist2.runtime.torch_versions import default_tables, records_itself, set_default_group

NAME = "dist2"

DEFAULT_GROUP_NAME = "dist2-default"
"""Name of torch's default group, for every group that is entered.

torch keeps results for a mesh by the names of its groups, and looks the group of an equal mesh up by the name
that the first one had.
"""


def create(asked: Any, options: Mapping[str, object] | None) -> ProcessGroup:
    """Return a group for torch: of torch's default group if that is one of dist2's, otherwise a new one.

    Args:
        asked: torch's ``DistributedBackendOptions``.
        options: The ``pg_options`` of the call: a mapping of options for the backend ``socket``. Of an object
            of torch nothing applies; what it sets is named in a warning.
    """
    if isinstance(options, TORCHS_OPTIONS):
        options = from_torch(options, "socket") or None
    default = default_tables().default_pg
    if isinstance(default, ProcessGroup) and asked.global_ranks_in_group and options is None:
        made = default.split(list(asked.global_ranks_in_group), timeout=asked.timeout)
        assert made is not None  # torch asks members only
        return made
    if options is not None and not isinstance(options, Mapping):
        raise InvalidUsageError(
            f"pg_options of backend 'dist2' must be a mapping of its options, got {type(options).__name__}"
        )
    given: Mapping[str, Any] = options or {}
    return new_group(
        "socket",
        asked.timeout,
        store=asked.store,
        rank=asked.group_rank,
        world_size=asked.group_size,
        **given,
    )


def register_backend() -> None:
    """Make the backend ``dist2`` known to torch, once in a process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
        records_itself(NAME)


class TorchDefaultGroup:
    """A dist2 group that is torch's default group, from `__init__` to `leave`.

    Raises:
        InvalidUsageError: torch has a default group already.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        check_no_default_group(pg)
        register_backend()
        world = default_tables()
        self._pg = pg
        self._count = world.group_count  # torch names the groups that it makes by it
        self._beside: list[ProcessGroup] = []
        call_also(pg, DEFAULT_GROUP_NAME)
        _enter(pg, range(pg.size()))
        world.pg_to_tag[pg] = ""
        world.tags_to_pg.setdefault("", []).append(pg)
        set_default_group(pg)

    @property
    def is_destroyed(self) -> bool:
        """Whether torch's ``destroy_process_group`` has shut it down."""
        return default_tables().default_pg is not self._pg

    def add(self, pg: ProcessGroup, ranks: Sequence[int]) -> None:
        """Enter a group beside it.

        Args:
            pg: The group.
            ranks: For each of its ranks, the rank in the default group.
        """
        if self.is_destroyed:
            return
        world = default_tables()
        _enter(pg, ranks)
        tag = f"ptd:{pg.group_name}"  # torch's tag of a group without a tag
        world.pg_to_tag[pg] = tag
        world.tags_to_pg.setdefault(tag, []).append(pg)
        self._beside.append(pg)

    def remove(self, pg: ProcessGroup) -> None:
        """Take a group out that was entered beside it."""
        if pg in self._beside:
            self._beside.remove(pg)
            _leave(pg)

    def destroy(self, group: object) -> bool:
        """Destroy a group if torch has made it meanwhile, of any backend; return whether it has."""
        known = default_tables().pg_map
        if self.is_destroyed or group in (self._pg, *self._beside) or group not in known:
            return False
        distributed_c10d.destroy_process_group(cast("Any", group))
        return True

    def leave(self) -> None:
        """Remove the entries, and close the groups that torch has made meanwhile.

        Nothing is left to do in torch's tables where torch's ``destroy_process_group`` was called.
        """
        world = default_tables()
        if not self.is_destroyed:
            entered = {self._pg, *self._beside}
            for made in [each for each in reversed(world.pg_map) if each not in entered]:
                distributed_c10d.destroy_process_group(made)
            set_default_group(None)
            world.group_count = self._count
            for each in entered:
                _leave(each)
        self._beside.clear()
        call_only_by_its_name(self._pg, DEFAULT_GROUP_NAME)


def check_no_default_group(pg: object) -> None:
    """Refuse to make a group torch's default group where torch has one.

    Raises:
        InvalidUsageError: It has.
    """
    if distributed_c10d.is_initialized():
        raise InvalidUsageError(
            f"torch.distributed has a default group already, so {pg} cannot be it: "
            f"call torch.distributed.destroy_process_group() first, or keep both apart: "
            f"dist2.legacy.init_process_group(register_with_torch=False)"
        )


def _enter(pg: ProcessGroup, ranks: Sequence[int]) -> None:
    world = default_tables()
    world.pg_map[pg] = (NAME, pg.get_group_store())
    world.pg_names[pg] = pg.group_name
    world.pg_group_ranks[pg] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    world.pg_backend_config[pg] = ",".join(f"{kind}:{NAME}" for kind in pg.backend.device_types)


def _leave(pg: ProcessGroup) -> None:
    world = default_tables()
    tagged = world.tags_to_pg.get(world.pg_to_tag.get(pg, ""), [])
    if pg in tagged:
        tagged.remove(pg)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    ):
        table.pop(pg, None)
