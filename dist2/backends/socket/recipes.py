# cython: annotation_typing=False
"""`Recipes`: the way to run calls of each signature, computed once for all groups of the same layout.

A recipe depends on the caller's rank, the layout of the group, the constants of selection, and the call, but
not on the group's memory. So a group derived from another one finds most recipes already made. Training
creates such groups by the dozen (a mesh has one for each dimension, with equal layouts).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial

import attrs
import torch

from dist2.backends.socket.algorithms import flat_moving
from dist2.backends.socket.algorithms.request import Request, family_of
from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.host import MAPPED_NOTE
from dist2.backends.socket.layout import Layout, Parts
from dist2.backends.socket.lowering import Blocks, Counts, Folds, mapped_plan, message_plan, slots_plan
from dist2.backends.socket.reduction import Folding, check_supported, is_exact
from dist2.backends.socket.selection import Algorithm, select
from dist2.backends.socket.sizes import note_of
from dist2.backends.socket.traffic import MessagePlan
from dist2.backends.socket.transport.boards.pieces import PIECE_BYTES
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds
from dist2.operation.engine import Plan
from dist2.operation.kinds import OpKind, ReduceKind
from dist2.operation.signature import Signature, TensorMeta
from dist2.runtime.cache import keep

MAX_KEPT = 1024
"""Signatures of which is kept how they are run; where shapes change all the time, it starts over."""
_MAX_LIKENESSES = 64

_SINGLE = {OpKind.ALL_GATHER_SINGLE, OpKind.REDUCE_SCATTER_SINGLE, OpKind.ALL_TO_ALL_SINGLE}
_IN_PLACE = {OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.REDUCE}
_ONE_PART_A_SLOT = {
    OpKind.ALL_REDUCE,
    OpKind.BROADCAST,
    OpKind.REDUCE,
    OpKind.ALL_GATHER,
    OpKind.GATHER,
    OpKind.BARRIER,
}


@attrs.frozen(cache_hash=True)
class Likeness:
    """The properties of a group that determine how it runs calls.

    Attributes:
        rank: The caller's group rank.
        world_size: Members of the group.
        slot_bytes: Bytes of a slot of shared memory; 0: there is none.
        layout: Number of each member's host, where there are several.
        deterministic: See `SocketOptions`.
        algorithm: Likewise.
        thresholds: Constants for the selection of algorithms.
    """

    rank: int
    world_size: int
    slot_bytes: int
    layout: tuple[int, ...] = ()
    deterministic: bool = True
    algorithm: str | None = None
    thresholds: Thresholds = DEFAULT_THRESHOLDS


@attrs.frozen(eq=False)
class Recipe:
    """The way to run calls of one signature.

    Attributes:
        layout: How the tensors are cut into parts.
        request: The request for the algorithm.
        algorithm: Which it is.
        plan: Its plan.
        otherwise: Runs unless all tensors are mapped, for an algorithm that lends.
    """

    layout: Layout
    request: Request
    algorithm: Algorithm
    plan: Plan | MessagePlan
    otherwise: Recipe | None = None


class Recipes:
    """Those for one likeness; see `recipes_of`."""

    def __init__(self, likeness: Likeness) -> None:
        self._likeness = likeness
        self._known: dict[Hashable, Recipe] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, signature: Signature) -> Recipe:
        """Return how calls of a signature are run.

        Raises:
            InvalidUsageError: The reduction has no meaning for the dtype, or the forced algorithm does not
                fit.
        """
        key = (
            signature.kind,
            signature.inputs,
            signature.outputs,
            signature.reduction,
            signature.root,
            signature.input_splits,
            signature.output_splits,
            torch.get_num_threads() > 1,  # folds of long vectors go by it
        )
        found = self._known.get(key)
        if found is None:
            check_reduction(signature)
            layout = layout_of(signature, self._likeness.world_size)
            recipe = self._make(signature, layout, self._request(signature, layout))
            found = keep(self._known, key, recipe, MAX_KEPT)
        return found

    def _make(self, signature: Signature, layout: Layout, request: Request) -> Recipe:
        algorithm = select(request, self._likeness.thresholds)
        if algorithm.lends:
            plain = self._make(signature, layout, attrs.evolve(request, forced=None, lends=False))
            plan = self._mapped(signature, layout, request, algorithm)
            return Recipe(layout, request, algorithm, plan, plain)
        make = self._slots if algorithm.flat else self._messages
        return Recipe(layout, request, algorithm, make(signature, layout, request, algorithm))

    def _request(self, signature: Signature, layout: Layout) -> Request:
        likeness, reduction = self._likeness, signature.reduction
        family = family_of(signature.kind)
        counts, received = self._counts(family, layout.inputs.numels, layout.outputs.numels)
        return Request(
            kind=signature.kind,
            world_size=likeness.world_size,
            counts=counts,
            itemsize=layout.dtype.itemsize,
            root=signature.root or 0,
            exact=reduction is None or is_exact(reduction, layout.dtype),
            deterministic=likeness.deterministic,
            slot_bytes=likeness.slot_bytes,
            layout=likeness.layout,
            received=received,
            forced=likeness.algorithm if signature.kind is not OpKind.BARRIER else None,
        )

    def _counts(
        self, family: OpKind, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the elements of each part for `Request`, and those that an exchange receives."""
        world_size = self._likeness.world_size
        if family is OpKind.ALL_TO_ALL:
            return inputs, outputs
        if family is OpKind.ALL_GATHER:
            return outputs, ()
        if family is OpKind.GATHER:
            return inputs * world_size, ()
        if family is OpKind.SCATTER:
            return outputs * world_size, ()
        return inputs or (0,), ()

    # On shared memory

    def _slots(self, signature: Signature, layout: Layout, request: Request, algorithm: Algorithm) -> Plan:
        rank, exchanges = self._likeness.rank, request.family is OpKind.ALL_TO_ALL
        block = self._block(request.family, layout, PIECE_BYTES if algorithm.streams else SLOT_BYTES)
        factory = (
            partial(flat_moving.all_to_all, rank, stride=block)
            if exchanges
            else partial(self._schedule, request, algorithm)
        )
        note = note_of(rank, layout.inputs.numels, layout.outputs.numels) if exchanges else None
        return slots_plan(
            rank,
            layout,
            self._folds(signature, layout),
            Blocks(factory, block, algorithm.streams, note),
            _is_in_place(signature),
        )

    def _mapped(self, signature: Signature, layout: Layout, request: Request, algorithm: Algorithm) -> Plan:
        rank, note = self._likeness.rank, None
        if request.family is OpKind.ALL_TO_ALL:
            note = MAPPED_NOTE | note_of(rank, layout.inputs.numels, layout.outputs.numels)
        return mapped_plan(
            rank,
            layout,
            self._folds(signature, layout),
            algorithm.schedule(rank, request),
            _is_in_place(signature),
            note,
        )

    def _messages(
        self, signature: Signature, layout: Layout, request: Request, algorithm: Algorithm
    ) -> MessagePlan:
        likeness = self._likeness
        inputs, outputs = [
            Parts(tuple(meta.numel for meta in metas), single=False)
            for metas in (signature.inputs, signature.outputs)
        ]
        return message_plan(
            likeness.rank,
            Layout(inputs, outputs, layout.dtype),
            self._folds(signature, layout, (True, False)),
            algorithm.schedule(likeness.rank, request),
            _is_in_place(signature),
            likeness.slot_bytes or SLOT_BYTES,
            shift=request.shift(likeness.rank),
        )

    def _folds(self, signature: Signature, layout: Layout, finals: Sequence[bool] = (True,)) -> Folds:
        """Return how a reduction folds; nothing for other operations."""
        reduction, world_size = signature.reduction, self._likeness.world_size
        if reduction is None:
            return {}
        return {final: Folding.of(reduction, layout.dtype, world_size, final) for final in finals}

    def _block(self, family: OpKind, layout: Layout, nbytes: int) -> int:
        """Return how many elements of a part fit a slot half, or a piece, beside the other parts in it."""
        capacity = nbytes // layout.dtype.itemsize
        if family not in _ONE_PART_A_SLOT:
            return capacity // self._likeness.world_size
        # Gathered data is written past the caches, and should still be in the nearest one then.
        return capacity // 2 if family is OpKind.ALL_GATHER else capacity

    def _schedule(self, request: Request, algorithm: Algorithm, *block: *Counts) -> Schedule:
        """Return the schedule of one block: parts of it are as long as the parts' stretches in it."""
        counts, _ = self._counts(request.family, *block)
        if counts != request.counts:
            request = attrs.evolve(request, counts=counts)
        return algorithm.schedule(self._likeness.rank, request)


