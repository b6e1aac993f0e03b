"""`Outside`: watches operations that another backend runs, on a GPU for example, over a group's links.

The links find deaths, mismatches and ranks that do not come: see ``transport/messages``. An operation of
another backend takes part in that as follows. `begin` records the call of this rank, for the other members to
compare. `wait` makes progress on the links until the operation is over, and sends the description of this
rank's call to the others if that takes long. A failure that is found fails the group, as for other
operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns

from dist2.backends.socket.messenger import Messenger
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Sending, Transfer
from dist2.errors import Dist2Error, OperationTimeoutError, PeerLostError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation

_PROBE_NS = 50_000_000
"""How long a wait lasts before the other members are asked; then twice as long, and so on"""
_PROBES_NS = 1_000_000_000
"""up to this."""
_LOOK_NS = 200_000
"""First pause between polls of a state that cannot wake the waiter; it doubles each time."""
_TELL_NS = 100_000_000
"""Pause between reports of this rank's call to the others, if it calls much and never waits."""
_NOTICE = 1 << 62
"""Tag of the messages that describe external sends: above all tags of users."""
_SENT_NS = 500_000_000
"""How long a message may take to be sent whose receiver has left."""
_HEAR_NS = 1_000_000_000
"""How long another library's report of a loss waits for that of the links."""


