"""`FabricEndpoint`: one group's messages over the fabric of its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

from dist2.agreement import Agreement, Consensus
from dist2.backends.socket.transport.base import ANY_SOURCE, Endpoint, Transfer
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.links.fabric import Fabric
from dist2.backends.socket.transport.messages.explaining import (
    absence,
    differing,
    explained,
    last_seen,
    overdue,
)
from dist2.backends.socket.transport.messages.express import (
    ExpressReceive,
    ExpressSend,
    Lot,
    compiled_express,
)
from dist2.backends.socket.transport.messages.express_long import ExpressOffer, ExpressTake
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend, goes_short
from dist2.backends.socket.transport.messages.express_socket_long import SocketTake
from dist2.backends.socket.transport.messages.mailbox import Describe, Mailbox, OnRevoked
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.backends.socket.transport.messages.transfer import Message, Receiving, Sending
from dist2.clock import deadline_in
from dist2.compiled import messages
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)

if TYPE_CHECKING:
    from dist2.compiled._messages import Express

_TELL_S = 0.5
_ALL_DESCRIBE_S = 0.1
"""How long a mismatch waits for all members to say what they called,"""
_EXPLAIN_S = 0.3
"""and for those without which it could not be explained."""
_HEAR_S = 0.05
"""How long one who is left looks for the reason."""
_DIFFERED = MismatchError.__name__
_PROBE_NS = 50_000_000
"""How long a wait lasts before other members are asked; then twice as long, and so on"""
_PROBES_NS = 1_000_000_000
"""up to this."""
_SLICE_NS = 100_000_000


class FabricEndpoint(Endpoint):
    """Posts messages of one group to its fabric, and waits for them.

    Args:
        fabric: Of this process.
        context: The group's context id, equal on all members.
        rank: The caller's group rank.
        cards: How to reach the members, by group rank.
        inside: All members are fabrics of this process.
        describe: See `Describe`.
        beside: Members that share memory with this one.
        spins: How often to look for a message in shared memory before yielding the core.
        on_revoked: Told that a member has revoked the group; it must not block.
    """

    def __init__(
        self,
        fabric: Fabric,
        context: int,
        rank: int,
        cards: Sequence[Card],
        inside: bool,
        describe: Describe,
        beside: frozenset[int] = frozenset(),
        spins: int = 0,
        on_revoked: OnRevoked = lambda error: None,
    ) -> None:
        self.rank = rank
        self.world_size = len(cards)
        self._fabric = fabric
        self._spins = spins
        self._mailbox = Mailbox(context, rank, cards, inside, describe, beside, on_revoked)
        with fabric.lock:
            fabric.open_mailbox(self._mailbox)
        fabric.tell_finished()

    def ask(self, witness: Callable[[int], str]) -> None:
        """Have errors say what a member was last seen at where messages do not tell."""
        self._mailbox.witness = witness

    def begin(self, seq: int, fingerprint: int) -> None:
        """Note what this rank calls as operation ``seq``: messages of it that differ fail the group.

        Raises:
            MismatchError, PeerLostError, GroupAbortedError: The group has failed meanwhile.
        """
        fabric, mailbox = self._fabric, self._mailbox
        fabric.glance()
        if mailbox.begin(seq, fingerprint):
            with fabric.lock:
                fabric.compare(mailbox, seq, fingerprint)
        if mailbox.fault is not None:
            raise self._explained(mailbox.fault)

    def ended(self, seq: int, met: bool) -> None:
        """Note that collective ``seq`` has ended.

        Args:
            met: No rank ends it before all have called it.
        """
        mailbox = self._mailbox
        if met:
            mailbox.met = seq
        if mailbox.put_off_ns:
            self._put_off_no_more()

    def send(self, peer: int, seq: int, step: int, fingerprint: int, data: memoryview) -> Transfer:
        return self._send(Sending(self._mailbox.context, peer, False, seq, step, fingerprint, data))

    def recv(self, peer: int, seq: int, step: int, fingerprint: int, buffer: memoryview) -> Transfer:
        return self._recv(Receiving(self._mailbox.context, peer, False, seq, step, fingerprint, buffer))

    def send_tagged(self, peer: int, tag: int, fingerprint: int, data: memoryview) -> Transfer:
        self._fabric.glance()
        return self._send(Sending(self._mailbox.context, peer, True, 0, tag, fingerprint, data))

    def recv_tagged(self, peer: int, tag: int, fingerprint: int, buffer: memoryview) -> Transfer:
        self._fabric.glance()
        return self._recv(Receiving(self._mailbox.context, peer, True, 0, tag, fingerprint, buffer))

    def has_express(self, lot: Lot) -> bool:
        """Whether messages with a member may take the short way through shared memory."""
        return lot.peer in self._mailbox.beside

    def has_socket_way(self, lot: Lot) -> bool:
        """Whether messages with a member may take the short way over a socket."""
        return lot.peer != self.rank and lot.peer not in self._mailbox.beside and goes_short(lot)

    def socket_send(self, lot: Lot) -> SocketSend:
        """Return the short way to a member over a socket."""
        return SocketSend(self._fabric, self._mailbox, lot)

    def socket_receive(self, lot: Lot) -> SocketReceive:
        """Return the short way from a member over a socket."""
        if lot.is_long:
            return SocketTake(self._fabric, self._mailbox, lot)
        return SocketReceive(self._fabric, self._mailbox, lot)

    def rails(self, fingerprint: int) -> Rails:
        """Return the rails of one operation, for scripts in C."""
        return Rails(self._fabric, self._mailbox, fingerprint)

    def express_send(self, lot: Lot) -> ExpressSend:
        """Return the short way for short messages to a member that has one."""
        return ExpressSend(self._fabric, self._mailbox, lot)

    def compiled_express(self, lot: Lot) -> Express | None:
        """Return the short way, out and in, for messages with a member that has one; None without C."""
        if messages is None:
            return None
        return compiled_express(self._fabric, self._mailbox, lot, self._spins)

    def express_offer(self, lot: Lot) -> ExpressOffer:
        """Return the short way for long messages to a member that has one."""
        return ExpressOffer(self._fabric, self._mailbox, lot, self._spins)

    def express_receive(self, lot: Lot) -> ExpressReceive:
        """Return the short way for messages from a member that has one."""
        if not lot.is_long:
            return ExpressReceive(self._fabric, self._mailbox, lot, self._spins)
        return ExpressTake(
            self._fabric,
            self._mailbox,
            lot,
            self._spins,
            lambda receiving, deadline_ns: self.wait([receiving], deadline_ns),
        )

    def _send(self, sending: Sending) -> Sending:
        with self._fabric.lock:
            self._fabric.post_send(self._mailbox, sending)
        if sending.peer == self.rank:  # it may have ended a receive that another thread waits for
            self._fabric.tell_finished()
            self._fabric.wake()
        return sending

    def _recv(self, receiving: Receiving) -> Receiving:
        with self._fabric.lock:
            self._fabric.post_recv(self._mailbox, receiving)
        if receiving.loan is not None:  # there is something to read, whoever polls
            self._fabric.wake()
        if receiving.source == self.rank:  # it may have ended a send that another thread waits for
            self._fabric.tell_finished()
            self._fabric.wake()
        return receiving

    def background(self, transfer: Transfer, deadline_ns: int) -> None:
        """See to it that a posted message makes progress though nobody waits for it.

        At the deadline it fails with `OperationTimeoutError`.
        """
        if isinstance(transfer, Message):
            transfer.deadline_ns = deadline_ns
        self._fabric.background()

    def help(self, transfer: Transfer, deadline_ns: int) -> None:
        """Make progress until a message in the background is done, or the deadline passes."""
        if not transfer.done:
            self._fabric.run_until(lambda: transfer.done, deadline_ns, self._interrupted)
            if not transfer.done:
                self._fabric.fail_overdue()
        self._fabric.tell_finished()

    def wait(self, transfers: Sequence[Transfer], deadline_ns: int, beside: Sequence[Transfer] = ()) -> None:
        for transfer in transfers:
            if not transfer.done or transfer.error is not None:
                break
        else:
            return  # short sends are done when posted

        def done() -> bool:
            complete = True
            for transfer in transfers:
                if not transfer.done:
                    complete = False
                elif transfer.error is not None:
                    return True
            return complete or any(transfer.error is not None for transfer in beside)

        try:
            complete = self._run_until(done, deadline_ns)
        except BaseException as error:  # KeyboardInterrupt: nothing may touch the buffers any more
            self._mailbox.note_reason(error)
            self.cancel(transfers)
            raise
        self._fabric.tell_finished()
        if not complete:
            self._give_up(transfers)
        errors = (transfer.error for transfer in (*transfers, *beside) if transfer.error is not None)
        failed = next(errors, None)
        if failed is not None:
            self.cancel(transfers)
            raise self._explained(failed)

    def _run_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        """Make progress until ``done()``, telling the other members when that takes long."""
        pause_ns = _PROBE_NS
        while True:
            pause = min(deadline_ns, monotonic_ns() + pause_ns)
            if self._fabric.run_until(done, pause, self._interrupted):
                return True
            if self._is_overdue():
                self._put_off_no_more()
            if self._interrupted() or monotonic_ns() >= deadline_ns:
                return False
            with self._fabric.lock:
                self._fabric.probe(self._mailbox)
            pause_ns = min(2 * pause_ns, _PROBES_NS)

    def _interrupted(self) -> bool:
        mailbox = self._mailbox
        return mailbox.aborted is not None or mailbox.fault is not None or self._is_overdue()

    def _is_overdue(self) -> bool:
        """Whether the group should have failed by now, but for a collective that does not end."""
        return 0 < self._mailbox.put_off_ns < monotonic_ns()

    def _put_off_no_more(self) -> None:
        with self._fabric.lock:
            self._fabric.put_off_no_more(self._mailbox)

    def _give_up(self, transfers: Sequence[Transfer]) -> None:
        """Cancel what is not done, and raise why: the group failed, or time is up."""
        mailbox = self._mailbox
        waited_for = {each.source for each in transfers if not each.done and each.source != ANY_SOURCE}
        tagged = all(isinstance(each, Message) and each.tagged for each in transfers)
        error = mailbox.aborted or mailbox.fault or overdue(mailbox, waited_for, collective=not tagged)
        mailbox.note_reason(error)
        self.cancel(transfers)
        if mailbox.aborted is not None:
            raise mailbox.aborted
        if mailbox.fault is not None:
            raise self._explained(mailbox.fault)
        raise error

    def _explained(self, error: BaseException) -> BaseException:
        """Return an error as its waiter gets it: a mismatch with what the others called."""
        if self._mailbox.put_off_ns:  # why somebody left, perhaps
            self._put_off_no_more()
            error = self._mailbox.fault or error
        if isinstance(error, PeerLostError):
            self._hear_out(error)
            error = self._mailbox.fault or error
        if isinstance(error, MismatchError):
            self._fabric.run_until(self._all_described, deadline_in(_ALL_DESCRIBE_S), lambda: False)
            self._fabric.run_until(self._is_explained, deadline_in(_EXPLAIN_S), lambda: False)
            return explained(self._mailbox)
        return error

    def _hear_out(self, error: PeerLostError) -> None:
        """Take in why a member left: it may have told others, whose word comes another way, and later."""
        mailbox = self._mailbox
        differed = any(mailbox.reasons.get(rank, "").startswith(_DIFFERED) for rank in error.ranks)
        patience_s = _EXPLAIN_S if differed else _HEAR_S
        self._fabric.run_until(lambda: mailbox.fault is not None, deadline_in(patience_s), lambda: False)

    def _all_described(self) -> bool:
        return len(self._mailbox.described) == self.world_size - 1

    def _is_explained(self) -> bool:
        mailbox = self._mailbox
        if not mailbox.offenders <= mailbox.described.keys():
            return False
        return bool(differing(mailbox)) or self._all_described()

    def cancel(self, transfers: Sequence[Transfer]) -> None:
        with self._fabric.lock:
            for transfer in transfers:
                if not transfer.done and isinstance(transfer, Message):
                    self._fabric.withdraw(self._mailbox, transfer)
                    self._fabric.finish(transfer, GroupAbortedError("cancelled"))
        self._fabric.tell_finished()

    def disagree(self, seq: int) -> None:
        with self._fabric.lock:
            self._fabric.disagree(self._mailbox, seq)
        self._fabric.tell_finished()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""
        return self._fabric.fileno()

    def attend(self) -> None:
        """Make what progress there is to make, without waiting.

        Raises:
            PeerLostError, MismatchError, GroupAbortedError: What the group failed with.
        """
        self._fabric.attend()
        if self._interrupted():
            self._give_up([])

    def last_seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the operation that each of some members was last seen at, in words."""
        self._fabric.attend()
        with self._fabric.lock:
            return last_seen(self._mailbox, ranks)

    def why(self, ranks: Iterable[int]) -> str:
        """Return what members said broke the group for them, to go behind what they did."""
        return self._mailbox.why(ranks)

    def broken_by(self, error: BaseException) -> None:
        """Keep what broke the group on this rank, for those that wait for it."""
        self._mailbox.reason = b""  # what was noted before does not name the operation
        self._mailbox.note_reason(error)

    def look(self) -> None:
        """Take in what members have said, without waiting, whatever became of the group."""
        self._fabric.attend()

    def revoke(self, by: int) -> None:
        """Make every pending and later message of the group fail with `GroupRevokedError`, on all members.

        Args:
            by: Group rank of who revoked it.
        """
        with self._fabric.lock:
            self._fabric.revoke(self._mailbox, by)
        self._fabric.tell_finished()
        self._fabric.wake()

    def agree(
        self,
        flags: int,
        deadline_ns: int,
        shrinks: bool = False,
        departed: Callable[[], Iterable[int]] = tuple,
    ) -> tuple[int, Agreement]:
        """Return the number of the group's next agreement, and what the survivors agree on.

        Args:
            flags: This rank's.
            deadline_ns: When to give up.
            shrinks: Whether this rank called `shrink`, and not `agree`.
            departed: Returns members that are seen to have left, though they may not have said so.

        Raises:
            OperationTimeoutError: `missing` did not come; the agreement stays under way, the next call
                goes on with it.
            MismatchError: Some survivors called `shrink` and others `agree`: the agreement has ended for all.
            PeerLostError: The others hold this rank for gone.
            GroupAbortedError: `abort` was called.
        """
        fabric, mailbox = self._fabric, self._mailbox
        with fabric.lock:
            number = mailbox.agreements.number
            consensus = fabric.propose(mailbox, flags, shrinks)
        while monotonic_ns() < deadline_ns and mailbox.aborted is None:
            seen = list(departed())  # before the slice, in which what they said last comes in
            slice_ns = min(deadline_ns, monotonic_ns() + _SLICE_NS)
            if fabric.run_until(
                lambda: consensus.decision is not None or consensus.expelled,
                slice_ns,
                lambda: mailbox.aborted is not None,
            ):
                break
            with fabric.lock:
                fabric.leave_out(mailbox, consensus, seen)
            fabric.tell_finished()
        decision = consensus.decision
        if decision is None:
            raise self._undecided(consensus)
        # Whoever learns a decision tells it before it uses it: others may count on hearing of it.
        fabric.run_until(lambda: fabric.has_told(mailbox), deadline_in(_TELL_S), lambda: False)
        with fabric.lock:
            mailbox.agreements.finish()
        survivors = set(range(len(mailbox.fabric_ids))) - decision.failed
        if decision.shrinking & survivors not in (set(), survivors):
            raise _called_differently(survivors, decision.shrinking)
        return number, Agreement(decision.flags, tuple(sorted(decision.failed)))

    def _undecided(self, consensus: Consensus) -> Dist2Error:
        """Return why an agreement has no answer here."""
        if self._mailbox.aborted is not None:
            return self._mailbox.aborted
        if consensus.expelled:
            return PeerLostError(
                f"the other members hold rank {self.rank} (this one) for gone, and go on without it",
                ranks=[self.rank],
            )
        missing = consensus.awaited
        if not missing:
            return OperationTimeoutError("all ranks have come, but some have not heard of a death yet")
        return absence(missing, last_seen(self._mailbox, missing))

    def lost(self) -> list[int]:
        """Return the group ranks that are known to have died."""
        mailbox = self._mailbox
        self._fabric.attend()
        with self._fabric.lock:
            return [r for r, each in enumerate(mailbox.fabric_ids) if self._fabric.has_died(each)]

    def abort(self, error: Dist2Error) -> None:
        """Make blocked waits raise ``error``. Safe in signal handlers."""
        self._mailbox.aborted = error
        self._fabric.wake()

    def close(self, error: BaseException | None = None) -> None:
        fault = error if isinstance(error, Dist2Error) else GroupAbortedError("the group was closed")
        with self._fabric.lock:
            self._fabric.close_mailbox(self._mailbox, fault)
        self._fabric.tell_finished()
        self._fabric.wake()


def _called_differently(survivors: set[int], shrinking: frozenset[int]) -> MismatchError:
    actual = {rank: "shrink()" if rank in shrinking else "agree()" for rank in sorted(survivors)}
    calls = ", ".join(f"rank {rank}: {call}" for rank, call in actual.items())
    return MismatchError(f"ranks called different operations: {calls}", actual=actual)
