"""Collectives of Python objects. As in torch, they are pickled: use them only among ranks you trust.

Objects travel as bytes in two steps, sizes first, so that every buffer is known before it is filled.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from dist2.errors import InvalidUsageError
from dist2.group import ProcessGroup
from dist2.legacy._world import Group, seat_or_warn
from dist2.legacy.p2p import other_rank

Tensor = torch.Tensor


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Collect an object of every rank on every rank, in ``object_list``."""
    if (found := seat_or_warn(group, "all_gather_object")) is None:
        return
    mine = _pickled(obj)
    buffers = [_buffer(size) for size in _all_sizes(found.pg, mine)]
    found.pg.all_gather_v(buffers, mine)
    object_list[: len(buffers)] = map(_unpickled, buffers)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Collect an object of every rank at ``dst`` (global rank 0 if not said), in ``object_gather_list``."""
    if (found := seat_or_warn(group, "gather_object")) is None:
        return
    root, mine = found.group_rank(dst, group_dst, default=0), _pickled(obj)
    given = _list_at_root(object_gather_list, found.pg.rank() == root, "gather_list", "destination")
    sizes = _all_sizes(found.pg, mine)
    buffers = None if given is None else [_buffer(max(sizes)) for _ in sizes]
    found.pg.gather(buffers, _padded(mine, max(sizes)), root)
    if given is not None and buffers is not None:
        cut = (buffer[:size] for buffer, size in zip(buffers, sizes, strict=True))
        given[: len(buffers)] = map(_unpickled, cut)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Replace the objects of a list by those of ``src`` (global rank 0 if not said).

    Args:
        object_list: Of the same length on all ranks.
        device: Ignored: objects travel as CPU tensors.
    """
    if (found := seat_or_warn(group, "broadcast_object_list")) is None:
        return
    root = found.group_rank(src, group_src, default=0)
    at_root = found.pg.rank() == root
    parts = list(map(_pickled, object_list)) if at_root else []
    sizes = _sizes(parts) if at_root else torch.empty(len(object_list), dtype=torch.int64)
    found.pg.broadcast(sizes, root)
    whole = _joined(parts) if at_root else _buffer(int(sizes.sum()))
    found.pg.broadcast(whole, root)
    if not at_root:
        object_list[:] = _objects(whole, sizes.tolist())


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Give each rank its object of the list of ``src`` (global rank 0 if not said).

    Args:
        scatter_object_output_list: Its first entry becomes the object.
        scatter_object_input_list: At ``src``: one object a rank.
    """
    if (found := seat_or_warn(group, "scatter_object_list")) is None:
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
    parts = [] if given is None else [_pickled(obj) for obj in given]
    sizes = _sizes(parts) if given is not None else torch.empty(found.pg.size(), dtype=torch.int64)
    found.pg.broadcast(sizes, root)
    longest = int(sizes.max())
    buffer = _buffer(longest)
    found.pg.scatter(buffer, [_padded(part, longest) for part in parts], root)
    scatter_object_output_list[0] = _unpickled(buffer[: sizes[found.pg.rank()]])


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects of a list to another rank.

    Args:
        object_list: The receiver's has the same length.
        device: Ignored: objects travel as CPU tensors.
        use_batch: Ignored: messages are never held up by collectives.
    """
    if (found := seat_or_warn(group, "send_object_list")) is None:
        return
    peer = other_rank(found, found.group_rank(dst, group_dst), "destination")
    parts = [_pickled(obj) for obj in object_list]
    found.pg.send(_sizes(parts), peer)
    found.pg.send(_joined(parts), peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Replace the objects of a list by those that another rank sends; return its global rank.

    Args:
        object_list: As long as the sender's.
        src: By default, whoever sends first.
        device: Ignored: objects travel as CPU tensors.
        use_batch: Ignored: messages are never held up by collectives.
    """
    if (found := seat_or_warn(group, "recv_object_list")) is None:
        return -1
    named = src is not None or group_src is not None
    peer = other_rank(found, found.group_rank(src, group_src), "source") if named else None
    sizes = torch.empty(len(object_list), dtype=torch.int64)
    source = found.pg.recv(sizes, peer).source_rank()
    whole = _buffer(int(sizes.sum()))
    found.pg.recv(whole, source)
    object_list[:] = _objects(whole, sizes.tolist())
    return found.global_rank(source)


# Objects and bytes


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(content: Tensor) -> Any:
    # Straight from memory: torch needs numpy for anything else, and dist2 does not depend on it.
    return pickle.loads(ctypes.string_at(content.data_ptr(), content.numel()))


def _objects(whole: Tensor, sizes: Sequence[int]) -> Iterable[Any]:
    """Return the objects whose bytes stand one after the other."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return [_unpickled(whole[start:end]) for start, end in bounds]


def _buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _sizes(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([part.numel() for part in parts], dtype=torch.int64)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else _buffer(0)


def _padded(part: Tensor, size: int) -> Tensor:
    whole = torch.zeros(size, dtype=torch.uint8)
    whole[: part.numel()] = part
    return whole


def _all_sizes(pg: ProcessGroup, mine: Tensor) -> list[int]:
    """Return the size that every rank brings."""
    sizes = torch.empty(pg.size(), dtype=torch.int64)
    pg.all_gather_single(sizes, torch.tensor([mine.numel()]))
    found: list[int] = sizes.tolist()
    return found


def _list_at_root(given: list[Any] | None, at_root: bool, argument: str, root: str) -> list[Any] | None:
    """Return the list that the root alone must give; None elsewhere."""
    if at_root and not given:
        raise InvalidUsageError(f"Argument ``{argument}`` must be specified on {root} rank.")
    if given and not at_root and argument == "gather_list":
        raise InvalidUsageError(f"Argument ``{argument}`` must NOT be specified on non-{root} ranks.")
    return given if at_root else None
