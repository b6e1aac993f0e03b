"""Building a socket group: members publish their addresses and read those of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import attrs
import torch

from dist2.backends.base import GroupSpec
from dist2.backends.socket.address import data_host
from dist2.backends.socket.backend import Place, SocketBackend
from dist2.backends.socket.options import SocketOptions, Transport
from dist2.backends.socket.transport.node import Node, NodeCard, check_addresses
from dist2.backends.socket.transport.node_pool import node_pool
from dist2.backends.socket.tuning import Thresholds, Tuning
from dist2.errors import (
    AuthenticationError,
    BackendUnavailableError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.runtime.arguments import difference_of
from dist2.runtime.config import Config
from dist2.runtime.deadline import Deadline
from dist2.security.authenticator import Credentials
from dist2.security.refusals import refusals
from dist2.security.sealing import seal, unseal
from dist2.store.waiting import absent, arrive, fetch


def create(spec: GroupSpec) -> SocketBackend:
    """Return the backend of a new group.

    Raises:
        UnknownOptionError, InvalidUsageError: An option is wrong or differs among ranks, or the tuning file
            of rank 0 is.
        OperationTimeoutError: Members did not come in time; names them.
        PeerLostError: A member failed or died while it built the group; says why.
        BackendUnavailableError: ``transport="shm"`` for members that cannot share memory, or ``"inproc"`` for
            several processes.
        AuthenticationError: A member's notice is not sealed with this process's secret.
        RendezvousError: The address to listen on is not this machine's.
        ResourceError: The system refused descriptors, memory or a system call.
    """
    options = check(spec.device, spec.options)
    host = options.host or data_host(spec.store)
    node = options.node if options.node is not None else node_pool.acquire(host, spec.info.uid)
    try:
        if options.shares_memory:
            node.check_memory()
        deadline = Deadline.after(spec.timeout_s)
        notices = Notices(spec, node.credentials)
        notices.post_tuning(options.tuning)
        notices.post_card(attrs.evolve(node.card, asked=options.alike))
        keys = _await_all(spec, _CARD, deadline)
        *said, tuning = (value.decode(errors="replace") for value in fetch(spec.store, [*keys, _TUNING]))
        cards = [notices.card(rank, text) for rank, text in enumerate(said)]
        check_addresses(node, spec.info, cards)
        difference = difference_of({rank: card.asked for rank, card in enumerate(cards)})
        if difference:
            raise InvalidUsageError(difference)
        if options.transport is Transport.INPROC:
            _check_inside(spec, cards)
        place = Place(node, options.node is not None, tuple(cards), notices.thresholds(tuning))
        backend = _attached(spec, options, place)
        try:
            # No rank returns, and perhaps leaves again, before all have attached to its memory.
            spec.store.set(_key(spec.info.rank, _BUILT), "yes")
            _await_all(spec, _BUILT, deadline)
        except BaseException:
            backend.shutdown()
            raise
        if options.node is None:
            node_pool.built(node, spec.info.uid)
        return backend
    finally:
        if options.node is None:
            node_pool.release(node)  # the backend holds it for itself


def check(device: torch.device, options: Mapping[str, object]) -> SocketOptions:
    """Return the options, checked; `new_group` calls this before it waits for other ranks.

    Raises:
        UnknownOptionError, InvalidUsageError: One is wrong, or the device is.
    """
    if device.type != "cpu":
        raise InvalidUsageError(f"device must be 'cpu' for backend 'socket', got {str(device)!r}")
    return SocketOptions.parse(options, Config.from_environment())


create.check = check  # type: ignore[attr-defined]  # found by `new_group`


def _check_inside(spec: GroupSpec, cards: Sequence[NodeCard]) -> None:
    """Refuse members in other processes.

    Raises:
        BackendUnavailableError: There are some.
    """
    outside = [rank for rank, card in enumerate(cards) if not Node.is_inside(card)]
    if outside:
        raise BackendUnavailableError(
            f"transport='inproc' is for ranks that are threads of one process; not in the process of "
            f"{spec.info.names([spec.info.rank])}: {spec.info.names(outside)}; use transport='auto'"
        )


def _attached(spec: GroupSpec, options: SocketOptions, place: Place) -> SocketBackend:
    """Return the backend, attached to the memory of the members beside this one.

    Raises:
        PeerLostError: One of these has died, or given up.
    """
    try:
        return SocketBackend(spec, options, place)
    except PeerLostError as error:
        # It may be about to tell its reason, or be found dead with the cause.
        with suppress(OperationTimeoutError):
            _await_all(spec, _BUILT, Deadline.after(_REASON_S))
        died = place.names(spec.info).ended(dict.fromkeys(error.ranks, "died"))
        raise PeerLostError(died, ranks=error.ranks) from error


@attrs.frozen
class Notices:
    """The notices of a group's members in its store. Writers to the store are not trusted.

    Attributes:
        spec: The group.
        credentials: The secret of seals.
    """

    spec: GroupSpec
    credentials: Credentials

    def post_card(self, card: NodeCard) -> None:
        """Publish the address of this rank."""
        rank = self.spec.info.rank
        self.spec.store.set(_key(rank, _CARD), self._seal(card.to_json(), rank, _CARD))

    def card(self, rank: int, text: str) -> NodeCard:
        """Return the card of a member.

        Raises:
            AuthenticationError: No member of this job has, for this group and rank.
            WireError: It is no card.
        """
        return NodeCard.from_json(self._unseal(text, rank, _CARD))

    def post_tuning(self, path: str | None) -> None:
        """As rank 0, publish the group's constants: all ranks must select the same algorithms."""
        if self.spec.info.rank == 0:
            tuning = Tuning.read(path) if path is not None else Tuning()
            text = attrs.evolve(tuning, measured={}).to_json()
            self.spec.store.set(_TUNING, self._seal(text, 0, _TUNING))

    def thresholds(self, text: str) -> Thresholds:
        """Return the constants of rank 0, which it publishes before its card."""
        return Tuning.from_json(self._unseal(text, 0, _TUNING), "rank 0's tuning").thresholds

    def _seal(self, text: str, rank: int, what: str) -> str:
        return seal(self.credentials, text, what, self.spec.info.uid, str(rank))

    def _unseal(self, text: str, rank: int, what: str) -> str:
        try:
            return unseal(self.credentials, text, what, self.spec.info.uid, str(rank))
        except AuthenticationError as error:
            refusals.note(
                "card", error.reason, self.spec.info.names([rank]), str(error), group=self.spec.info.name
            )
            raise AuthenticationError(
                f"the {what} that {self.spec.info.names([rank])} has published: {error}", reason=error.reason
            ) from error


def _await_all(spec: GroupSpec, what: str, deadline: Deadline) -> list[str]:
    """Wait until every member has published this; return the keys, by rank.

    Raises:
        OperationTimeoutError: Some did not come in time; names them.
        PeerLostError: A member failed or died meanwhile.
    """
    ranks = range(spec.info.world_size)
    keys = [_key(rank, what) for rank in ranks]
    if not arrive(spec.store, keys, deadline):
        missing = absent(spec.store, partial(_key, what=what), ranks)
        raise OperationTimeoutError(
            f"{spec.info.names(missing)} of {spec.info.world_size} did not arrive within "
            f"{spec.timeout_s:.3g} s",
            missing=missing,
            timeout_s=spec.timeout_s,
        )
    return keys


_REASON_S = 1.0
"""How long a rank waits for the reason of a member whose memory is gone, in seconds."""
_CARD, _BUILT, _TUNING = "card", "built", "tuning"


def _key(rank: int, what: str) -> str:
    return f"{what}/{rank}"
