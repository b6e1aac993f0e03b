"""Names that users of torch.distributed or MPI look for on a group, and the right spelling of each.

A group has no `__getattr__`: Dynamo refuses classes that have one. So each such name is a descriptor that
raises `AttributeError`; for `hasattr` and `dir` a group has no such name.
"""

from __future__ import annotations

from typing import Self, TypeVar

import attrs

from dist2.c10d.methods import C10D_ONLY
from dist2.c10d.process_group import C10dApi

INSTEAD = {
    "world_size": "size()",
    "get_world_size": "size()",
    "get_size": "size()",
    "ranks": "global_ranks",
    "get_rank": "rank()",
    "get_group_rank": "group_rank(global_rank)",
    "get_global_rank": "global_rank(group_rank)",
    "get_process_group_ranks": "global_ranks",
    "timeout": "timeout_s; set_timeout(...) changes it",
    "all_gather_into_tensor": "all_gather_single(output, input)",
    "all_gather_tensor": "all_gather_single(output, input)",
    "reduce_scatter_tensor": "reduce_scatter_single(output, input)",
    "all_to_all_tensor": "all_to_all_single(output, input)",
    "broadcast_object_list": "broadcast_object(obj, root)",
    "scatter_object_list": "scatter_object(objects, root)",
    "send_object_list": "send_object(obj, dst)",
    "recv_object_list": "recv_object(src)",
    "batch_isend_irecv": "coalescing()",
    "sendrecv": "coalescing() with isend and irecv",
    "new_group": "split(ranks) or split_by(color)",
    "new_subgroups": "split_by(color)",
    "destroy_process_group": "shutdown()",
    "destroy": "shutdown()",
    "close": "shutdown()",
    "free": "shutdown()",
}
"""For each name, the attribute or call of a group."""


@attrs.frozen
class Elsewhere:
    """An attribute that a group does not have.

    Attributes:
        name: Its name.
    """

    name: str

    def __get__(self, group: object, kind: type) -> Self:
        if group is None:  # of the class, as for a property
            return self
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {self.name!r}: use pg.{INSTEAD[self.name]}"
        )


_GroupType = TypeVar("_GroupType", bound=type)


def with_spellings(group_type: _GroupType) -> _GroupType:
    """Have a class of groups answer names of `INSTEAD`, and list only names for users: a class decorator."""
    listed = sorted(_names_for_users(group_type))
    for name in INSTEAD:
        setattr(group_type, name, Elsewhere(name))

    def list_names(self: object) -> list[str]:
        return listed

    group_type.__dir__ = list_names  # type: ignore[assignment]  # mypy takes it for a method of the class `type`
    return group_type


def _names_for_users(group_type: type) -> set[str]:
    """Return the public methods and properties of dist2, without those that only torch's code calls."""
    ours = [each for each in group_type.__mro__ if each.__module__.startswith("dist2")]
    members = {
        name: member for each in ours if not issubclass(C10dApi, each) for name, member in vars(each).items()
    }
    return {
        name
        for name, member in members.items()
        if not name.startswith("_") and name not in C10D_ONLY
        if callable(member) or isinstance(member, property)
    }
