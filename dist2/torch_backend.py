"""dist2 under torch's own global API, in two ways.

``init_process_group("dist2")``::

    import dist2.torch_backend
    torch.distributed.init_process_group("dist2")

Importing this module registers the backend ``dist2`` for CPU tensors: the `socket` backend. torch's
``pg_options`` may be a mapping of its options. Groups that torch makes of the default group are splits of it.

`default_group` makes a group that is there already torch's default one for a while, for code that looks up
torch's default group: samplers, meshes and the parts built on them, ``torch.distributed`` itself.
`dist2.legacy.init_process_group` does this for its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dist2.c10d.dynamo import keep_out
from dist2.group.context import check_open_group
from dist2.group.process_group import ProcessGroup
from dist2.group.torch_tables import (
    DEFAULT_GROUP_NAME,
    NAME,
    TorchDefaultGroup,
    check_no_default_group,
    create,
    register_backend,
)

__all__ = ["DEFAULT_GROUP_NAME", "NAME", "create", "default_group"]


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
    check_no_default_group(repr(pg))
    entered = TorchDefaultGroup(pg)
    try:
        yield pg
    finally:
        entered.leave()


register_backend()
keep_out(__name__)
