# cython: annotation_typing=False
"""`FabricEndpoint`: one group's messages over the fabric of its process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.messages.ballot import Ballot
from dist2.backends.socket.transport.messages.calls import Describe
from dist2.backends.socket.transport.messages.departures import behind, gone_error
from dist2.backends.socket.transport.messages.explaining import last_seen, left_words, overdue
from dist2.backends.socket.transport.messages.given_up import GivenUp
from dist2.backends.socket.transport.messages.inquiry import Inquiry
from dist2.backends.socket.transport.messages.mailbox import Mailbox, OnRevoked
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Receiving, Sending, Transfer
from dist2.backends.socket.transport.messages.ways import ShortWays
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.runtime.built import check_built
from dist2.runtime.deadline import extended, monotonic_ns, note_wait
from dist2.runtime.rank_names import RANKS, RankNames

check_built(__name__, __file__)

_PROBE_NS = 50_000_000
"""How long a wait lasts before other members are asked; then twice as long, and so on"""
_PROBES_NS = 1_000_000_000
"""up to this."""


class FabricEndpoint:
    """Posts messages of one group to its fabric, and waits for them.

    It knows the members by group rank, and stamps every message with the group's context id. Posting never
    blocks; `wait` does, and a thread that waits makes progress for every group of the process.

    Messages of collectives are matched by ``(peer, seq, step)``: `seq` numbers the operation in its group,
    `step` the message within the operation's schedule between these two ranks. `fingerprint` is the
    operation's; where the two sides differ, both get `MismatchError`. Tagged ones are matched by
    ``(peer, tag)`` in the order sent. Messages to oneself work.

    Args:
        fabric: This process's fabric.
        context: The group's context id, equal on all members.
        rank: The caller's group rank.
        cards: How to reach the members, by group rank.
        inside: All members are fabrics of this process.
        describe: See `Describe`.
        beside: Members that share memory with this one.
        spins: How often to look for a message in shared memory before yielding the core.
        lone_spins: The same if ``spins`` is 0 and no other process needs the core.
        on_revoked: Called when a member has revoked the group; it must not block.
        names: Names the members in texts.
        uid: The group's, by which members find that they have made different groups.

    Attributes:
        ways: The short paths of its messages.
        ballot: Agreements of its members on the survivors.
        waited_ns: How long threads that waited for messages had nothing to move.
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
        lone_spins: int = 0,
        on_revoked: OnRevoked = lambda error: None,
        names: RankNames = RANKS,
        uid: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = len(cards)
        self.waited_ns = 0
        self._fabric = fabric
        self._poller = fabric.poller
        self._dispatch = fabric.dispatch
        self._lock = fabric.lock
        self._mailbox = Mailbox(context, rank, cards, inside, describe, beside, on_revoked, names, uid)
        self._inquiry = Inquiry(fabric, self._mailbox)
        self._ballot: Ballot | None = None
        self._spins = spins
        self._lone_spins = lone_spins
        with fabric.lock:
            fabric.groups.open(self._mailbox)
        fabric.poller.tell_finished()

    @property
    def ways(self) -> ShortWays:
        """The direct paths of messages, made for a plan of them."""
        return ShortWays(self._fabric, self._mailbox, self._spins, self._lone_spins)

    @property
    def ballot(self) -> Ballot:
        """Made at first use: many groups never need it."""
        if self._ballot is None:
            self._ballot = Ballot(self._fabric, self._mailbox)
        return self._ballot

    def ask(self, witness: Callable[[int], str]) -> None:
        """Set the source of a member's last operation for errors, if messages do not contain it."""
        self._mailbox.calls.witness = witness

    def begin(self, seq: int, fingerprint: int) -> None:
        """Note this rank's call as operation ``seq``: messages of it that differ fail the group.

        Raises:
            MismatchError, PeerLostError, GroupAbortedError: The group has failed meanwhile.
        """
        mailbox = self._mailbox
        self._poller.glance(seldom=True)  # bytes that are read before the receive is posted are copied twice
        if mailbox.begin(seq, fingerprint):
            with self._lock:
                self._fabric.comparison.compare(mailbox, seq, fingerprint)
        if mailbox.fault is not None:
            raise self._inquiry.explain(mailbox.fault)

    def ended(self, seq: int, met: bool) -> None:
        """Note that collective ``seq`` has ended.

        Args:
            met: No rank ends it before all have called it.
        """
        mailbox = self._mailbox
        if met:
            mailbox.calls.met = seq
        elif seq == 1 and mailbox.origin is not None:
            with self._lock:
                self._fabric.origins.announce(mailbox)
        if mailbox.calls.put_off_ns:
            self._inquiry.put_off_no_more()

    def send(self, peer: int, seq: int, step: int, fingerprint: int, data: memoryview) -> Transfer:
        """Post a message of a collective. ``data`` must stay unchanged until it is done."""
        return self._send(Sending(self._mailbox.context, peer, False, seq, step, fingerprint, data))

    def recv(self, peer: int, seq: int, step: int, fingerprint: int, buffer: memoryview) -> Transfer:
        """Post the buffer that takes a message of a collective of exactly its size."""
        return self._recv(Receiving(self._mailbox.context, peer, False, seq, step, fingerprint, buffer))

    def send_tagged(self, peer: int, tag: int, fingerprint: int, data: memoryview) -> Transfer:
        """Post a point-to-point message; short ones are done once buffered, long ones once received."""
        self._poller.glance()
        return self._send(Sending(self._mailbox.context, peer, True, 0, tag, fingerprint, data))

    def recv_tagged(self, peer: int, tag: int, fingerprint: int, buffer: memoryview) -> Transfer:
        """Post the buffer that takes the next message of this tag from ``peer`` (or `ANY_SOURCE`).

        A message longer than the buffer, or one of another fingerprint, is a `MismatchError` on both sides.
        """
        self._poller.glance()
        return self._recv(Receiving(self._mailbox.context, peer, True, 0, tag, fingerprint, buffer))

    def _send(self, sending: Sending) -> Sending:
        with self._lock:
            self._dispatch.post_send(self._mailbox, sending)
        if sending.peer == self.rank:  # it may have ended a receive that another thread waits for
            self._poller.tell_finished()
            self._poller.wake()
        return sending

    def _recv(self, receiving: Receiving) -> Receiving:
        with self._lock:
            self._dispatch.post_recv(self._mailbox, receiving)
        if receiving.source == self.rank:  # it may have ended a send that another thread waits for
            self._poller.tell_finished()
            self._poller.wake()
        return receiving

    def background(self, transfer: Transfer, deadline_ns: int) -> None:
        """Make progress on a posted message in the background: no thread waits for it.

        At the deadline it fails with `OperationTimeoutError`.
        """
        transfer.deadline_ns = deadline_ns
        self._poller.background()

    def help(self, transfer: Transfer, deadline_ns: int) -> None:
        """Make progress until a message in the background is done, or the deadline passes."""
        if not transfer.done:
            self._poll_until(lambda: transfer.done, extended(deadline_ns))
            if not transfer.done:
                self._poller.fail_overdue()
        self._poller.tell_finished()

    def wait(self, transfers: Sequence[Transfer], deadline_ns: int, beside: Sequence[Transfer] = ()) -> None:
        """Return when all are done, making progress meanwhile; raise as soon as one has failed.

        Args:
            transfers: The awaited messages.
            deadline_ns: When to give up.
            beside: Other messages started for the same operation: it is not waited for, but where it fails
                the rest may never come.

        Raises:
            OperationTimeoutError: The deadline passed; `missing` has the ranks of unfinished messages.
                Those are cancelled: their buffers are free when this returns.
            PeerLostError, MismatchError, GroupAbortedError: The cause of a message's failure, as raised
                by the first that did; the others are cancelled.
        """
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
        self._poller.tell_finished()
        if not complete:
            self._give_up(transfers)
        for failed in (*transfers, *beside):
            if failed.error is not None:
                self.cancel(transfers)
                raise self._inquiry.explain(failed.error, of_collective=not failed.tagged)

    def _run_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        """Make progress until ``done()``, telling the other members when that takes long."""
        pause_ns = _PROBE_NS
        while True:
            pause = min(extended(deadline_ns), monotonic_ns() + pause_ns)
            if self._poll_until(done, pause):
                return True
            if self._inquiry.is_overdue:
                self._inquiry.put_off_no_more()
            if self._interrupted() or monotonic_ns() >= extended(deadline_ns):
                return False
            with self._lock:
                self._fabric.probes.probe(self._mailbox)
            pause_ns = min(2 * pause_ns, _PROBES_NS)

    def _poll_until(self, done: Callable[[], bool], deadline_ns: int) -> bool:
        """Make progress until ``done()``; count the time in which there was none to make."""
        poller = self._poller
        since_ns, idle_ns = monotonic_ns(), poller.idle_ns
        try:
            return poller.run_until(done, deadline_ns, self._interrupted)
        finally:
            note_wait(since_ns, deadline_ns)
            if poller.idle_ns != idle_ns:  # a sleep may have begun before: another thread's
                self.waited_ns += min(poller.idle_ns - idle_ns, monotonic_ns() - since_ns)

    # Operations of other backends, watched over the links

    def watch(self, done: Callable[[], bool], until_ns: int, spins: bool = True) -> bool:
        """Make progress until something that is no message is done; False if it is not by a time.

        Args:
            done: Tells whether it is done.
            until_ns: The time.
            spins: Whether to look for messages before sleeping.

        Raises:
            PeerLostError, MismatchError, GroupAbortedError: The cause of the group's failure.
        """
        if self._poller.run_until(done, until_ns, self._interrupted, spins):
            return True
        if self._inquiry.is_overdue:
            self._inquiry.put_off_no_more()
        if self._interrupted():
            self._give_up([])
        return False

    def probe(self) -> None:
        """Send this rank's call to the other members after it has been blocked for a while."""
        with self._lock:
            self._fabric.probes.probe(self._mailbox)

    def deserted(self, peer: int | None = None) -> PeerLostError | None:
        """Return the error of an operation that members cannot call any more, as they have left.

        Args:
            peer: The receiver of a message; None for a collective.
        """
        mailbox = self._mailbox
        if not mailbox.left:
            return None
        with self._lock:
            gone = behind(mailbox) if peer is None else [peer]
            return gone_error(mailbox, gone) if mailbox.left.issuperset(gone) and gone else None

    def gone(self) -> PeerLostError | None:
        """Return the error that names the first of the members that have left; None if none is known to."""
        with self._lock:
            left = sorted(self._mailbox.left)
            return gone_error(self._mailbox, left) if left else None

    def overdue(self, peers: Collection[int] | None = None) -> OperationTimeoutError:
        """Return the error of a wait whose time is up.

        Args:
            peers: Senders of the missing messages; None for a collective: then the members that did not call
                it are missing, or else those that are not known to have ended it.
        """
        calls, shortage = self._mailbox.calls, self._fabric.linkage.shortage()
        if peers is not None:
            return overdue(self._mailbox, peers, False, shortage)
        beyond = {rank for rank, seq in enumerate(calls.latest_seen()) if seq > calls.latest}
        held_up = set(range(self.world_size)) - beyond - {self.rank}
        return overdue(self._mailbox, held_up, True, shortage)

    def wake(self) -> None:
        """Have a thread that waits look again."""
        self._poller.wake()

    def _interrupted(self) -> bool:
        mailbox = self._mailbox
        return mailbox.aborted is not None or mailbox.fault is not None or self._inquiry.is_overdue

    def _give_up(self, transfers: Sequence[Transfer]) -> None:
        """Cancel unfinished messages, and raise the cause: the group failed, or the deadline passed."""
        mailbox = self._mailbox
        waited_for = {each.source for each in transfers if not each.done and each.source != ANY_SOURCE}
        tagged = all(each.tagged for each in transfers)
        error = mailbox.aborted or mailbox.fault
        if error is None:
            error = overdue(mailbox, waited_for, not tagged, self._fabric.linkage.shortage())
        mailbox.note_reason(error)
        self.cancel(transfers)
        if mailbox.aborted is not None:
            raise mailbox.aborted
        if mailbox.fault is not None:
            raise self._inquiry.explain(mailbox.fault)
        raise error

    def cancel(self, transfers: Sequence[Transfer]) -> None:
        """Give up on messages: when this returns no thread touches their buffers. Idempotent."""
        with self._lock:
            for transfer in transfers:
                if not transfer.done:
                    self._dispatch.cancel(self._mailbox, transfer, GroupAbortedError("cancelled"))
        self._poller.tell_finished()

    def disagree(self, seq: int) -> None:
        """Fail the group on all members: those of this host called different operations as this number."""
        with self._lock:
            self._fabric.comparison.report(self._mailbox, seq)
        self._poller.tell_finished()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""
        return self._fabric.fileno()

    def attend(self) -> None:
        """Make progress without waiting.

        Raises:
            PeerLostError, MismatchError, GroupAbortedError: The cause of the group's failure.
        """
        self._poller.attend()
        if self._interrupted():
            self._give_up([])

    def seek(self, ranks: Iterable[int]) -> None:
        """Ask members that are not there, after a while, which groups they have made."""
        with self._lock:
            self._fabric.origins.seek(self._mailbox, ranks)

    def hear_out(self, ranks: Collection[int], left: Collection[int]) -> None:
        """Take in why members are gone: see `Inquiry.hear_out`.

        Raises:
            PeerLostError, MismatchError, GroupAbortedError: The cause of the group's failure.
        """
        self._inquiry.hear_out(ranks, left)
        if self._interrupted():
            self._give_up([])

    def last_seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the operation that each of some members was last seen at, in words."""
        self._poller.attend()
        with self._lock:
            return last_seen(self._mailbox.calls, ranks)

    def behind(self, seq: int) -> list[int]:
        """Return the other members that are not known to have called a collective."""
        with self._lock:
            seen = self._mailbox.calls.latest_seen()
        return [rank for rank, latest in enumerate(seen) if latest < seq and rank != self.rank]

    def first_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of some departed members that did not follow others: see `Mailbox.first_of`."""
        return self._mailbox.first_of(ranks)

    def first_lost(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the members that some departed ones lost first: see `Mailbox.first_lost`."""
        return self._mailbox.first_lost(ranks)

    def why(self, ranks: Iterable[int]) -> str:
        """Return the reported causes of members for a broken group, as a suffix of a message."""
        return self._mailbox.why(ranks)

    def broken_by(self, error: BaseException, lost: Sequence[int] = ()) -> None:
        """Keep the error that broke the group on this rank, for members that wait for it.

        Args:
            error: The error.
            lost: The members that it names.
        """
        mailbox = self._mailbox
        mailbox.lost = lost[0] + 1 if lost else 0
        mailbox.reason = b""  # the earlier reason does not name the operation
        mailbox.note_reason(error)
        GivenUp.note(mailbox, error)
        if isinstance(error, MismatchError):
            with self._lock:
                self._fabric.comparison.found(mailbox, error)
            self._poller.tell_finished()

    def look(self) -> None:
        """Process arrived reports of members without waiting, also if the group is broken."""
        self._poller.attend()

    def revoke(self, by: int) -> None:
        """Make every pending and later message of the group fail with `GroupRevokedError`, on all members.

        Args:
            by: Group rank that revoked it.
        """
        with self._lock:
            self._fabric.assembly.revoke(self._mailbox, by)
        self._poller.tell_finished()
        self._poller.wake()

    def lost(self) -> dict[int, str]:
        """Return the group ranks that are known to have died, and how each ended, in words."""
        mailbox = self._mailbox
        self._poller.attend()
        with self._lock:
            return {
                rank: self._fabric.end_of(each)
                for rank, each in enumerate(mailbox.fabric_ids)
                if self._fabric.has_died(each)
            }

    def departed(self) -> dict[int, str]:
        """Return the group ranks that are known to have left or aborted the group, in words."""
        mailbox = self._mailbox
        with self._lock:
            self._fabric.probes.reach(mailbox)  # a member without a link may not have been able to say so
        self._poller.attend()
        with self._lock:
            return {
                rank: f"aborted the group{mailbox.why([rank])}"
                if rank in mailbox.aborters
                else left_words(mailbox.why([rank]))
                for rank in mailbox.left
            }

    def abort(self, error: Dist2Error) -> None:
        """Make blocked waits raise ``error``. Safe in signal handlers."""
        self._mailbox.aborted = error
        self._poller.wake()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group's context; pending messages fail with ``error`` (default: group closed)."""
        fault = error if isinstance(error, Dist2Error) else GroupAbortedError("the group was closed")
        with self._lock:
            self._fabric.groups.close(self._mailbox, fault)
        self._poller.tell_finished()
        self._poller.wake()
