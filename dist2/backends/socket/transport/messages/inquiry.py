"""`Inquiry`: what the other members say about why a group failed, waited for a moment."""

from __future__ import annotations

from time import monotonic_ns

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.explaining import differing, explained
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.clock import deadline_in
from dist2.errors import MismatchError, PeerLostError

_ALL_DESCRIBE_S = 0.1
"""How long a mismatch waits for all members to say what they called,"""
_EXPLAIN_S = 0.3
"""and for those without which it could not be explained."""
_HEAR_S = 0.05
"""How long one who is left looks for the reason."""
_DIFFERED = MismatchError.__name__


class Inquiry:
    """Turns what a group failed with into what its waiter gets.

    Args:
        fabric: Of this process.
        mailbox: Of the group.
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

    def explain(self, error: BaseException) -> BaseException:
        """Return an error as its waiter gets it: a mismatch with what the others called."""
        if self._mailbox.calls.put_off_ns:  # why somebody left, perhaps
            self.put_off_no_more()
            error = self._mailbox.fault or error
        if isinstance(error, PeerLostError):
            self._hear_out(error)
            error = self._mailbox.fault or error
        if isinstance(error, MismatchError):
            self._fabric.poller.run_until(self._all_described, deadline_in(_ALL_DESCRIBE_S), lambda: False)
            self._fabric.poller.run_until(self._is_explained, deadline_in(_EXPLAIN_S), lambda: False)
            return explained(self._mailbox.calls)
        return error

    def _hear_out(self, error: PeerLostError) -> None:
        """Take in why a member left: it may have told others, whose word comes another way, and later."""
        mailbox = self._mailbox
        differed = any(mailbox.reasons.get(rank, "").startswith(_DIFFERED) for rank in error.ranks)
        patience_s = _EXPLAIN_S if differed else _HEAR_S
        self._fabric.poller.run_until(
            lambda: mailbox.fault is not None, deadline_in(patience_s), lambda: False
        )

    def _all_described(self) -> bool:
        return len(self._mailbox.calls.described) == len(self._mailbox.cards) - 1

    def _is_explained(self) -> bool:
        mailbox = self._mailbox
        if not mailbox.calls.offenders <= mailbox.calls.described.keys():
            return False
        return bool(differing(mailbox.calls)) or self._all_described()
