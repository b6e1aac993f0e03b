"""From a signature to a program, which runs its recipe on the memory and the messages of one group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from dist2.backends.socket.algorithms.hosts import host_map
from dist2.backends.socket.coalesced import COALESCED, coalesced
from dist2.backends.socket.host import Host
from dist2.backends.socket.options import SocketOptions
from dist2.backends.socket.recipes import (
    Likeness,
    Recipe,
    Recipes,
    layout_of,
    multiplies,
    recipes_of,
)
from dist2.backends.socket.reduction import prepare
from dist2.backends.socket.staging import Program, staged
from dist2.backends.socket.traffic import MessageHost, MessagePlan, MessageProgram
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds
from dist2.operation.engine import Script
from dist2.operation.record import Operation
from dist2.operation.signature import Signature

Tensors = Sequence[torch.Tensor]

HOST_SLOT_BYTES = 16 << 20
"""Each half of a slot where there are several hosts: passes must be long enough for the wire between them."""


class Programs:
    """Makes the programs of one group.

    Args:
        rank: The caller's group rank.
        world_size: Members of the group.
        options: The group's options.
        board: Shared memory of the members on this host.
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
        endpoint: FabricEndpoint,
        thresholds: Thresholds = DEFAULT_THRESHOLDS,
        layout: tuple[int, ...] = (),
        recipes: Recipes | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._board = None if layout else board
        self._hosts_board = board if layout else None
        self._layout = layout
        self._endpoint = endpoint
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

    @cached_property
    def _host(self) -> Host:
        """What scripts inside the host call."""
        assert self._board is not None  # flat algorithms fit only where there is one
        return Host(self._board)

    @cached_property
    def _message_host(self) -> MessageHost:
        """What scripts with messages call: most groups of one host have none."""
        return MessageHost(self._endpoint, self._hosts_board)

    def make(self, signature: Signature) -> Program:
        """Return the callable for calls of a signature, on tensors of any strides.

        Raises:
            InvalidUsageError: The reduction has no meaning for the dtype, or the forced algorithm does
                not fit.
        """
        program = self.make_plain(signature)
        if signature.kind in COALESCED:
            return program  # they take tensors of any strides by themselves
        return staged(program, layout_of(signature, self._world_size).dtype)

    def make_plain(self, signature: Signature) -> Program:
        """Return the callable for calls of a signature on plain tensors; see `Backend.plan_plain`.

        Raises:
            InvalidUsageError: As `make`.
        """
        if signature.kind in COALESCED:
            return coalesced(signature, self._world_size, self.make)
        return _multiplied(self._program(self.recipes.find(signature)), signature)

    def _program(self, recipe: Recipe) -> Program:
        """Return a callable that follows a recipe in this group."""
        if not isinstance(recipe.plan, MessagePlan):
            run: Program = self._script(recipe).run
        elif recipe.plan.messages:
            run = MessageProgram(self._message_host, recipe.plan)
        else:  # of a group of one
            run = Script(self._message_host.arrivals, recipe.plan.plan, self._message_host).run
        return run

    def _script(self, recipe: Recipe) -> Script:
        """Return a script for the plan of a recipe, and for its slots plan if not all tensors are mapped."""
        host = self._host
        other = None if recipe.otherwise is None else self._script(recipe.otherwise)
        return Script(host.board.arrivals, recipe.plan, host, other)


def _slot_bytes(board: Board | None, layout: tuple[int, ...]) -> int:
    """Return the length of slots that algorithms may use on every host: on some a member may be alone."""
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
