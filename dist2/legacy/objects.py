"""Collectives of Python objects, on those of the groups.

Plain data and tensors travel safely encoded. Anything else is pickled, as torch does with everything,
where ``DIST2_ALLOW_PICKLE=1`` is set on all ranks: only among ranks you trust. ``weights_only=True`` never
pickles; all ranks pass the same value.
"""

from __future__ import annotations

from typing import Any

import torch

from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.legacy.p2p import other_rank
from dist2.legacy.world import Group, GroupRanks, group_ranks_or_warn
from dist2.runtime.config import Config


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, weights_only: bool = False
) -> None:
    """Collect an object of every rank on every rank, in ``object_list``."""
    if (found := group_ranks_or_warn(group, "all_gather_object")) is None:
        return
    _one_a_rank(object_list, "object_list", found)
    object_list[: found.pg.size()] = found.pg.all_gather_object(obj, allow_pickle=_may_pickle(weights_only))


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Collect an object of every rank at ``dst`` (by default global rank 0), in ``object_gather_list``."""
    if (found := group_ranks_or_warn(group, "gather_object")) is None:
        return
    root = found.group_rank(dst, group_dst, default=0)
    given = _list_at_root(object_gather_list, found.pg.rank() == root, "gather_list", "destination")
    if given is not None:
        _one_a_rank(given, "object_gather_list", found)
    objects = found.pg.gather_object(obj, root, allow_pickle=_may_pickle(weights_only))
    if given is not None and objects is not None:
        given[: len(objects)] = objects


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Replace the objects of a list by those of ``src`` (by default global rank 0).

    Args:
        object_list: A list of the same length on all ranks.
        device: Ignored: objects travel as CPU tensors.
    """
    if (found := group_ranks_or_warn(group, "broadcast_object_list")) is None:
        return
    root = found.group_rank(src, group_src, default=0)
    objects = found.pg.broadcast_object(_checked(object_list), root, allow_pickle=_may_pickle(weights_only))
    object_list[:] = _as_many(objects, object_list)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Give each rank its object of the list of ``src`` (by default global rank 0).

    Args:
        scatter_object_output_list: Its first entry becomes the object.
        scatter_object_input_list: At ``src``: one object a rank.
    """
    if (found := group_ranks_or_warn(group, "scatter_object_list")) is None:
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise InvalidUsageError(
            "Expected argument scatter_object_output_list to be a list of size at least 1, "
            f"got {scatter_object_output_list!r}"
        )
    root = found.group_rank(src, group_src, default=0)
    given = _list_at_root(
        scatter_object_input_list, found.pg.rank() == root, "scatter_object_input_list", "source"
    )
    scatter_object_output_list[0] = found.pg.scatter_object(
        given, root, allow_pickle=_may_pickle(weights_only)
    )


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send the objects of a list to another rank.

    Args:
        object_list: The receiver's has the same length.
        device: Ignored: objects travel as CPU tensors.
        use_batch: Ignored: messages are never held up by collectives.
    """
    if (found := group_ranks_or_warn(group, "send_object_list")) is None:
        return
    peer = other_rank(found, found.group_rank(dst, group_dst), "destination")
    found.pg.send_object(_checked(object_list), peer, allow_pickle=_may_pickle(weights_only))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Replace the objects of a list by those that another rank sends; return its global rank.

    Args:
        object_list: As long as the sender's.
        src: Rank of the sender; by default any rank.
        device: Ignored: objects travel as CPU tensors.
        use_batch: Ignored: messages are never held up by collectives.
    """
    if (found := group_ranks_or_warn(group, "recv_object_list")) is None:
        return -1
    named = src is not None or group_src is not None
    peer = other_rank(found, found.group_rank(src, group_src), "source") if named else None
    _checked(object_list)
    objects, source = found.pg.recv_object(peer, allow_pickle=_may_pickle(weights_only))
    object_list[:] = _as_many(objects, object_list)
    return found.global_rank(source)


def _may_pickle(weights_only: bool) -> bool:
    return not weights_only and Config.from_environment().allow_pickle


def _one_a_rank(places: object, argument: str, found: GroupRanks) -> None:
    """Check that there is a place for the object of every rank, before anything is sent; more may be."""
    there = len(_checked(places, argument))
    if there < found.pg.size():
        raise InvalidUsageError(
            f"{argument} must have a place for each of the {found.pg.size()} ranks, got {there}"
        )


def _checked(object_list: object, argument: str = "object_list") -> list[Any]:
    """Check and return the list that receives or holds objects, before anything is sent."""
    if not isinstance(object_list, list):
        raise ArgumentTypeError(
            f"{argument} must be a list, got {object_list!r} ({type(object_list).__name__})"
        )
    return object_list


def _as_many(objects: object, object_list: list[Any]) -> list[Any]:
    """Return the received objects, of which there must be as many as this rank's list has."""
    if not isinstance(objects, list) or len(objects) != len(object_list):
        got = len(objects) if isinstance(objects, list) else repr(objects)
        raise InvalidUsageError(f"object_list has {len(object_list)} places, and {got} objects arrived")
    return objects


def _list_at_root(given: list[Any] | None, at_root: bool, argument: str, root: str) -> list[Any] | None:
    """Return the list that the root alone must give; None elsewhere."""
    if given is not None and not isinstance(given, (list, tuple)):  # a tensor has no truth value
        name = "object_gather_list" if argument == "gather_list" else argument
        raise ArgumentTypeError(f"{name} must be a list, got {given!r} ({type(given).__name__})")
    if at_root and not given:
        raise InvalidUsageError(f"Argument ``{argument}`` must be specified on {root} rank.")
    if given and not at_root and argument == "gather_list":
        raise InvalidUsageError(f"Argument ``{argument}`` must NOT be specified on non-{root} ranks.")
    return given if at_root else None
