"""`Inquiry`: waits a moment for the other members' reasons of a failure."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic_ns

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.departures import behind, departed_error, gone_error
from dist2.backends.socket.transport.messages.explaining import HEAR_S, differing, explained
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.errors import MismatchError, PeerLostError
from dist2.runtime.deadline import deadline_in

_ALL_DESCRIBE_S = 0.1
"""How long a mismatch waits for the calls of all members; it waits longer for those that the explanation
needs."""


class Inquiry:
    """Turns the error of a failed group into the error of its waiter.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox) -> None:
        self._fabric = fabric
        self._mailbox = mailbox

    @property
    def is_overdue(self) -> bool:
        """Whether the group should have failed by now, but for a collective that does not end."""
        return 0 < self._mailbox.calls.put_off_ns < monotonic_ns()

    def put_off_no_more(self) -> None:
        """Fail the group over messages between others: see `Comparison.put_off_no_more`."""
        with self._fabric.lock:
            self._fabric.comparison.put_off_no_more(self._mailbox)

    def explain(self, error: BaseException, of_collective: bool = False) -> BaseException:
        """Return the error for the waiter: a mismatch is completed with the calls of the others.

        Args:
            error: The error of the group, or of a message.
            of_collective: The message belongs to a collective. If its peer called the collective, and left
                because of another member, that member is named.
        """
        if self._mailbox.apart is not None:
            return self._mailbox.apart
        if self._mailbox.calls.put_off_ns:  # possibly the reason of a departure
            self.put_off_no_more()
            error = self._mailbox.fault or error
        if isinstance(error, PeerLostError):
            self.hear_out(error.ranks, of_collective=of_collective)
            error = self._mailbox.fault or self._as_told(error, of_collective)
        if isinstance(error, MismatchError):
            self._fabric.poller.run_until(self._all_described, deadline_in(_ALL_DESCRIBE_S), lambda: False)
            self._fabric.poller.run_until(self._is_explained, deadline_in(HEAR_S), lambda: False)
            return explained(self._mailbox.calls)
        return error

    def _as_told(self, error: PeerLostError, of_collective: bool) -> PeerLostError:
        """Return the error of a message, by what is known now of its peer's departure and of others."""
        mailbox = self._mailbox
        if not error.ranks or not mailbox.left.issuperset(error.ranks):
            return error
        if not of_collective:
            return departed_error(mailbox, error.ranks)
        return gone_error(mailbox, self._behind() or error.ranks)

    def _behind(self) -> list[int]:
        with self._fabric.lock:
            return behind(self._mailbox)

    def hear_out(
        self, ranks: Collection[int], left: Collection[int] = (), of_collective: bool = True
    ) -> None:
        """Wait a moment for members to report the reasons of their departure.

        Args:
            ranks: Members with a report in flight.
            left: Members that have left; their report has come, if there is a link for it.
            of_collective: A collective failed: one that left without calling it is reason enough.
        """
        poller, mailbox = self._fabric.poller, self._mailbox
        poller.attend()

        def heard() -> bool:
            if mailbox.fault is not None:
                return True
            silent = any(rank not in mailbox.left and rank not in mailbox.reasons for rank in ranks)
            if silent or not any(map(mailbox.follows, (*ranks, *left))):
                return not silent
            return of_collective and bool(self._behind())

        poller.run_until(heard, deadline_in(HEAR_S), lambda: mailbox.aborted is not None)

    def _all_described(self) -> bool:
        return len(self._mailbox.calls.described) == len(self._mailbox.cards) - 1

    def _is_explained(self) -> bool:
        mailbox = self._mailbox
        if not mailbox.calls.offenders <= mailbox.calls.described.keys():
            return False
        return bool(differing(mailbox.calls)) or self._all_described()
