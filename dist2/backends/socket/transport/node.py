"""`Node`: the links and shared memory of one process (or rank as a thread), for all its groups.

Its links to other processes and its share of the host's memory belong here, not to groups: a thousand
groups open nothing that the first did not.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Sequence
from functools import cached_property, partial

import attrs
from attrs.validators import deep_mapping, instance_of

from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.boards.arrivals import default_spins, lone_spins
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.boards.regions import SLOT_BYTES
from dist2.backends.socket.transport.boards.roster import Member
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.host import host_id
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.reception import Reception
from dist2.backends.socket.transport.links.ring import HEADER_BYTES, RING_BYTES, RingReader, RingWriter
from dist2.backends.socket.transport.messages.calls import Describe
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.mailbox import OnRevoked
from dist2.backends.socket.transport.shared_memory import Neighbour, SharedHost
from dist2.errors import GroupAbortedError, InvalidUsageError, PeerLostError, ResourceError, WireError
from dist2.operation.signature import GroupInfo
from dist2.runtime.config import Config
from dist2.runtime.process import InChild, in_child
from dist2.runtime.rank_names import RANKS, RankNames
from dist2.security.authenticator import Credentials

_FABRIC_SPINS = 100
_ATTEND_S = 0.1


@attrs.frozen
class NodeCard:
    """The address that members of a group publish to each other.

    Attributes:
        card: How to reach the fabric.
        pid: The process.
        host_id: Equal where memory can be shared.
        memory: Locators of the shared memory; empty without any.
        asked: Its options that must be equal on all members, as text.
        host: Name of its host.
    """

    card: Card = attrs.field(validator=instance_of(Card))
    pid: int = attrs.field(validator=instance_of(int))
    host_id: str = attrs.field(validator=instance_of(str))
    memory: dict[str, str] = attrs.field(
        validator=deep_mapping(key_validator=instance_of(str), value_validator=instance_of(str))
    )
    asked: dict[str, str] = attrs.field(
        factory=dict,
        validator=deep_mapping(key_validator=instance_of(str), value_validator=instance_of(str)),
    )
    host: str = attrs.field(default="", validator=instance_of(str))

    @cached_property
    def sharing(self) -> str:
        """Equal for members that can share memory, and for no others."""
        return self.host_id if self.memory else self.card.fabric_id

    def to_json(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeCard:
        """Parse the card of a member.

        Raises:
            WireError: It is no card.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "card": Card(**fields["card"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WireError(f"malformed address record of a rank: {text[:200]!r}") from error


@attrs.frozen(eq=False)
class Company:
    """The members of a group that can share memory with one of them.

    Attributes:
        members: The other ones.
        lost: Group ranks with lost processes.
        spins: How often a waiter looks before it yields.
        lone_spins: The same for messages, if ``spins`` is 0 and no other process needs the core.
        ranks: Group ranks of all of them, this one included.
    """

    members: tuple[Member, ...]
    lost: tuple[int, ...]
    spins: int
    lone_spins: int
    ranks: frozenset[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "ranks", frozenset([*[each.rank for each in self.members], *self.lost]))

    def part(self, ranks: Sequence[int]) -> Company | None:
        """Return this for a subgroup with this rank; None if it may differ between ranks.

        Departed members may be found again; and fewer ranks may have a core each.
        """
        if self.lost or not self.spins:
            return None
        numbers = {rank: number for number, rank in enumerate(ranks)}
        members = [
            Member(numbers[each.rank], each.neighbour) for each in self.members if each.rank in numbers
        ]
        return Company(tuple(members), (), self.spins, self.lone_spins)


class Node:
    """Links and shared memory of one process.

    Args:
        host: Address that the data listener binds.
        config: Settings; by default from the environment.
        attend_s: See `Fabric`.

    Attributes:
        card: For the other members of a group.
        credentials: The proof that it sends and requires.
    """

    def __init__(
        self, host: str = "127.0.0.1", config: Config | None = None, attend_s: float = _ATTEND_S
    ) -> None:
        config = config or Config.from_environment()
        self.credentials = Credentials.of(config)
        self._shared: SharedHost | None = None
        self._refused: ResourceError | None = None
        try:
            self._shared = SharedHost() if shared_memory.available() else None
        except ResourceError as error:  # groups of connections do without: see `check_memory`
            self._refused = error
        try:
            self._fabric = Fabric(
                host,
                spins=_FABRIC_SPINS if os.cpu_count() != 1 else 0,
                attend_s=attend_s,
                heartbeat_s=config.heartbeat_s,
                credentials=self.credentials,
                rings=self if self._shared is not None else None,
                congestion=config.congestion,
            )
        except BaseException:
            if self._shared is not None:
                self._shared.close()
            raise
        self._boards: weakref.WeakSet[Board] = weakref.WeakSet()
        self._spin_us = config.spin_us
        self.card = NodeCard(
            self._fabric.card,
            os.getpid(),
            config.host_id or host_id(),
            self._shared.locators() if self._shared is not None else {},
            host=socket.gethostname(),
        )
        _nodes.add(self)

    @property
    def fabric_id(self) -> str:
        """The unique id of this node."""
        return self.card.card.fabric_id

    def check_memory(self) -> None:
        """Refuse a group that is to share memory if the system has refused it to this process.

        Raises:
            ResourceError: It has.
        """
        error = self._refused
        if error is not None:
            raise ResourceError(str(error), call=error.call, errno=error.errno) from error.__cause__

    def is_beside(self, other: NodeCard) -> bool:
        """Whether another member can share memory with this one."""
        return bool(self._shared is not None and other.memory and other.host_id == self.card.host_id)

    @staticmethod
    def is_inside(other: NodeCard) -> bool:
        """Whether another member is a rank of this process."""
        return Reception.is_inside(other.card.fabric_id)

    def company(self, rank: int, cards: Sequence[NodeCard], *, inside: bool, share: bool) -> Company:
        """Return the members of a group that are beside one of them, and see to it that their end is noticed.

        Args:
            rank: Its group rank.
            cards: The cards of all members.
            inside: All members are nodes of this process, reached without a network.
            share: Whether the group shares memory. Otherwise a member into which the system lets this process
                not look is left out: its end is seen at its connection.

        Raises:
            ResourceError: The system refused a look into a member, and the group shares memory.
        """
        members, lost, pids = [], [], set()
        for other, card in enumerate(cards):
            if inside and other != rank:
                fabric_id = card.card.fabric_id
                self._fabric.watch(-1, fabric_id, partial(Reception.has_departed, fabric_id))
            if inside or other == rank or not self.is_beside(card):
                continue
            pids.add(card.pid)
            try:
                neighbour = self._watched(card)
            except ResourceError:
                if share:
                    raise
                continue
            if neighbour is None:
                lost.append(other)
            else:
                members.append(Member(other, neighbour))
        spins = default_spins(len(members) + len(lost) + 1, pids, self._spin_us)
        return Company(tuple(members), tuple(lost), spins, lone_spins(pids, self._spin_us))

    def endpoint(
        self,
        context: int,
        rank: int,
        cards: Sequence[Card],
        company: Company,
        *,
        inside: bool,
        share: bool,
        describe: Describe,
        on_revoked: OnRevoked,
        names: RankNames = RANKS,
        uid: str = "",
    ) -> FabricEndpoint:
        """Open a group's messages; links are made when first needed.

        Args:
            cards: How to connect to each member.
            company: Of the rank: see `company`.
            inside: All members are nodes of this process, reached without a network.
            share: Whether messages to members of this host go through shared memory.
            describe: See `Describe`.
            on_revoked: Called when a member has revoked the group; it must not block.
            names: Names the members in texts.
            uid: The group's.
        """
        endpoint = FabricEndpoint(
            self._fabric,
            context,
            rank,
            cards,
            inside,
            describe,
            company.ranks if share else frozenset(),
            company.spins,
            company.lone_spins,
            on_revoked,
            names,
            uid,
        )
        for other in company.lost:
            self._fabric.mark_lost(cards[other].fabric_id)
        return endpoint

    def _watched(self, other: NodeCard) -> Neighbour | None:
        """Return a process of this host whose end will be noticed; None if it is gone already."""
        shared = self._shared
        assert shared is not None  # `is_beside` said so
        try:
            neighbour = shared.neighbour(other.card.fabric_id, other.pid, other.memory)
        except PeerLostError:
            return None
        self._fabric.watch(neighbour.fileno(), other.card.fabric_id, neighbour.has_departed)
        return neighbour

    # Rings, for the fabric's links

    def offer(self) -> tuple[RingWriter, str] | None:
        """Return a new ring in this process's memory, and where it is."""
        shared = self._shared
        region = shared.lend(HEADER_BYTES + RING_BYTES) if shared is not None else None
        if shared is None or region is None:
            return None
        where = {**shared.locators(), "pid": os.getpid(), "offset": region.offset}
        return RingWriter(region.bytes), json.dumps(where)

    def take(self, fabric_id: str, text: str) -> RingReader:
        """Return the reading end of a neighbour's ring.

        Raises:
            PeerLostError: Its process is gone.
            Exception: ``text`` is malformed, in any way.
        """
        shared = self._shared
        if shared is None:
            raise ValueError("this process shares no memory")
        where = json.loads(text)
        try:
            neighbour = shared.neighbour(fabric_id, int(where["pid"]), where)
        except ResourceError as error:  # it was opened when the group was made, as a rule
            raise PeerLostError(str(error)) from error
        return RingReader(neighbour.region(int(where["offset"]), HEADER_BYTES + RING_BYTES).bytes)

    def board(
        self,
        context: int,
        rank: int,
        company: Company,
        slot_size: int = SLOT_BYTES,
        names: RankNames = RANKS,
    ) -> Board:
        """Open a group's shared memory for members that are beside this one.

        Args:
            company: Of the rank: see `company`.
            slot_size: Bytes of each half of a slot.
            names: Names the members in texts.

        Raises:
            PeerLostError: A member is gone.
        """
        shared = self._shared
        assert shared is not None  # `is_beside` said so
        if company.lost:
            raise PeerLostError(f"{names(company.lost)} died before the group was made", ranks=company.lost)
        board = Board(shared, context, rank, company.members, company.spins, slot_size, names)
        self._boards.add(board)
        return board

    def forget_in_child(self) -> None:
        """After a fork: close the inherited descriptors, without messages and without locks."""
        self._fabric.forget_in_child()
        if self._shared is not None:
            self._shared.close_descriptors()

    def close(self) -> None:
        """Close links and shared memory; groups that are still open on it are aborted."""
        self._fabric.close()
        for board in list(self._boards):
            board.abort(GroupAbortedError("the links of this process were closed"))
        if self._shared is not None:
            self._shared.close()


def check_addresses(node: Node, info: GroupInfo, cards: Sequence[NodeCard]) -> None:
    """Refuse a group of which two ranks have one address, so that a link would lead to its own node.

    Args:
        node: The caller's.
        info: The group, as the caller sees it.
        cards: The addresses that its members have published, by group rank.

    Raises:
        InvalidUsageError: Two ranks have the same address, or the caller's is not that of its node.
    """
    first: dict[str, int] = {}
    for rank, card in enumerate(cards):
        other = first.setdefault(card.card.fabric_id, rank)
        if other != rank:
            raise InvalidUsageError(
                f"{info.names([other, rank])} have published the same address, of process {card.pid}; each "
                f"rank needs its own: leave out the option `node`, or give each rank a node that no other "
                f"rank has"
            )
    if first.get(node.fabric_id) != info.rank:
        raise InvalidUsageError(
            f"the address published as that of {info.names([info.rank])} is not that of this rank but of "
            f"process {cards[info.rank].pid}: was it started twice?"
        )


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


@in_child(InChild.LINKS)
def _forget_in_child() -> None:
    """After a fork: links and memory are the parent's; its deaths must not be hidden by the child."""
    for node in list(_nodes):
        node.forget_in_child()
