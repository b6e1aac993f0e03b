"""`SocketBackend`: the CPU data plane of one group.

Where all members share a host, collectives run on shared memory; otherwise as messages. Point-to-point
operations are always messages, beside the collectives.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cached_property

import attrs

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.consensus import Agreement
from dist2.backends.socket.algorithms.hosts import host_map, layout_of_hosts
from dist2.backends.socket.messenger import Messenger
from dist2.backends.socket.options import SocketOptions, Transport
from dist2.backends.socket.outside import Outside
from dist2.backends.socket.programs import HOST_SLOT_BYTES, Programs
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.messages.calls import REMEMBERED, Called
from dist2.backends.socket.transport.messages.explaining import left_words
from dist2.backends.socket.transport.node import Company, Node, NodeCard, check_addresses
from dist2.backends.socket.transport.node_pool import node_pool
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Thresholds, Tuning
from dist2.errors import (
    AuthenticationError,
    BackendUnavailableError,
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
    ResourceError,
    WireError,
)
from dist2.operation.execution import Execute, Helped, Tensors
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature, context_id
from dist2.runtime.deadline import deadline_in
from dist2.runtime.rank_names import RankNames, host_and_pid
from dist2.security.authenticator import Credentials
from dist2.security.refusals import refusals
from dist2.security.sealing import seal, unseal

_HANDLE = "handle"
"""The name under which a handle is sealed."""

_MEETING = frozenset(
    {
        OpKind.ALL_REDUCE,
        OpKind.ALL_GATHER,
        OpKind.ALL_GATHER_SINGLE,
        OpKind.REDUCE_SCATTER,
        OpKind.REDUCE_SCATTER_SINGLE,
        OpKind.BARRIER,
    }
)
"""Operations that end on no rank before all have called them."""


@attrs.frozen(eq=False)
class Place:
    """The hosts and processes of a group's members.

    Attributes:
        node: This process's links and memory.
        borrowed: The node belongs to the caller of `new_group`, which closes it.
        cards: How to reach each member, by group rank.
        thresholds: Constants for the selection of algorithms.
        links: How to connect to each member.
    """

    node: Node
    borrowed: bool
    cards: tuple[NodeCard, ...]
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    links: tuple[Card, ...] = attrs.field(init=False)

    @links.default
    def _links(self) -> tuple[Card, ...]:
        return tuple([each.card for each in self.cards])

    def names(self, info: GroupInfo) -> RankNames:
        """Return the names of the members in texts, with their processes."""
        cards = self.cards
        return attrs.evolve(
            info.names, process_of=lambda rank: host_and_pid(cards[rank].host, cards[rank].pid)
        )

    def part(self, ranks: Sequence[int]) -> Place:
        """Return where some of the members are."""
        cards = tuple([self.cards[rank] for rank in ranks])
        return Place(self.node, self.borrowed, cards, self.thresholds)


class SocketBackend(Backend):
    """Moves CPU tensors through shared memory and TCP.

    Args:
        spec: The group.
        options: Checked options of `new_group`.
        place: Where its members are.
        company: The members beside this one, if they are known.
        former: The backend of a group with the same members in the same order, if there is one: its layout
            and its recipes are taken over.

    Attributes:
        outside: Watches operations of the group that another backend runs.
    """

    staged_types = ("cuda",)
    frees_tensors = leaves_at_once = True

    def __init__(
        self,
        spec: GroupSpec,
        options: SocketOptions,
        place: Place,
        company: Company | None = None,
        former: SocketBackend | None = None,
    ) -> None:
        super().__init__(spec)
        self._options = options
        self._place = place
        self._recent: deque[Operation] = deque(maxlen=2 * REMEMBERED)
        self._closed = False
        self.board: Board | None = None
        node = self._node = place.node if place.borrowed else node_pool.share(place.node)
        with ExitStack() as undo:
            if not place.borrowed:
                undo.callback(node_pool.release, node)
            self._attach(node, company, former, undo)
            undo.pop_all()

    def waited_ns(self) -> int | None:
        """Return for how long it has waited at fences on shared memory, and for messages."""
        at_fences_ns = 0 if self.board is None else self.board.arrivals.waited_ns
        return at_fences_ns + self.endpoint.waited_ns

    def _attach(
        self, node: Node, company: Company | None, former: SocketBackend | None, undo: ExitStack
    ) -> None:
        """Open the group's messages and its shared memory; ``undo`` closes them where this fails."""
        spec, options, place = self.spec, self._options, self._place
        context = context_id(spec.info.uid)
        inside = options.transport is Transport.INPROC
        if company is None:
            company = node.company(self.rank, place.cards, inside=inside, share=options.shares_memory)
        self._company = company
        self.endpoint = node.endpoint(
            context,
            self.rank,
            place.links,
            company,
            inside=inside,
            share=options.shares_memory,
            describe=self._describe,
            on_revoked=self._take_revocation,
            names=self.names,
            uid=spec.info.uid,
        )
        undo.callback(self.endpoint.close, GroupAbortedError(f"{spec.info.name!r} cannot be built"))
        self._messenger = Messenger(self.endpoint)
        self.outside = Outside(self.endpoint, self._messenger, self._recent)
        self.layout: tuple[int, ...] = self._layout() if former is None else former.layout
        self.board = self._open_board(context)
        if self.board is not None:
            undo.callback(self.board.close)
            if self.revoked is not None:  # a member was faster
                self.board.roster.revoke(self.revoked)
        self._programs: Programs = self._make_programs(former)

    def _make_programs(self, former: SocketBackend | None) -> Programs:
        return Programs(
            self.rank,
            self.world_size,
            self._options,
            self.board,
            self.endpoint,
            self._place.thresholds,
            self.layout,
            None if former is None else former._programs.recipes,
        )

    def _layout(self) -> tuple[int, ...]:
        """Return the number of each member's host, where there are several; empty where there is one.

        Every member comes to the same: so all choose algorithms alike, and fold in the same order.
        """
        if self._options.transport is not Transport.AUTO:
            return ()
        keys = [card.sharing for card in self._place.cards]
        if keys.count(keys[0]) == len(keys):
            return ()
        return layout_of_hosts(keys)

    def _open_board(self, context: int) -> Board | None:
        """Return the shared memory of the members on this host, if collectives use it."""
        if not self.layout:
            if not self._shares_memory():
                return None
            board = self._node.board(context, self.rank, self._company, names=self.names)
            board.listen(self.endpoint)
            self.endpoint.ask(board.mismatches.last_seen)
            return board
        hosts = host_map(self.layout)
        if not hosts.is_hierarchical or not self._company.ranks:
            return None
        board = self._node.board(context, self.rank, self._company, HOST_SLOT_BYTES, self.names)
        board.progress = self.endpoint
        board.listen(self.endpoint)
        return board

    def _shares_memory(self) -> bool:
        """Whether collectives can run on shared memory alone: all members are on this host.

        Raises:
            BackendUnavailableError: The caller insists, and they are not.
        """
        if not self._options.shares_memory or self.world_size == 1:
            return False
        if len(self._company.ranks) == self.world_size - 1:
            return True
        if self._options.transport is Transport.SHM:
            apart = [rank for rank, card in enumerate(self._place.cards) if not self._node.is_beside(card)]
            raise BackendUnavailableError(
                f"transport='shm' needs all ranks on one host that can share memory; "
                f"{self.names(apart)} cannot share it with {self.names([self.rank])}"
            )
        return False

    # Planning

    def plan(self, signature: Signature) -> Execute:
        if signature.kind.is_p2p:
            return self._messenger.plan(signature)
        return self._planned(signature, self._programs.make(signature))

    def plan_plain(self, signature: Signature) -> Execute:
        if signature.kind.is_p2p:
            return self._messenger.plan_plain(signature)
        return self._planned(signature, self._programs.make_plain(signature))

    def meeting(self, signature: Signature, other: Signature) -> Execute:
        """Return a callable that runs ``other`` on calls of ``signature``, which the ranks compare.

        For operations of a backend beside this one: ``other`` is one that ends on no rank before all have
        called it.
        """
        return self._logged(signature, self._programs.make(other), meets=True)

    def _planned(self, signature: Signature, program: Execute) -> Execute:
        """Return a callable that runs a program, and logs the call where other members may ask for it."""
        meets = signature.kind in _MEETING and bool(signature.nbytes or signature.kind is OpKind.BARRIER)
        return self._logged(signature, program, meets)

    def _logged(self, signature: Signature, program: Execute, meets: bool) -> Execute:
        if self.world_size == 1 or (self.board is not None and not self.layout):
            return program  # nobody asks, or the board compares calls itself
        endpoint, recent = self.endpoint, self._recent

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
            recent.append(operation)
            endpoint.begin(operation.seq, signature.fingerprint)
            program(operation, inputs, outputs)
            endpoint.ended(operation.seq, meets)

        return execute

    def _describe(self, seq: int | None, number: int) -> Called:
        operation = self._messenger.find(number) if seq is None else self._begun(seq)
        if operation is None:
            return Called(0, 0, "nothing yet")
        call = operation.call()
        return Called(operation.seq, operation.signature.fingerprint, call.text, call)

    def _begun(self, seq: int) -> Operation | None:
        """Return a collective by its number; the last one if that is long ago."""
        recent = tuple(self._recent)  # in one step: another thread may begin the next
        if not recent:
            return None if self.board is None else self.board.arrivals.at
        return next((each for each in recent if each.seq == seq), recent[-1])

    # Point to point

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
        """Send to `signature.peer`."""
        return self._messenger.plan(operation.signature)(operation, inputs, outputs)

    recv = send

    # The operations that `Backend` requires by name; the group calls the result of `plan`

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """See `Backend`."""
        self._programs.make(operation.signature)(operation, inputs, outputs)

    broadcast = all_gather = all_to_all = all_reduce

    # Membership

    @property
    def host(self) -> str:
        """Address at which the other members reach this process."""
        return self._node.card.card.host

    def revoke(self, by: int) -> None:
        """Notify all members by links, and those of this host in shared memory too."""
        self.endpoint.revoke(by)

    def _take_revocation(self, error: GroupRevokedError) -> None:
        self.revoked = error
        if self.board is not None:
            self.board.roster.revoke(error)
        self.on_revoked(error)

    def last_seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the last operations seen in messages and shared memory."""
        return self.endpoint.last_seen(ranks)

    def broken_by(self, error: BaseException) -> None:
        """Keep the error that broke the group here, for the members that wait for this rank.

        The others detect the causes of dist2's own errors by themselves, but for a lack of resources here.
        For that, and any other error, such as one that a signal handler raised during an operation, revoke
        the group: no other rank can see it.
        """
        self.endpoint.broken_by(error, error.ranks if isinstance(error, PeerLostError) else ())
        if isinstance(error, OperationTimeoutError) and self.board is not None:
            is_message = error.op is not None and OpKind(error.op).is_p2p
            self.board.roster.time_out(error.missing, 0 if is_message else error.seq or 0)
        detected = isinstance(error, Dist2Error) and not isinstance(error, ResourceError)
        if isinstance(error, Exception) and not detected:
            self.revoke(self.spec.info.rank)

    def leaves_for(self, error: BaseException) -> None:
        """Keep it for the members that this rank leaves waiting."""
        self.endpoint.broken_by(error)
        if self.board is not None:
            self.board.roster.reports = True

    def look(self) -> None:
        """Read the links: no thread waits on the links of a broken group any more."""
        self.endpoint.look()

    def agree(self, flags: int, deadline_ns: int, shrinks: bool = False) -> tuple[int, Agreement]:
        """Agree over the links, which work even if the group is broken."""
        departed = tuple if self.board is None else self.board.roster.departed
        return self.endpoint.ballot.hold(flags, deadline_ns, shrinks, departed)

    def handle(self) -> str:
        """Return the card of this process's node, and its constants for the selection of algorithms."""
        tuning = Tuning(self._place.thresholds).to_json()
        text = json.dumps({"card": self._node.card.to_json(), "tuning": tuning})
        return seal(self._node.credentials, text, _HANDLE)

    def reconfigure(self, spec: GroupSpec, handles: Sequence[str]) -> SocketBackend:
        """Connect by the addresses in the handles. The constants of the first handle hold for all."""
        credentials = self._node.credentials
        read = [_read_handle(credentials, handle, number) for number, handle in enumerate(handles)]
        cards = tuple(card for card, _ in read)
        check_addresses(self._node, spec.info, cards)
        place = attrs.evolve(self._place, cards=cards, thresholds=read[0][1].thresholds)
        made = SocketBackend(spec, self._options, place)
        try:
            # No rank returns, and perhaps leaves again, before all have attached to its memory.
            _, agreed = made.agree(-1, deadline_in(spec.timeout_s))
            if agreed.failed:
                raise PeerLostError(
                    f"{made.names(agreed.failed)} died or left meanwhile", ranks=agreed.failed
                )
        except BaseException:
            made.shutdown()
            raise
        return made

    # Life

    @cached_property
    def names(self) -> RankNames:
        """The names of the members in texts, with their processes."""
        return self._place.names(self.spec.info)

    def lost(self) -> dict[int, str]:
        """Return the group ranks that are known to have died, and how each ended, in words."""
        dead = self.endpoint.lost()
        if self.board is not None:
            dead |= self.board.roster.lost()
        return dict(sorted(dead.items()))

    def departed(self) -> dict[int, str]:
        """Return the group ranks that are known to have left or aborted the group, in words."""
        left = self.endpoint.departed()
        if self.board is not None:
            roster = self.board.roster
            aborted = dict.fromkeys(roster.departed(aborted_only=True), "aborted the group")
            left = dict.fromkeys(roster.departed(), left_words()) | aborted | left
        return dict(sorted(left.items()))

    def split(self, spec: GroupSpec) -> SocketBackend:
        """Return a backend on the same links and memory."""
        own, members = self.spec.info.global_ranks, spec.info.global_ranks
        if members == own:
            return SocketBackend(spec, self._options, self._place, self._company, self)
        ranks = [own.index(each) for each in members]
        return SocketBackend(spec, self._options, self._place.part(ranks), self._company.part(ranks))

    def abort(self) -> None:
        """Make blocked callers raise; `shutdown` then cleans up."""
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
            node_pool.release(self._node)


def _read_handle(credentials: Credentials, handle: str, number: int) -> tuple[NodeCard, Tuning]:
    """Return the card in a handle, and the constants of the group that it is of."""
    try:
        text = unseal(credentials, handle, _HANDLE)
        fields = json.loads(text)
        return NodeCard.from_json(fields["card"]), Tuning.from_json(fields["tuning"])
    except AuthenticationError as error:
        refusals.note("card", error.reason, f"handles[{number}]", str(error))
        raise AuthenticationError(f"handles[{number}]: {error}", reason=error.reason) from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, WireError) as error:
        raise InvalidUsageError(f"handles[{number}] is not the handle of a group: {handle!r}") from error
