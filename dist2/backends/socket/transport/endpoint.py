"""`FabricEndpoint`: one group's messages over the fabric of its process."""

from __future__ import annotations

from collections.abc import Sequence

from dist2.agreement import Agreement, Consensus
from dist2.backends.socket.transport.base import ANY_SOURCE, Endpoint, Transfer
from dist2.backends.socket.transport.card import Card
from dist2.backends.socket.transport.express import ExpressReceive, ExpressSend, Lot
from dist2.backends.socket.transport.express_long import ExpressOffer, ExpressTake
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.mailbox import Called, Describe, Mailbox, OnRevoked
from dist2.backends.socket.transport.transfer import Message, Receiving, Sending
from dist2.clock import deadline_in
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)

_EXPLAIN_S = 0.5
_TELL_S = 0.5


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

    def begin(self, seq: int, fingerprint: int) -> None:
        """Note what this rank calls as operation ``seq``: messages of it that differ fail the group."""
        with self._fabric.lock:
            self._fabric.begin(self._mailbox, seq, fingerprint)

    def send(self, peer: int, seq: int, step: int, fingerprint: int, data: memoryview) -> Transfer:
        return self._send(Sending(self._mailbox.context, peer, False, seq, step, fingerprint, data))

    def recv(self, peer: int, seq: int, step: int, fingerprint: int, buffer: memoryview) -> Transfer:
        return self._recv(Receiving(self._mailbox.context, peer, False, seq, step, fingerprint, buffer))

    def send_tagged(self, peer: int, tag: int, fingerprint: int, data: memoryview) -> Transfer:
        return self._send(Sending(self._mailbox.context, peer, True, 0, tag, fingerprint, data))

    def recv_tagged(self, peer: int, tag: int, fingerprint: int, buffer: memoryview) -> Transfer:
        return self._recv(Receiving(self._mailbox.context, peer, True, 0, tag, fingerprint, buffer))

    def has_express(self, lot: Lot) -> bool:
        """Whether messages with a member may take the short way."""
        return lot.peer in self._mailbox.beside

    def express_send(self, lot: Lot) -> ExpressSend:
        """Return the short way for short messages to a member that has one."""
        return ExpressSend(self._fabric, self._mailbox, lot)

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

    def wait(self, transfers: Sequence[Transfer], deadline_ns: int) -> None:
        for transfer in transfers:
            if not transfer.done or transfer.error is not None:
                break
        else:
            return  # short sends are done when posted

        def done() -> bool:
            for transfer in transfers:  # noqa: SIM110 - `all` of a generator costs three times as much
                if not transfer.done:
                    return False
            return True

        try:
            complete = self._fabric.run_until(done, deadline_ns, self._interrupted)
        except BaseException:  # KeyboardInterrupt: nothing may touch the buffers any more
            self.cancel(transfers)
            raise
        self._fabric.tell_finished()
        if not complete:
            self._give_up(transfers)
        failed = next((transfer.error for transfer in transfers if transfer.error is not None), None)
        if failed is not None:
            self.cancel(transfers)
            raise self._explained(failed)

    def _interrupted(self) -> bool:
        mailbox = self._mailbox
        return mailbox.aborted is not None or mailbox.fault is not None

    def _give_up(self, transfers: Sequence[Transfer]) -> None:
        """Cancel what is not done, and raise why: the group failed, or time is up."""
        mailbox = self._mailbox
        missing = sorted({each.source for each in transfers if not each.done and each.source != ANY_SOURCE})
        self.cancel(transfers)
        if mailbox.aborted is not None:
            raise mailbox.aborted
        if mailbox.fault is not None:
            raise self._explained(mailbox.fault)
        names = ", ".join(map(str, missing)) or "any"
        raise OperationTimeoutError(f"rank(s) {names} did not arrive in time", missing=missing)

    def _explained(self, error: BaseException) -> BaseException:
        """Return a mismatch with what the others called, for which it waits a moment."""
        mailbox = self._mailbox
        if not isinstance(error, MismatchError):
            return error
        self._fabric.run_until(self._is_explained, deadline_in(_EXPLAIN_S), lambda: False)
        mine = mailbox.mine
        actual = {rank: called.text for rank, called in self._differing().items()}
        for rank in mailbox.offenders - mailbox.described.keys():
            actual[rank] = "an operation that it did not describe in time"
        called = "; ".join(f"rank {rank} called {what}" for rank, what in sorted(actual.items()))
        return MismatchError(
            f"ranks called different operations: rank {self.rank} (this one) called {mine.text}; {called}",
            expected=mine.text,
            actual=actual,
        )

    def _differing(self) -> dict[int, Called]:
        """Return who is known to have called something else than this rank."""
        mailbox = self._mailbox
        mine = (mailbox.mine.seq, mailbox.mine.fingerprint)
        return {
            rank: called
            for rank, called in mailbox.described.items()
            if (called.seq, called.fingerprint) != mine
        }

    def _is_explained(self) -> bool:
        mailbox = self._mailbox
        if not mailbox.offenders <= mailbox.described.keys():
            return False
        return bool(self._differing()) or len(mailbox.described) == self.world_size - 1

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

    def agree(self, flags: int, deadline_ns: int) -> tuple[int, Agreement]:
        """Return the number of the group's next agreement, and what the survivors agree on.

        Raises:
            OperationTimeoutError: `missing` did not come; the agreement stays under way, the next call
                goes on with it.
            PeerLostError: The others hold this rank for gone.
            GroupAbortedError: `abort` was called.
        """
        fabric, mailbox = self._fabric, self._mailbox
        with fabric.lock:
            number = mailbox.council.number
            consensus = fabric.propose(mailbox, flags)
        fabric.run_until(
            lambda: consensus.decision is not None or consensus.expelled,
            deadline_ns,
            lambda: mailbox.aborted is not None,
        )
        decision = consensus.decision
        if decision is None:
            raise self._undecided(consensus)
        # Whoever learns a decision tells it before it uses it: others may count on hearing of it.
        fabric.run_until(lambda: fabric.has_told(mailbox), deadline_in(_TELL_S), lambda: False)
        with fabric.lock:
            mailbox.council.finish()
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
        names = ", ".join(map(str, missing)) or "none: all have come, but some have not heard of a death yet"
        return OperationTimeoutError(f"rank(s) {names} did not come in time", missing=missing)

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