@lru_cache(maxsize=_MAX_LIKENESSES)
def recipes_of(likeness: Likeness) -> Recipes:
    """Return the recipes of all groups of a likeness."""
    return Recipes(likeness)


def check_reduction(signature: Signature) -> None:
    """Refuse a reduction that is undefined for the dtype of an input.

    Raises:
        InvalidUsageError: It is undefined.
    """
    if signature.reduction is not None:
        for meta in signature.inputs:
            check_supported(signature.reduction, meta.dtype, signature.kind.value)


def multiplies(signature: Signature) -> bool:
    """Whether each contribution is multiplied first."""
    return signature.reduction is not None and signature.reduction.kind is ReduceKind.PREMUL_SUM


def _is_in_place(signature: Signature) -> bool:
    """Whether the inputs are the outputs."""
    return signature.kind in _IN_PLACE and not multiplies(signature)


def layout_of(signature: Signature, world_size: int) -> Layout:
    """Return how a call's tensors are cut into parts."""
    metas = (*signature.inputs, *signature.outputs)
    return Layout(
        _parts(signature, signature.inputs, signature.input_splits, world_size, into=False),
        _parts(signature, signature.outputs, signature.output_splits, world_size, into=True),
        metas[0].dtype if metas else torch.uint8,
    )


def _parts(
    signature: Signature,
    metas: tuple[TensorMeta, ...],
    splits: tuple[int, ...] | None,
    world_size: int,
    *,
    into: bool,
) -> Parts:
    """Return how one side of a call is cut into parts."""
    cut = into if signature.kind is OpKind.ALL_GATHER_SINGLE else not into
    whole = signature.kind is OpKind.ALL_TO_ALL_SINGLE or cut
    if signature.kind not in _SINGLE or not whole:
        return Parts(tuple(meta.numel for meta in metas), single=False)
    meta = metas[0]
    if splits is None:
        return Parts((meta.numel // world_size,) * world_size, single=True)
    row = math.prod(meta.shape[1:])  # of a tensor without dimensions, its one element
    return Parts(tuple(rows * row for rows in splits), single=True)
