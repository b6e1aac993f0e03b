# cython: annotation_typing=False
"""The request for a schedule, as a value that selection and the checker share."""

from __future__ import annotations

import attrs

from dist2.backends.socket.algorithms.hosts import HostMap, host_map
from dist2.operation.kinds import OpKind

_FAMILIES = {
    OpKind.ALL_REDUCE_COALESCED: OpKind.ALL_REDUCE,
    OpKind.ALL_GATHER_SINGLE: OpKind.ALL_GATHER,
    OpKind.ALL_GATHER_SINGLE_COALESCED: OpKind.ALL_GATHER,
    OpKind.ALL_GATHER_V: OpKind.ALL_GATHER,
    OpKind.REDUCE_SCATTER_SINGLE: OpKind.REDUCE_SCATTER,
    OpKind.REDUCE_SCATTER_SINGLE_COALESCED: OpKind.REDUCE_SCATTER,
    OpKind.REDUCE_SCATTER_V: OpKind.REDUCE_SCATTER,
    OpKind.ALL_TO_ALL_SINGLE: OpKind.ALL_TO_ALL,
}


def family_of(kind: OpKind) -> OpKind:
    """Return the operation whose algorithms serve this spelling of it (``_single``, ``_v``, coalesced)."""
    return _FAMILIES.get(kind, kind)


@attrs.frozen
class Request:
    """The operation and sizes that a schedule is requested for.

    Attributes:
        kind: The operation; spellings of one family (``_single``, ``_v``) are served alike.
        world_size: Ranks of the group.
        counts: Elements a part: one number for `all_reduce`, `broadcast`, `reduce`; for the others one a
            rank, equal on all ranks, except for `all_to_all`: the elements that this rank sends to each.
        itemsize: Bytes an element.
        root: Group rank of the root, where there is one.
        exact: The result does not depend on the order of folding (see `reduction.is_exact`).
        deterministic: The result must not depend on the order of folding even if it could.
        slot_bytes: Bytes of a slot of shared memory that all ranks of a host can reach; 0: there is none.
        layout: Number of each rank's host, where there are several; empty otherwise.
        scratch_bytes: Scratch memory that long operations should not exceed, where possible.
        piece_bytes: Bytes of a rail that are folded and sent at a time, between hosts.
        received: For `all_to_all`: elements that this rank gets from each.
        forced: Name of the algorithm that the caller insists on.
        lends: Whether ranks may expose mapped tensors to each other.
        family: The operation whose algorithms serve it.
    """

    kind: OpKind
    world_size: int
    counts: tuple[int, ...] = (0,)
    itemsize: int = 1
    root: int = 0
    exact: bool = False
    deterministic: bool = True
    slot_bytes: int = 0
    layout: tuple[int, ...] = ()
    scratch_bytes: int = 32 << 20
    piece_bytes: int = 4 << 20
    received: tuple[int, ...] = ()
    forced: str | None = None
    lends: bool = True
    family: OpKind = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "family", family_of(self.kind))

    @property
    def any_order(self) -> bool:
        """Whether contributions may be folded in any order: the reduction commutes exactly."""
        return self.exact or not self.deterministic or self.world_size <= 2

    @property
    def is_flat(self) -> bool:
        """Whether all ranks share memory, and enough for an element of each."""
        return not self.layout and self.capacity >= self.world_size

    @property
    def is_paired(self) -> bool:
        """Whether the ranks can exchange in pairs, each round with others: their number is a power of two."""
        return self.world_size & (self.world_size - 1) == 0

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several hosts, several ranks on one, and enough shared memory there."""
        return bool(self.layout) and self.hosts.is_hierarchical and self.capacity >= 8 * self.world_size

    @property
    def hosts(self) -> HostMap:
        """Which ranks share a host."""
        return host_map(self.layout)

    def shift(self, rank: int) -> int | None:
        """Return the offset from an element's number in ``INPUT`` to its number in ``OUTPUT``.

        For callers that pass one memory for both; None if they cannot.
        """
        if self.family in (OpKind.ALL_GATHER, OpKind.GATHER):
            return sum(self.counts[:rank])
        if self.family in (OpKind.REDUCE_SCATTER, OpKind.SCATTER):
            return -sum(self.counts[:rank])
        return None if self.family is OpKind.ALL_TO_ALL else 0

    @property
    def pass_numel(self) -> int:
        """Elements that long operations move at a time."""
        return max(self.world_size, self.scratch_bytes // self.itemsize)

    @property
    def piece_numel(self) -> int:
        """Elements of a rail that are folded and sent at a time."""
        return max(1, self.piece_bytes // self.itemsize)

    @property
    def capacity(self) -> int:
        """Elements that fit a slot of shared memory."""
        return self.slot_bytes // self.itemsize