class Outside:
    """The operations of one group that another backend runs.

    Args:
        endpoint: The group's links.
        messenger: Describes its point-to-point operations.
        recent: Its latest collectives, for descriptions.
    """

    def __init__(self, endpoint: FabricEndpoint, messenger: Messenger, recent: deque[Operation]) -> None:
        self._endpoint = endpoint
        self._messenger = messenger
        self._recent = recent
        self._told_ns = 0
        self._left_ns: dict[int, int] = {}
        self.wake = endpoint.wake

    def begin(self, operation: Operation) -> Transfer | None:
        """Note the call of this rank; return the notice of a message: see `wait`.

        Raises:
            MismatchError, PeerLostError, GroupAbortedError, GroupRevokedError: The group has failed
            meanwhile.
        """
        signature, notice = operation.signature, None
        if signature.kind.is_p2p:
            notice = self.notice(operation, _NOTICE)
        else:
            self._recent.append(operation)
            self._endpoint.begin(operation.seq, signature.fingerprint)
        if operation.created_ns - self._told_ns > _TELL_NS:
            self._told_ns = operation.created_ns
            self._endpoint.probe()
        return notice

    def compare(self, operation: Operation) -> None:
        """Wait until the rank before this one has called a collective, and compare; so do all, in a ring.

        Raises:
            MismatchError: Ranks called different things.
            OperationTimeoutError, PeerLostError, GroupAbortedError, GroupRevokedError: As `wait`.
        """
        endpoint, seq, fingerprint = self._endpoint, operation.seq, operation.signature.fingerprint
        if endpoint.world_size == 1:
            return
        after, before = (endpoint.rank + 1) % endpoint.world_size, (endpoint.rank - 1) % endpoint.world_size
        sent = endpoint.send(after, seq, 0, fingerprint, memoryview(b""))
        came = endpoint.recv(before, seq, 0, fingerprint, memoryview(bytearray(0)))
        endpoint.wait([came], operation.deadline_ns, beside=[sent])

    def ended(self, operation: Operation) -> None:
        """Note that a collective is over, which no rank ends before all have called it."""
        kind = operation.signature.kind
        if not kind.is_p2p:
            self._endpoint.ended(operation.seq, met=kind in (OpKind.ALL_REDUCE, OpKind.BARRIER))

    def check(self) -> None:
        """Make progress without waiting.

        Raises:
            MismatchError, PeerLostError, GroupAbortedError, GroupRevokedError: The group has failed.
        """
        self._endpoint.attend()

    def notice(self, operation: Operation, tag: int) -> Transfer:
        """Compare the calls of both sides of a message by an empty one, without waiting for it.

        Returns:
            The empty message: see `arrived`.
        """
        signature, endpoint = operation.signature, self._endpoint
        peer = ANY_SOURCE if signature.peer is None else signature.peer
        self._messenger.last = operation
        post = endpoint.send_tagged if signature.kind is OpKind.SEND else endpoint.recv_tagged
        notice = post(peer, tag, signature.fingerprint, memoryview(bytearray(0)))
        self._messenger.note(notice.number, operation)
        return notice

    def arrived(self, notice: Transfer) -> bool:
        """Whether the other side of a message has made its call too; if so, `Transfer.source` is known.

        Raises:
            MismatchError, PeerLostError, GroupAbortedError, GroupRevokedError: It made another call, or the
                group has failed.
        """
        if notice.done and notice.error is not None:
            self._endpoint.wait([notice], monotonic_ns())
        return notice.done

    def cancel(self, notice: Transfer) -> None:
        """Give up an empty message."""
        self._endpoint.cancel([notice])

    def left(self, rank: int) -> PeerLostError | None:
        """Return the error that names a member which has left; None if it has not, as far as is known."""
        return self._endpoint.deserted(rank)

    def cause_of(self, error: Dist2Error, deadline_ns: int) -> Dist2Error:
        """Return the loss as the links report it within a second, which names the ranks; else the error.

        Args:
            error: The failure as another library reported it; the cause of the returned one.
            deadline_ns: When to give up, if that is sooner.
        """
        cause = error
        try:
            self.wait(lambda: False, min(deadline_ns, monotonic_ns() + _HEAR_NS))
        except OperationTimeoutError:
            cause = self._endpoint.gone() or error  # left after it had called the operation
        except Dist2Error as failure:
            cause = failure
        if cause is not error:
            cause.__cause__ = error
        return cause

    def wait(
        self,
        done: Callable[[], bool],
        deadline_ns: int,
        peers: tuple[int, ...] | None = None,
        look_ns: int = 20_000_000,
        is_patient: bool = False,
        notice: Transfer | None = None,
    ) -> None:
        """Return when something is done.

        Args:
            done: Tells whether it is done.
            deadline_ns: When to give up.
            peers: See `peers_of`.
            look_ns: Longest time between two calls of ``done``, unless `wake` is called.
            is_patient: Sleep for that time from the beginning. Otherwise the thread first looks often.
            notice: Of a message: fails it if the other side leaves without its call.

        Raises:
            OperationTimeoutError: The deadline passed; `missing` has the missing ranks.
            MismatchError, PeerLostError, GroupAbortedError, GroupRevokedError: The group failed.
        """
        pause_ns, next_ns = _PROBE_NS, look_ns if is_patient else _LOOK_NS
        probe_ns = monotonic_ns() + pause_ns
        while True:
            until_ns = min(monotonic_ns() + next_ns, probe_ns, deadline_ns)
            if self._endpoint.watch(done, until_ns, not is_patient):
                return
            self._check_departures(peers, notice)
            now = monotonic_ns()
            if now >= deadline_ns:
                raise self._endpoint.overdue(peers)
            if now >= probe_ns:
                self._endpoint.probe()
                pause_ns = min(2 * pause_ns, _PROBES_NS)
                probe_ns = now + pause_ns
            next_ns = min(2 * next_ns, look_ns)

    def _check_departures(self, peers: tuple[int, ...] | None, notice: Transfer | None) -> None:
        """Raise if members have left without the call that an operation needs of them.

        A member that leaves in good order has received all that it called for. So a message that is not sent
        a moment later never is.
        """
        if notice is not None and notice.done and notice.error is not None:
            self._endpoint.wait([notice], monotonic_ns())
        lost = None
        if peers is None:
            lost = self._endpoint.deserted()
        elif isinstance(notice, Sending):
            lost = self._endpoint.deserted(notice.peer)
            now = monotonic_ns()
            if lost is not None and now - self._left_ns.setdefault(notice.peer, now) < _SENT_NS:
                return
        if lost is not None:
            raise lost

    def gather(self, content: bytes, number: int, deadline_ns: int) -> list[bytes]:
        """Return the data of all ranks, of equal length: small, and before the group has operations.

        Args:
            content: This rank's data.
            number: Distinguishes this and the next number from other calls of the group.
            deadline_ns: When to give up.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError: As `wait`.
        """
        endpoint, size = self._endpoint, len(content)
        everything = bytearray(size * endpoint.world_size) if endpoint.rank == 0 else bytearray(content)
        view, tag = memoryview(everything), _NOTICE + 1 + number
        if endpoint.rank == 0:
            everything[:size] = content
            others = range(1, endpoint.world_size)
            parts = [endpoint.recv_tagged(r, tag, 1, view[r * size : (r + 1) * size]) for r in others]
            self._complete(parts, deadline_ns)
        else:
            self._complete([endpoint.send_tagged(0, tag, 1, view)], deadline_ns)
        root_has = bytes(everything) if endpoint.rank == 0 else None
        found = self.share(root_has, size * endpoint.world_size, 0, number + 1, deadline_ns)
        return [found[start : start + size] for start in range(0, len(found), size)]

    def share(self, content: bytes | None, nbytes: int, root: int, number: int, deadline_ns: int) -> bytes:
        """Return the root's data: small, and before the group has operations.

        Args:
            content: At the root: its data.
            nbytes: Its length.
            root: Group rank.
            number: Distinguishes this from other calls of the group.
            deadline_ns: When to give up.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError: As `wait`.
        """
        endpoint, tag = self._endpoint, _NOTICE + 1 + number
        buffer = bytearray(content if content is not None else nbytes)
        transfers: list[Transfer]
        if content is not None:
            others = (rank for rank in range(endpoint.world_size) if rank != root)
            transfers = [endpoint.send_tagged(rank, tag, 1, memoryview(buffer)) for rank in others]
        else:
            transfers = [endpoint.recv_tagged(root, tag, 1, memoryview(buffer))]
        self._complete(transfers, deadline_ns)
        return bytes(buffer)

    def _complete(self, transfers: Sequence[Transfer], deadline_ns: int) -> None:
        try:
            self._endpoint.wait(transfers, deadline_ns)
        except Dist2Error:
            self._endpoint.cancel(transfers)
            raise


def peers_of(operation: Operation) -> tuple[int, ...] | None:
    """Return the ranks that a message waits for, none if any may send it; None for a collective."""
    signature = operation.signature
    if not signature.kind.is_p2p:
        return None
    return () if signature.peer is None else (signature.peer,)
