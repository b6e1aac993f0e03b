"""`Groups`: the open groups of this process. Under the fabric's lock; never blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.messages.absent_groups import AbsentGroups
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.departures import Departures, lost_error
from dist2.backends.socket.transport.messages.intake import Intake
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.wire import ABORTED, Header, Kind
from dist2.errors import Dist2Error, InvalidUsageError, WireError

log = logging.getLogger("dist2.fabric")


class Groups:
    """Opens and closes groups.

    Args:
        linkage: The links to their members.
        presence: Knows which processes are dead.
        courier: Reports to members that a group was closed.
        outcomes: Fails the pending messages of one.
        departures: Forgets groups that are closed.
        intake: Processes frames that arrived before their group was opened.
        mailboxes: The mailboxes of the open groups, by context.
        absent: Keeps frames of groups that are not open.
        attend: Sees to it that links are accepted while no thread waits.
    """

    def __init__(
        self,
        linkage: Linkage,
        presence: Presence,
        courier: Courier,
        outcomes: Outcomes,
        departures: Departures,
        intake: Intake,
        mailboxes: dict[int, Mailbox],
        absent: AbsentGroups,
        attend: Callable[[], None],
    ) -> None:
        self._linkage = linkage
        self._presence = presence
        self._courier = courier
        self._outcomes = outcomes
        self._departures = departures
        self._intake = intake
        self._mailboxes = mailboxes
        self._absent = absent
        self._attend = attend
        self._ended: Dist2Error | None = None

    def open(self, mailbox: Mailbox) -> None:
        """Open a group, and deliver the frames that arrived before.

        Raises:
            InvalidUsageError: Another rank of the group has these links.
        """
        if mailbox.context in self._mailboxes:
            both = mailbox.names([self._mailboxes[mailbox.context].rank, mailbox.rank], False)
            raise InvalidUsageError(
                f"{both} of one group cannot use the links of one node: each needs a separate node"
            )
        self._mailboxes[mailbox.context] = mailbox
        dead = self._presence.dead
        if self._ended is not None:
            self._outcomes.fail(mailbox, self._ended)
        if not dead.keys().isdisjoint(mailbox.fabric_ids):
            self._outcomes.fail(mailbox, lost_error(mailbox, dead))
        for link, header, payload in self._absent.take(mailbox.context):
            try:
                self._intake.act_on(link, header, payload)
            except WireError as error:  # a fault of the sender, not of the opening thread
                log.warning("closed the connection to %s: %s", link.peer_id, error)
                link.reject()

    def close(self, mailbox: Mailbox, error: Dist2Error) -> None:
        """Leave a group: pending operations fail; members are notified, now or once they have a link."""
        if self._mailboxes.pop(mailbox.context, None) is None:
            return
        self._absent.close(mailbox.context)
        self._outcomes.fail(mailbox, error)
        self._departures.deserted.pop(mailbox, None)
        frame = _report(mailbox)
        # After an abort the others may wait for this member, which may never come to wait itself. What it has
        # given up, and why it left, a late member learns from its report alone.
        at_once = mailbox.aborted is not None or mailbox.gave_up is not None or bool(mailbox.reason)
        for rank, fabric_id in enumerate(mailbox.fabric_ids):
            if self._linkage.outgoing.get(fabric_id) is not None or at_once:
                self._courier.tell(mailbox, rank, frame)
            elif rank != mailbox.rank and rank not in mailbox.left and fabric_id not in self._presence.dead:
                self._absent.tell_later(fabric_id, frame)
                self._attend()  # it may connect when all threads of this process compute
        mailbox.let_go()

    def end(self, error: Dist2Error) -> None:
        """Fail all groups, and those that are opened later; no peer is notified any more.

        Of those that were aborted while an operation was under way, members with a link are notified now.
        """
        self._ended = error
        self._courier.silent = True
        for mailbox in self._mailboxes.values():
            self._outcomes.fail(mailbox, error)
            if mailbox.aborted is not None:
                frame = _report(mailbox)
                for link in filter(None, map(self._linkage.outgoing.get, mailbox.fabric_ids)):
                    self._linkage.send(link, frame)


def _report(mailbox: Mailbox) -> bytes:
    """Return the frame that tells members that a group was closed here, and why."""
    flags = 0 if mailbox.aborted is None else ABORTED
    why = mailbox.reason
    seq = mailbox.calls.latest
    return Header(Kind.LEAVE, flags, mailbox.context, seq, mailbox.lost, nbytes=len(why)).encode() + why
