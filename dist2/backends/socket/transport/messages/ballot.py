"""`Ballot`: one rank's part in the agreements of its group: it votes, and waits for the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns

from dist2.backends.consensus import Agreement, Consensus
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.explaining import absence, last_seen
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.errors import (
    Dist2Error,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ResourceError,
)
from dist2.runtime.deadline import deadline_in
from dist2.runtime.rank_names import RankNames

_TELL_S = 0.5
_SLICE_NS = 100_000_000
_SETTLE_NS = 1_000_000_000
"""How long a dispute lasts before it is settled: this rank may soon learn that one of the two has died."""


class Ballot:
    """Takes part in agreements, one after the other.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox) -> None:
        self._fabric = fabric
        self._mailbox = mailbox

    def hold(
        self,
        flags: int,
        deadline_ns: int,
        shrinks: bool = False,
        departed: Callable[[], Iterable[int]] = tuple,
    ) -> tuple[int, Agreement]:
        """Return the number of the group's next agreement, and its outcome.

        Args:
            flags: This rank's.
            deadline_ns: When to give up.
            shrinks: Whether this rank called `shrink`, and not `agree`.
            departed: Returns members that have visibly left, possibly without a message.

        Raises:
            OperationTimeoutError: `missing` did not come; the agreement stays open, and the next call
                continues it.
            ResourceError: This process lacked descriptors for its links; the same holds.
            MismatchError: Some survivors called `shrink` and others `agree`: the agreement has ended for all.
                Or members wait for each other in groups that only one of them has made.
            PeerLostError: The others consider this rank lost.
            GroupAbortedError: `abort` was called.
        """
        fabric, mailbox = self._fabric, self._mailbox
        with fabric.lock:
            number = mailbox.agreements.number
            consensus = fabric.assembly.propose(mailbox, flags, shrinks)
        undisputed_ns = monotonic_ns()
        while monotonic_ns() < deadline_ns and mailbox.aborted is None and mailbox.apart is None:
            seen = list(departed())  # before the slice, in which their last messages arrive
            slice_ns = min(deadline_ns, monotonic_ns() + _SLICE_NS)
            if fabric.poller.run_until(
                lambda: consensus.decision is not None or consensus.expelled,
                slice_ns,
                lambda: mailbox.aborted is not None or mailbox.apart is not None,
            ):
                break
            with fabric.lock:
                fabric.departures.leave_out(mailbox, consensus, seen)
                fabric.origins.seek(mailbox, consensus.awaited)
                if not consensus.is_disputed:
                    undisputed_ns = monotonic_ns()
                elif monotonic_ns() - undisputed_ns > _SETTLE_NS:
                    fabric.assembly.settle(mailbox)
            fabric.poller.tell_finished()
        decision = consensus.decision
        if decision is None:
            raise self._undecided(consensus)
        # A rank passes a decision on before it uses it: others may depend on that.
        fabric.poller.run_until(lambda: fabric.courier.has_told(mailbox), deadline_in(_TELL_S), lambda: False)
        with fabric.lock:
            mailbox.agreements.finish()
        survivors = set(range(len(mailbox.fabric_ids))) - decision.failed
        if decision.shrinking & survivors not in (set(), survivors):
            raise _called_differently(survivors, decision.shrinking, mailbox.names)
        return number, Agreement(decision.flags, tuple(sorted(decision.failed)))

    def _undecided(self, consensus: Consensus) -> Dist2Error:
        """Return why an agreement has no answer here."""
        ended = self._mailbox.aborted or self._mailbox.apart
        if ended is not None:
            return ended
        names = self._mailbox.names
        if consensus.expelled:
            return PeerLostError(
                f"the other members consider this rank lost, {names([self._mailbox.rank])}, "
                f"and go on without it",
                ranks=[self._mailbox.rank],
            )
        shortage = self._fabric.linkage.shortage()
        if self._fabric.courier.put_off:
            return ResourceError(f"no vote of this rank reached the others: {shortage}")
        missing = consensus.awaited
        if not missing:
            return OperationTimeoutError("all ranks have voted, but some do not know of a death yet")
        return absence(missing, last_seen(self._mailbox.calls, missing), names, shortage)


def _called_differently(survivors: set[int], shrinking: frozenset[int], names: RankNames) -> MismatchError:
    actual = {rank: "shrink()" if rank in shrinking else "agree()" for rank in sorted(survivors)}
    agreeing, others = names(survivors - shrinking, False), names(survivors & shrinking, False)
    return MismatchError(f"operation differs: {agreeing} agree(), {others} shrink()", actual=actual)
