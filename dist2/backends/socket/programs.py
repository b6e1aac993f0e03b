"""From a signature to a program: which algorithm, on what parts of which tensors, over what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from dist2.backends.socket.algorithms.flat_exchange import flat_exchange
from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.algorithms.request import Request, family_of
from dist2.backends.socket.algorithms.schedule import Buffer, Schedule
from dist2.backends.socket.borrowing import Accord, Borrowing
from dist2.backends.socket.brief import BriefProgram, is_brief
from dist2.backends.socket.coalesced import COALESCED, coalesced
from dist2.backends.socket.compiler import Layout, Parts
from dist2.backends.socket.crossing import CrossingProgram
from dist2.backends.socket.executor import MessageExecutor
from dist2.backends.socket.flat import FlatProgram
from dist2.backends.socket.options import SocketOptions
from dist2.backends.socket.reaching import Scratch
from dist2.backends.socket.reduction import check_supported, is_exact, prepare
from dist2.backends.socket.script import Folding
from dist2.backends.socket.selection import Algorithm, may_be_mapped, moves_by_kernel, select
from dist2.backends.socket.single_copy import ExchangeProgram, SingleCopyProgram
from dist2.backends.socket.solo import run_alone
from dist2.backends.socket.staging import Program, staged
from dist2.backends.socket.transport.base import Endpoint
from dist2.backends.socket.transport.board import Board
from dist2.backends.socket.transport.lending import Lending
from dist2.backends.socket.transport.pieces import PIECE_BYTES
from dist2.backends.socket.transport.regions import SLOT_BYTES
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds
from dist2.operation import Operation, Signature, TensorMeta
from dist2.ops import MAX, OpKind, ReduceKind

Tensors = Sequence[torch.Tensor]

HOST_SLOT_BYTES = 16 << 20
"""Each half of a slot where there are several hosts: passes must be long enough for the wire between them."""

_VOTES = 1 << 20
"""Numbers of messages from here on are votes: no operation has so many others."""

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
    row = meta.numel // meta.shape[0] if meta.numel else 0
    return Parts(tuple(rows * row for rows in splits), single=True)


class Programs:
    """Makes the programs of one group.

    Args:
        rank: The caller's group rank.
        world_size: Members of the group.
        options: Of the group.
        board: Shared memory of the members on this host.
        lending: What they lend each other beside it.
        endpoint: Messages of the group.
        thresholds: What algorithms are chosen by.
        layout: Number of each member's host, where there are several.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        options: SocketOptions,
        board: Board | None,
        lending: Lending | None,
        endpoint: Endpoint,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        layout: tuple[int, ...] = (),
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._board = None if layout else board
        self._layout = layout
        self._slot_bytes = _slot_bytes(board, layout)
        self._thresholds = thresholds
        self._lending = lending
        self._scratch = Scratch(world_size + 1)
        beside = host_map(layout).beside(rank) if layout else ()
        borrowing = (
            Borrowing(board, lending) if layout and board is not None and lending is not None else None
        )
        self._executor = MessageExecutor(endpoint, board if layout else None, beside)
        self._borrowing = borrowing
        self._accord = Accord(borrowing, self._vote)

    def make(self, signature: Signature) -> Program:
        """Return what runs calls of a signature, on tensors of any strides.

        Raises:
            InvalidUsageError: The reduction has no meaning for the dtype, or the forced algorithm does
                not fit.
        """
        program = self.make_plain(signature)
        if program is run_alone or signature.kind in COALESCED:
            return program  # they take tensors of any strides by themselves
        return staged(program, layout_of(signature, self._world_size).dtype)

    def make_plain(self, signature: Signature) -> Program:
        """Return what runs calls of a signature whose tensors are all plain; see `Backend.plan_plain`.

        Raises:
            InvalidUsageError: As `make`.
        """
        if signature.kind in COALESCED:
            return coalesced(signature, self._world_size, self.make)
        if signature.reduction is not None:
            for meta in signature.inputs:
                check_supported(signature.reduction, meta.dtype)
        if self._world_size == 1:
            return run_alone
        layout = layout_of(signature, self._world_size)
        program = self._program(signature, layout, self._request(signature, layout))
        return _multiplied(program, signature)

    def _program(self, signature: Signature, layout: Layout, request: Request) -> Program:
        algorithm = select(request, self._thresholds)
        if algorithm.flat and not algorithm.lends and request.family is OpKind.ALL_TO_ALL:
            stride = self._block(signature, layout)
            factory = partial(flat_exchange, self._rank, stride=stride)
            return self._flat(signature, layout, factory, uneven=True)
        if algorithm.lends and algorithm.hierarchical:
            return self._between_hosts(signature, layout, request, algorithm)
        if algorithm.lends:
            return self._single_copy(signature, layout, request, algorithm)
        if algorithm.flat:
            factory = partial(self._blocks, signature, request, algorithm)
            return self._flat(signature, layout, factory, streams=algorithm.streams)
        return self._messages(signature, layout, request, algorithm)

    def _request(self, signature: Signature, layout: Layout) -> Request:
        reduction = signature.reduction
        counts, received = self._counts(signature, layout.inputs.numels, layout.outputs.numels)
        return Request(
            kind=signature.kind,
            world_size=self._world_size,
            counts=counts,
            itemsize=layout.dtype.itemsize,
            root=signature.root or 0,
            exact=reduction is None or is_exact(reduction, layout.dtype),
            deterministic=self._options.deterministic,
            slot_bytes=self._slot_bytes,
            layout=self._layout,
            received=received,
            forced=self._options.algorithm if signature.kind is not OpKind.BARRIER else None,
        )

    def _counts(
        self, signature: Signature, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the elements a part, as `Request` wants them, and what an exchange receives."""
        family = family_of(signature.kind)
        if family is OpKind.ALL_TO_ALL:
            return inputs, outputs
        if family is OpKind.ALL_GATHER:
            return outputs, ()
        if family is OpKind.GATHER:
            return inputs * self._world_size, ()
        if family is OpKind.SCATTER:
            return outputs * self._world_size, ()
        return inputs or (0,), ()

    # On shared memory

    def _flat(
        self,
        signature: Signature,
        layout: Layout,
        factory: Callable[[tuple[int, ...], tuple[int, ...]], Schedule],
        uneven: bool = False,
        streams: bool = False,
    ) -> Program:
        assert self._board is not None  # flat algorithms fit only where there is one
        shapes = {meta.shape for meta in (*signature.inputs, *signature.outputs)}
        return FlatProgram(
            self._board,
            factory,
            layout,
            block=self._block(signature, layout, PIECE_BYTES if streams else SLOT_BYTES),
            shape=next(iter(shapes)) if len(shapes) == 1 else None,
            fold=self._fold(signature, layout),
            uneven=uneven,
            streams=streams,
            in_place=signature.kind in _IN_PLACE and not _multiplies(signature),
        ).program

    def _single_copy(
        self, signature: Signature, layout: Layout, request: Request, algorithm: Algorithm
    ) -> Program:
        """Return what runs an algorithm that lends, or another where memory is out of reach."""
        assert self._board is not None  # flat algorithms fit only where there is one
        assert self._lending is not None
        otherwise = attrs.evolve(request, forced=None, lends=False)
        by_kernel = request.forced is not None or moves_by_kernel(request, self._thresholds)
        mapped = request.forced is not None or may_be_mapped(request, self._thresholds)
        program = ExchangeProgram if request.family is OpKind.ALL_TO_ALL else SingleCopyProgram
        return program(
            self._board,
            self._lending,
            self._scratch,
            algorithm.schedule(self._rank, request),
            layout,
            self._fold(signature, layout),
            by_kernel,
            mapped,
            self._program(signature, layout, otherwise),
        ).program

    def _fold(self, signature: Signature, layout: Layout) -> Folding | None:
        reduction = signature.reduction
        return None if reduction is None else Folding.of(reduction, layout.dtype, self._world_size)

    def _foldings(self, signature: Signature, layout: Layout) -> tuple[Folding, ...]:
        """Return how a reduction folds to a partial result, and to the last one."""
        reduction = signature.reduction
        if reduction is None:
            return ()
        return tuple(Folding.of(reduction, layout.dtype, self._world_size, final) for final in (False, True))

    def _block(self, signature: Signature, layout: Layout, nbytes: int = SLOT_BYTES) -> int:
        """Return how many elements of a part fit a slot half, or a piece, beside the other parts in it."""
        capacity = nbytes // layout.dtype.itemsize
        return capacity if family_of(signature.kind) in _ONE_PART_A_SLOT else capacity // self._world_size

    def _blocks(
        self,
        signature: Signature,
        request: Request,
        algorithm: Algorithm,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> Schedule:
        """Return the schedule of one block: parts of it are as long as the parts' stretches in it."""
        counts, _ = self._counts(signature, inputs, outputs)
        return algorithm.schedule(self._rank, attrs.evolve(request, counts=counts))

    # As messages

    def _messages(
        self, signature: Signature, layout: Layout, request: Request, algorithm: Algorithm
    ) -> Program:
        executor = self._executor
        schedule = algorithm.schedule(self._rank, request)
        plan = executor.bind(
            schedule,
            layout.dtype,
            signature.reduction,
            [meta.numel for meta in signature.inputs],
            [meta.numel for meta in signature.outputs],
            shift=request.shift(self._rank),
            lent=layout.inputs if schedule.lends is Buffer.INPUT else layout.outputs,
        )
        if algorithm.lends:
            return CrossingProgram(executor, self._borrowing, plan, self._foldings(signature, layout))
        endpoint = executor.endpoint
        if is_brief(endpoint, plan):
            return BriefProgram(executor, endpoint, plan)
        return partial(executor.run, plan)

    def _between_hosts(
        self, signature: Signature, layout: Layout, request: Request, algorithm: Algorithm
    ) -> Program:
        """Return what runs an algorithm that lends, or another where memory is out of reach on some host."""
        lending = self._messages(signature, layout, request, algorithm)
        otherwise = self._program(signature, layout, attrs.evolve(request, forced=None, lends=False))
        accord = self._accord

        def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
            (lending if accord(operation) else otherwise)(operation, inputs, outputs)

        return run

    def _vote(self, operation: Operation, vote: torch.Tensor) -> None:
        """Make a number of one byte the largest that any rank brings."""
        request = Request(
            OpKind.ALL_REDUCE,
            self._world_size,
            (1,),
            slot_bytes=self._slot_bytes,
            layout=self._layout,
            lends=False,
        )
        schedule = select(request, self._thresholds).schedule(self._rank, request)
        plan = self._executor.bind(schedule, vote.dtype, MAX, (1,), (1,), shift=0, first_message=_VOTES)
        self._executor.run(plan, operation, [vote], [vote])


def _slot_bytes(board: Board | None, layout: tuple[int, ...]) -> int:
    """Return what algorithms may count on, on every host: on some a member may be alone."""
    if layout:
        return HOST_SLOT_BYTES if host_map(layout).is_hierarchical else 0
    return SLOT_BYTES if board is not None else 0


def _multiplies(signature: Signature) -> bool:
    return signature.reduction is not None and signature.reduction.kind is ReduceKind.PREMUL_SUM


def _multiplied(program: Program, signature: Signature) -> Program:
    """Return a program whose inputs are multiplied first, where the reduction says so."""
    reduction = signature.reduction
    if reduction is None or not _multiplies(signature):
        return program

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        program(operation, [prepare(tensor.detach(), reduction) for tensor in inputs], outputs)

    return run
