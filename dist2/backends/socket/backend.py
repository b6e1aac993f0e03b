"""`SocketBackend`: the CPU data plane of one group.

Where all members share a host, collectives run on shared memory; otherwise as messages. Point-to-point
operations are always messages, beside the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import attrs
import torch

from dist2.backends.base import Backend, Execute, GroupSpec, Tensors
from dist2.backends.socket.memory import bytes_of
from dist2.backends.socket.options import SocketOptions, Transport
from dist2.backends.socket.programs import Programs
from dist2.backends.socket.staging import is_plain, plain
from dist2.backends.socket.transport.base import ANY_SOURCE, Transfer
from dist2.backends.socket.transport.lending import Lending
from dist2.backends.socket.transport.mailbox import REMEMBERED, Called
from dist2.backends.socket.transport.node import Node, NodeCard, process_node
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds
from dist2.errors import BackendUnavailableError, GroupAbortedError
from dist2.membership import context_id
from dist2.operation import Operation, Signature
from dist2.ops import OpKind


@attrs.frozen(eq=False)
class Place:
    """Where a group's members are.

    Attributes:
        node: This process's links and memory.
        borrowed: The node belongs to the caller of `new_group`, who closes it.
        cards: How to reach each member, by group rank.
        thresholds: What its algorithms are chosen by.
    """

    node: Node
    borrowed: bool
    cards: tuple[NodeCard, ...]
    thresholds: Thresholds = DEFAULT_THRESHOLDS

    def part(self, ranks: Sequence[int]) -> Place:
        """Return where some of the members are."""
        return attrs.evolve(self, cards=tuple(self.cards[rank] for rank in ranks))


class SocketBackend(Backend):
    """Moves CPU tensors through shared memory and TCP.

    Args:
        spec: The group.
        options: Checked options of `new_group`.
        place: Where its members are.
    """

    name = "socket"

    def __init__(self, spec: GroupSpec, options: SocketOptions, place: Place) -> None:
        super().__init__(spec)
        self._options = options
        self._place = place
        self._last: Operation | None = None
        self._last_p2p: Operation | None = None
        self._recent: dict[int, Operation] = {}
        self._closed = False
        context = context_id(spec.info.uid)
        node = place.node if place.borrowed else process_node.acquire(place.node.card.card.host)
        self._node = node
        inside = options.transport is Transport.INPROC
        self.endpoint = node.endpoint(
            context,
            self.rank,
            place.cards,
            inside=inside,
            share=options.transport in (Transport.AUTO, Transport.SHM),
            describe=self._describe,
        )
        self.board, lending = None, None
        if self._shares_memory():
            self.board = node.board(context, self.rank, place.cards)
            lending = Lending(self.board, node.cross_memory)
        self._programs = Programs(
            self.rank, self.world_size, options, self.board, lending, self.endpoint, place.thresholds
        )

    def _shares_memory(self) -> bool:
        """Whether collectives can run on shared memory: all members are on this host.

        Raises:
            BackendUnavailableError: The caller insists, and they are not.
        """
        transport = self._options.transport
        if transport not in (Transport.AUTO, Transport.SHM) or self.world_size == 1:
            return False
        apart = [rank for rank, card in enumerate(self._place.cards) if not self._node.is_beside(card)]
        if apart and transport is Transport.SHM:
            raise BackendUnavailableError(
                f"transport='shm' needs all ranks on one host that can share memory; rank(s) "
                f"{', '.join(map(str, apart))} cannot share it with rank {self.rank}"
            )
        return not apart

    # Planning

    def plan(self, signature: Signature) -> Execute:
        if signature.kind is OpKind.SEND:
            return self.send
        if signature.kind is OpKind.RECV:
            return self.recv
        program = self._programs.make(signature)
        if self.board is not None:  # it compares what members call by itself
            return program
        begin, recent = self.endpoint.begin, self._recent

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
            self._last = recent[operation.seq] = operation
            recent.pop(operation.seq - REMEMBERED, None)
            begin(operation.seq, signature.fingerprint)
            program(operation, inputs, outputs)

        return execute

    def _describe(self, seq: int | None) -> Called:
        operation = self._last_p2p if seq is None else self._recent.get(seq, self._last)
        if operation is None:
            return Called(0, 0, "nothing yet")
        return Called(operation.seq, operation.signature.fingerprint, operation.describe())

    # Point to point

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Send to `signature.peer`."""
        self._last_p2p = operation
        signature = operation.signature
        tensor = plain(inputs[0])
        assert signature.peer is not None  # validated: only receives take any
        transfer = self.endpoint.send_tagged(
            signature.peer, signature.tag, signature.fingerprint, bytes_of(tensor)
        )
        return self._complete(operation, transfer, tensor, None)

    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Receive from `signature.peer` or any rank."""
        self._last_p2p = operation
        signature = operation.signature
        target = outputs[0].detach()
        tensor = target if is_plain(target) else torch.empty(target.shape, dtype=target.dtype)
        peer = ANY_SOURCE if signature.peer is None else signature.peer
        transfer = self.endpoint.recv_tagged(peer, signature.tag, signature.fingerprint, bytes_of(tensor))
        return self._complete(operation, transfer, tensor, None if tensor is target else target)

    def _complete(
        self, operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
    ) -> Future[None] | None:
        """Wait for a message, or return a future that the thread that completes it completes.

        Args:
            tensor: What the message is in: kept alive until then.
            target: Where a received tensor is copied then, if not there already.
        """

        def arrived() -> None:
            operation.source = transfer.source
            if target is not None:
                target.copy_(tensor)

        if not operation.is_async:
            self.endpoint.wait([transfer], operation.deadline_ns)
            arrived()
            return None
        future: Future[None] = Future()

        def done(transfer: Transfer) -> None:
            if transfer.error is None:
                arrived()
                future.set_result(None)
            else:
                future.set_exception(transfer.error)

        transfer.add_done_callback(done)
        if not future.done():
            self.endpoint.background(transfer, operation.deadline_ns)
        return future

    # The operations that `Backend` wants by name; the group calls what `plan` returned

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """See `Backend`."""
        self._programs.make(operation.signature)(operation, inputs, outputs)

    broadcast = all_gather = all_to_all = all_reduce

    # Life

    def split(self, spec: GroupSpec) -> SocketBackend:
        """Return a backend on the same links and memory."""
        ranks = [self.spec.info.global_ranks.index(each) for each in spec.info.global_ranks]
        return SocketBackend(spec, self._options, self._place.part(ranks))

    def abort(self) -> None:
        """Make whoever is blocked raise; `shutdown` then cleans up."""
        error = GroupAbortedError(f"group {self.spec.info.name!r} was aborted in this process")
        self.endpoint.abort(error)
        if self.board is not None:
            self.board.abort(error)

    def shutdown(self) -> None:
        """Leave; the links and memory of the process go with its last group."""
        if self._closed:
            return
        self._closed = True
        self.endpoint.close(GroupAbortedError(f"group {self.spec.info.name!r} was closed in this process"))
        if self.board is not None:
            self.board.close()
        if not self._place.borrowed:
            process_node.release(self._node)
