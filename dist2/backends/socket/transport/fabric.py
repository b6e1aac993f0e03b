"""`Fabric`: the links of one process, and the parts that carry messages over them, put together.

One listening socket, at most a fixed few links to each other process, all groups share them.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from dist2.backends.socket.transport.alarm import Alarm
from dist2.backends.socket.transport.links.background import Background
from dist2.backends.socket.transport.links.connector import Connector
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.links.reception import Reception
from dist2.backends.socket.transport.links.rings import RingMaker
from dist2.backends.socket.transport.messages.absent_groups import AbsentGroups
from dist2.backends.socket.transport.messages.assembly import Assembly
from dist2.backends.socket.transport.messages.comparison import Comparison
from dist2.backends.socket.transport.messages.courier import Courier
from dist2.backends.socket.transport.messages.delivery import Delivery
from dist2.backends.socket.transport.messages.departures import Departures
from dist2.backends.socket.transport.messages.dispatch import Dispatch
from dist2.backends.socket.transport.messages.given_up import GivenUp
from dist2.backends.socket.transport.messages.groups import Groups
from dist2.backends.socket.transport.messages.intake import Intake, handlers
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.origins import Origins
from dist2.backends.socket.transport.messages.outcomes import Outcomes
from dist2.backends.socket.transport.messages.probes import Probes
from dist2.backends.socket.transport.poller import Poller
from dist2.backends.socket.transport.rounds import Rounds
from dist2.backends.socket.wire import Header, Kind
from dist2.errors import GroupAbortedError
from dist2.runtime.lock import Lock
from dist2.runtime.resources import system_call
from dist2.security.authenticator import Credentials

_FLUSH_S = 2.0


class Fabric:
    """The links of one process: assembles the parts that carry their messages, and closes them.

    Args:
        host: Address to bind and to be reached at.
        job_id: Connections of other jobs are refused.
        spins: How often a waiter polls before it blocks.
        attend_s: Interval at which links are read while no thread waits, in seconds; 0 for never.
        heartbeat_s: How long a host may be silent before its processes count as dead, in seconds.
        credentials: The proof required of connections; by default, to be of this job.
        rings: Makes rings for links inside the host, where memory is shared.
        congestion: See `Linkage`.

    Attributes:
        lock: Guards everything about links and messages.
        card: How others reach it.
        linkage: The existing links.
        groups: Opens and closes groups.
        courier: Finds the links to members.
        dispatch: Posts and sends messages.
        delivery: Gives messages to their receives.
        outcomes: Ends messages.
        comparison: Compares calls.
        probes: Asks blocked members.
        assembly: Revokes groups, and lets their members agree.
        departures: Handles members that are gone.
        poller: Makes progress for all waiters.
    """

    groups: Groups
    courier: Courier
    dispatch: Dispatch
    delivery: Delivery
    outcomes: Outcomes
    comparison: Comparison
    probes: Probes
    assembly: Assembly
    departures: Departures
    poller: Poller

    def __init__(
        self,
        host: str = "127.0.0.1",
        job_id: str = "",
        spins: int = 0,
        attend_s: float = 0.0,
        heartbeat_s: float = 10.0,
        credentials: Credentials | None = None,
        rings: RingMaker | None = None,
        congestion: str = "reno",
    ) -> None:
        credentials = credentials or Credentials(job_id=job_id)
        self.lock = Lock()
        self._background = Background(
            self.lock,
            lambda: self.poller.is_watched(),
            lambda: self.poller.make_progress(),
            self._look_after_links,
            attend_s,
        )
        self._mailboxes: dict[int, Mailbox] = {}
        with system_call("epoll_create1"):
            self._epoll = epoll = select.epoll()
        self._presence = Presence(epoll)
        self.linkage = Linkage(epoll, self._presence, self._background.attend, heartbeat_s)
        self.linkage.rings.maker, self.linkage.congestion = rings, congestion
        self._alarm = Alarm(epoll)
        try:
            self._reception = Reception(
                host, credentials, self.linkage, self._presence, epoll, self._alarm.ring, heartbeat_s
            )
        except BaseException:
            self._alarm.close()
            epoll.close()
            raise
        self.card = self._reception.card
        me = self.card.fabric_id
        self._connector = Connector(me, credentials, self.linkage, epoll, heartbeat_s)
        self._put_together(spins)

    def _put_together(self, spins: int) -> None:
        """Make the parts that carry messages, in the order of their dependencies."""
        linkage, presence, mailboxes = self.linkage, self._presence, self._mailboxes
        connector, absent, attend = self._connector, AbsentGroups(), self._background.attend
        courier = self.courier = Courier(linkage, connector, presence)
        outcomes = self.outcomes = Outcomes(linkage, mailboxes)
        assembly = self.assembly = Assembly(courier, outcomes, presence.dead)
        departures = Departures(linkage, presence, outcomes, assembly, mailboxes, self.card.fabric_id)
        comparison = self.comparison = Comparison(linkage, courier, outcomes, attend)
        origins = self.origins = Origins(linkage, courier, outcomes, departures, mailboxes, absent)
        probes = self.probes = Probes(linkage, courier, presence, comparison, departures, origins)
        delivery = self.delivery = Delivery(courier, outcomes, comparison)
        dispatch = Dispatch(linkage, presence, courier, outcomes, comparison, delivery)
        given_up = GivenUp(courier, outcomes)
        others = handlers(assembly, comparison, delivery, departures, dispatch, probes, origins, given_up)
        intake = Intake(
            linkage, presence, outcomes, departures, delivery, mailboxes, absent, others, origins, given_up
        )
        groups = Groups(linkage, presence, courier, outcomes, departures, intake, mailboxes, absent, attend)
        self.departures, self.dispatch, self.groups = departures, dispatch, groups
        linkage.report_to(intake)
        lock, alarm, reception = self.lock, self._alarm, self._reception
        rounds = Rounds(lock, self._epoll, alarm, linkage, presence, reception, courier, departures)
        self.poller = Poller(
            lock, alarm, rounds, linkage.rings, dispatch, outcomes, mailboxes, spins, self._background
        )

    def _look_after_links(self) -> None:
        self.poller.attend()
        with self.lock:
            self.linkage.drop_silent()
            self.linkage.settle()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `Poller.attend` has something to do."""
        return self._epoll.fileno()

    # Other processes

    def watch(self, fd: int, fabric_id: str, departed: Callable[[], bool]) -> None:
        """Hold a process for dead once ``fd`` (a pidfd) is readable, unless it ``departed()`` before.

        Args:
            fd: As above; -1 for a rank of this process.
            fabric_id: Its fabric.
            departed: Whether it has closed everything in good order.
        """
        if not self._presence.knows(fd, fabric_id):  # all but the first groups with it
            with self.lock:
                self._presence.watch(fd, fabric_id, departed)

    def has_died(self, fabric_id: str) -> bool:
        """Whether a process is known to have ended, and not in good order."""
        return self._presence.has_died(fabric_id)

    def end_of(self, fabric_id: str) -> str:
        """Return how a process that died ended, in words that follow the name of its rank."""
        return self._presence.dead.get(fabric_id) or self._presence.ends.get(fabric_id, "died")

    def mark_lost(self, fabric_id: str) -> None:
        """Hold a process for dead: its groups' pending and later messages fail."""
        with self.lock:
            self.departures.process_died(fabric_id)
            self.linkage.flush_all()
        self.poller.tell_finished()
        self.poller.wake()

    # The end

    def close(self) -> None:
        """Send the queued frames (for two seconds at most), then close everything. Idempotent."""
        with self.lock:
            if self.poller.closed:
                return
            self.poller.closed = True
            self._reception.stop()
            self.groups.end(GroupAbortedError("the links of this process were closed"))
        self._background.stop()
        deadline = time.monotonic() + _FLUSH_S
        with self.poller.role:
            self._say_goodbye(deadline)
            with self.lock:
                for link in self.linkage.links.values():
                    link.discard_incoming()
                self._close_descriptors()
        self.poller.tell_finished()

    def _say_goodbye(self, deadline: float) -> None:
        """Notify all peers that this process leaves, and send queued frames, until a monotonic second."""
        linkage = self.linkage
        with self.lock:
            self._reception.let_in_the_last()
            self._connector.drop_calls_for_nothing()
            for link in linkage.links.values():
                link.put(Header(Kind.BYE).encode())
        while time.monotonic() < deadline:
            with self.lock:
                busy = [link for link in linkage.links.values() if not link.is_idle()]
                if not busy:
                    break
                for link in busy:
                    link.discard_incoming()  # two that close at once must not wait for each other
                    linkage.flush(link)
            self._epoll.poll(0.01)

    def _close_descriptors(self) -> None:
        self.linkage.close()
        self._reception.close()
        self._epoll.close()
        self._alarm.close()

    def forget_in_child(self) -> None:
        """After a fork: close the inherited descriptors without a message to peers."""
        if not self.poller.closed:
            self.poller.closed = True
            self._close_descriptors()
