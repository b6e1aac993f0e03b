"""From a signature to a program, which runs its recipe on the memory and the messages of one group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch

from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.algorithms.schedule import Buffer
from dist2.backends.socket.borrowing import Accord, Borrowing
from dist2.backends.socket.brief import BriefProgram, is_brief
from dist2.backends.socket.coalesced import COALESCED, coalesced
from dist2.backends.socket.crossing import CrossingProgram
from dist2.backends.socket.crossing_exchange import CrossingExchange
from dist2.backends.socket.executor import MessageExecutor
from dist2.backends.socket.host import Host
from dist2.backends.socket.layout import Layout
from dist2.backends.socket.options import SocketOptions
from dist2.backends.socket.recipes import (
    Likeness,
    Recipe,
    Recipes,
    check_reduction,
    layout_of,
    multiplies,
    recipes_of,
)
from dist2.backends.socket.reduction import Folding, prepare
from dist2.backends.socket.selection import select
from dist2.backends.socket.solo import run_alone
from dist2.backends.socket.staging import Program, staged
from dist2.backends.socket.transport.base import Endpoint
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.lending import Lending
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds
from dist2.operation.engine import Script
from dist2.operation.kinds import MAX, OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature

Tensors = Sequence[torch.Tensor]

HOST_SLOT_BYTES = 16 << 20
"""Each half of a slot where there are several hosts: passes must be long enough for the wire between them."""

_VOTES = 1 << 20
"""Numbers of messages from here on are votes: no operation has so many others."""


class Programs:
    """Makes the programs of one group.

    Args:
        rank: The caller's group rank.
        world_size: Members of the group.
        options: The group's options.
        board: Shared memory of the members on this host.
        lending: Their exposed memory beside it.
        endpoint: Messages of the group.
        thresholds: Constants for the selection of algorithms.
        layout: Number of each member's host, where there are several.
        recipes: The recipes of a group that is alike in all of this, if there is one.

    Attributes:
        recipes: How calls of each signature are run.
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
        recipes: Recipes | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._board = None if layout else board
        self._hosts_board = board if layout else None
        self._layout = layout
        self._lending = lending
        self._endpoint = endpoint
        self._thresholds = thresholds
        if recipes is None:
            likeness = Likeness(
                rank,
                world_size,
                _slot_bytes(board, layout),
                layout,
                options.deterministic,
                options.algorithm,
                thresholds,
            )
            recipes = recipes_of(likeness)
        self.recipes = recipes
        hosts = self._hosts_board
        self._borrowing = None if hosts is None or lending is None else Borrowing(hosts, lending)

    @cached_property
    def _host(self) -> Host:
        """What scripts inside the host call."""
        assert self._board is not None  # flat algorithms fit only where there is one
        assert self._lending is not None
        return Host(self._board, self._lending)

    @cached_property
    def _accord(self) -> Accord:
        """Whether ranks of each host reach each other's memory."""
        return Accord(self._borrowing, self._vote)

    @cached_property
    def _executor(self) -> MessageExecutor:
        """Runs message schedules: most groups of one host need none."""
        return MessageExecutor(self._endpoint, self._hosts_board, self._beside)

    @cached_property
    def _beside(self) -> tuple[int, ...]:
        """The ranks of this host, where there are several."""
        return host_map(self._layout).beside(self._rank) if self._layout else ()

    def make(self, signature: Signature) -> Program:
        """Return the callable for calls of a signature, on tensors of any strides.

        Raises:
            InvalidUsageError: The reduction has no meaning for the dtype, or the forced algorithm does
                not fit.
        """
        program = self.make_plain(signature)
        if program is run_alone or signature.kind in COALESCED:
            return program  # they take tensors of any strides by themselves
        return staged(program, layout_of(signature, self._world_size).dtype)

    def make_plain(self, signature: Signature) -> Program:
        """Return the callable for calls of a signature on plain tensors; see `Backend.plan_plain`.

        Raises:
            InvalidUsageError: As `make`.
        """
        if signature.kind in COALESCED:
            return coalesced(signature, self._world_size, self.make)
        if self._world_size == 1:
            check_reduction(signature)
            return run_alone
        return _multiplied(self._program(signature, self.recipes.find(signature)), signature)

    def _program(self, signature: Signature, recipe: Recipe) -> Program:
        """Return a callable that follows a recipe in this group."""
        if recipe.plan is not None:
            run: Program = self._script(recipe).run
            return run
        if recipe.otherwise is None:
            return self._messages(signature, recipe)
        otherwise = self._program(signature, recipe.otherwise)
        return self._between_hosts(self._messages(signature, recipe), otherwise)

    def _script(self, recipe: Recipe) -> Script:
        """Return a script for the plan of a recipe, and for its slots plan if not all tensors are mapped."""
        host = self._host
        other = None if recipe.otherwise is None else self._script(recipe.otherwise)
        return Script(host.board.arrivals, recipe.plan, host, other)

    # As messages

    def _messages(self, signature: Signature, recipe: Recipe) -> Program:
        executor, layout, request = self._executor, recipe.layout, recipe.request
        schedule = recipe.algorithm.schedule(self._rank, request)
        plan = executor.bind(
            schedule,
            layout.dtype,
            signature.reduction,
            [meta.numel for meta in signature.inputs],
            [meta.numel for meta in signature.outputs],
            shift=request.shift(self._rank),
            lent=layout.inputs if schedule.lends is Buffer.INPUT else layout.outputs,
        )
        if recipe.algorithm.lends and request.family is OpKind.ALL_TO_ALL:
            return CrossingExchange(executor, self._borrowing, plan, layout, self._rank, self._beside)
        if recipe.algorithm.lends:
            return CrossingProgram(executor, self._borrowing, plan, self._foldings(signature, layout))
        if is_brief(executor.endpoint, plan):
            return BriefProgram(executor, executor.endpoint, plan)
        return partial(executor.run, plan)

    def _foldings(self, signature: Signature, layout: Layout) -> tuple[Folding, ...]:
        """Return how a reduction folds to a partial result, and to the last one."""
        reduction = signature.reduction
        if reduction is None:
            return ()
        return tuple(Folding.of(reduction, layout.dtype, self._world_size, final) for final in (False, True))

    def _between_hosts(self, lending: Program, otherwise: Program) -> Program:
        """Return a program that exposes memory, or another if a host cannot access it."""
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
            slot_bytes=_slot_bytes(self._hosts_board, self._layout),
            layout=self._layout,
            lends=False,
        )
        schedule = select(request, self._thresholds).schedule(self._rank, request)
        plan = self._executor.bind(schedule, vote.dtype, MAX, (1,), (1,), shift=0, first_message=_VOTES)
        self._executor.run(plan, operation, [vote], [vote])


def _slot_bytes(board: Board | None, layout: tuple[int, ...]) -> int:
    """Return the features that algorithms may use on every host: on some a member may be alone."""
    if layout:
        return HOST_SLOT_BYTES if host_map(layout).is_hierarchical else 0
    return SLOT_BYTES if board is not None else 0


def _multiplied(program: Program, signature: Signature) -> Program:
    """Return a program whose inputs are multiplied first, where the reduction says so."""
    reduction = signature.reduction
    if reduction is None or not multiplies(signature):
        return program

    def run(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        program(operation, [prepare(tensor.detach(), reduction) for tensor in inputs], outputs)

    return run
