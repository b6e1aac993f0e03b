"""Point-to-point operations of the global API; ``collectives.py`` documents the common arguments.

One-sided operations (`new_window`) are refused: no backend of dist2 has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from dist2.errors import InvalidUsageError
from dist2.legacy.checks import one
from dist2.legacy.world import Group, GroupRanks, group_ranks, group_ranks_or_warn
from dist2.operation.work import Work

Tensor = torch.Tensor


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Send a tensor in the background; leave it alone until the Work is complete."""
    if (found := group_ranks_or_warn(group, "isend")) is None:
        return None
    return found.pg.isend(one(tensor, "tensor"), found.group_rank(dst, group_dst), tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Receive a tensor in the background, from any rank if none is named."""
    if (found := group_ranks_or_warn(group, "irecv")) is None:
        return None
    return found.pg.irecv(one(tensor, "tensor"), _source(found, src, group_src), tag)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send a tensor to another rank."""
    if (found := group_ranks_or_warn(group, "send")) is not None:
        peer = other_rank(found, found.group_rank(dst, group_dst), "destination")
        found.pg.send(one(tensor, "tensor"), peer, tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor, from any rank if none is named; return the sender's global rank, -1 outside."""
    if (found := group_ranks_or_warn(group, "recv")) is None:
        return -1
    work = found.pg.recv(one(tensor, "tensor"), _source(found, src, group_src), tag)
    return found.global_rank(work.source_rank())


def _source(found: GroupRanks, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else found.group_rank(src, group_src)


def other_rank(found: GroupRanks, group_rank: int, role: str) -> int:
    """Return the rank of a peer, which torch forbids to be the caller.

    Raises:
        InvalidUsageError: It is.
    """
    if group_rank == found.pg.rank():
        raise InvalidUsageError(
            f"Invalid {role} rank: {role} rank should not be the same as the rank of the current "
            f"process ({group_rank})"
        )
    return group_rank


class P2POp:
    """One message of `batch_isend_irecv`.

    Attributes:
        op: `isend` or `irecv`.
        tensor: The tensor to send, or to receive into.
        peer: Global rank of the other side.
        group: The group.
        tag: Tells messages between two ranks apart.
        group_peer: Group rank of the other side.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise InvalidUsageError(f"Invalid ``op``. Expected ``op`` to be isend or irecv, got {op!r}")
        found = group_ranks(group)
        self.op = op
        self.tensor = one(tensor, "tensor")
        self.group = found.pg
        self.group_peer = found.group_rank(peer, group_peer)
        self.peer = found.global_rank(self.group_peer)
        self.tag = tag

    def __repr__(self) -> str:
        ends = (self.group.rank(), self.group_peer)
        src, dst = ends if self.op is isend else ends[::-1]
        return (
            f"P2POp({self.op.__name__} pg={self.group.group_name}, group_src={src}, group_dst={dst}, "
            f"{self.tensor.shape}, {self.tensor.dtype})"
        )


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start messages together, so that their order cannot deadlock; return one Work each."""
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise InvalidUsageError("Invalid ``p2p_op_list``. Each op is expected to be of type ``P2POp``.")
    if len({op.group for op in p2p_op_list}) != 1:
        raise InvalidUsageError("All ops need to use the same group, and there must be one at least.")
    with p2p_op_list[0].group.coalescing() as batch:
        for each in p2p_op_list:
            start = each.group.isend if each.op is isend else each.group.irecv
            start(each.tensor, each.group_peer, each.tag)
    return batch.works


class _CoalescingManager:
    """Result of a coalescing block: waits for all operations started in it.

    Attributes:
        works: One each operation.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Wait for this one too."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait for everything."""
        for work in self.works:
            work.wait()


@contextmanager
def _coalescing_manager(
    group: Group = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[_CoalescingManager]:
    """Collect operations and start them together at the block's end; wait for them unless ``async_ops``."""
    manager = _CoalescingManager()
    with group_ranks(group).pg.coalescing() as batch:
        yield manager
    manager.works += batch.works
    if not async_ops:
        manager.wait()


def new_window(tensor: Tensor | None = None, group: Group = None) -> NoReturn:
    """Refuse a window for one-sided operations, which torch has from 2.14 on, for CUDA alone."""
    group_ranks(group).pg.new_window(tensor)


_new_window = new_window  # its name in torch 2.14


def _supports_window(group: Group = None) -> bool:
    return group_ranks(group).pg.supports_window
