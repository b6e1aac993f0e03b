"""`ExpressSend` and `ExpressReceive`: direct sends of short messages inside a host.

All messages between two processes go through the same ring. A direct send has the effect of the queued path
(`Intake`, `Mailbox`) for a message that can be sent at once, but keeps no record of it. A send with credit
and room writes its frame. A receive whose message could match no other receive looks for exactly that frame,
and copies the payload out of the ring. In every other case they refuse without side effects, and the queued
path takes the call. So order, credit, mismatches and failures are decided in one place.

The frame of a short message is the same for every call of a signature: it is made once, and compared as
bytes.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

import attrs

from dist2.backends.socket.transport.base import ANY_SOURCE, Transfer
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.ring import RingReader
from dist2.backends.socket.transport.messages.credit import (
    CREDIT_BYTES,
    FRAME_COST,
    PROMPT_CREDIT_BYTES,
    REPORTED_BYTES,
)
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.transport.spinning import AWAKE_NS
from dist2.backends.socket.wire import LEND_BYTES, LOAN_BYTES, TAGGED, WHOLE_BYTES, Header, Kind
from dist2.compiled import messages
from dist2.errors import WireError

if TYPE_CHECKING:
    from dist2.compiled._messages import Express


@attrs.frozen
class Lot:
    """Messages that are alike but for their payload.

    Attributes:
        peer: Group rank of the other side.
        tag: Their tag.
        fingerprint: The operation's fingerprint.
        nbytes: Length of the payload.
        tagged: Point-to-point, or part of a collective: the tag is the step of its schedule then.
        whole: Never lent, however long: its sender does not wait.
    """

    peer: int
    tag: int
    fingerprint: int
    nbytes: int
    tagged: bool = True
    whole: bool = False

    @property
    def is_long(self) -> bool:
        """Whether they are lent."""
        return self.nbytes > LEND_BYTES and not self.whole

    def header(self, context: int) -> bytes:
        """Return the header of the frames that they, or their announcements, are in."""
        kind, payload = (Kind.OFFER, LOAN_BYTES) if self.is_long else (Kind.EAGER, self.nbytes)
        return Header(
            kind, TAGGED, context, 0, self.tag, self.fingerprint, payload, total=self.nbytes
        ).encode()

    @property
    def cost(self) -> int:
        """The credit that one message takes."""
        return FRAME_COST if self.is_long else FRAME_COST + self.nbytes

    @property
    def credit(self) -> int:
        """How much of it they may take in all: the last part is for short ones alone."""
        return PROMPT_CREDIT_BYTES if self.whole else CREDIT_BYTES

    @property
    def whole_lot(self) -> Lot | None:
        """The same where their sender does not wait; None if that makes no difference."""
        return attrs.evolve(self, whole=True) if self.is_long and self.nbytes <= WHOLE_BYTES else None


class Watch:
    """Looks into a ring; its caller has the role of the poller.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        spins: How often to look before yielding the core.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, spins: int) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._spins = spins

    def sees(self, rx: RingReader, deadline_ns: int) -> bool:
        """Look for a few microseconds, then yield the core for a while: True once something is here."""
        if rx.look(self._spins):
            return True
        fabric, mailbox = self._fabric, self._mailbox
        crowd, now = fabric.poller.crowd, monotonic_ns()
        end = min(now + AWAKE_NS, deadline_ns)
        while now < end and mailbox.aborted is None and mailbox.fault is None:
            if crowd.is_here(now) or fabric.poller.is_wanted(rx):
                break
            now = crowd.give_way()
            if rx.has_bytes:
                return True
        return False


class ExpressSend:
    """Sends the messages of a lot.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages to send.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._peer = lot.peer
        self._fabric_id = mailbox.fabric_ids[lot.peer]
        self._account = mailbox.accounts[True][lot.peer]
        self._header = lot.header(mailbox.context)
        self._fingerprint = lot.fingerprint
        self._introduced = False
        self._nbytes = lot.nbytes
        self._cost = lot.cost
        self._credit = lot.credit

    def send(self, address: int) -> bool:
        """Send memory by its address; False, with nothing done, if it must be queued or announced."""
        fabric, mailbox, account = self._fabric, self._mailbox, self._account
        fabric.poller.glance()
        with fabric.lock:
            link = fabric.outgoing(self._fabric_id)
            if link is None or mailbox.fault is not None or mailbox.aborters or self._peer in mailbox.left:
                return False
            tx = link.tx
            if not self._introduced:
                self._introduced = True
                if self._fingerprint not in mailbox.calls.told[self._peer]:
                    fabric.comparison.introduce(mailbox, link, self._peer, self._fingerprint, None)
            if tx is None or not link.clear or account.waiting or account.used + self._cost > self._credit:
                return False
            try:
                if not tx.push(self._header, address, self._nbytes):
                    return False
            except ConnectionError:
                return False  # the queue finds it as well, and handles it
            account.used += self._cost
        if tx.reader_sleeps:
            link.wake_peer()
        return True


class ExpressReceive:
    """Receives the messages of a lot.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        lot: The messages to receive.
        spins: How often to look before yielding the core.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, lot: Lot, spins: int) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._peer = lot.peer
        self._fabric_id = mailbox.fabric_ids[lot.peer]
        self._header = lot.header(mailbox.context)
        self._nbytes = lot.nbytes
        self._cost = lot.cost
        self._keys = ((True, lot.peer, 0, lot.tag), (True, ANY_SOURCE, 0, lot.tag))
        self._watch = Watch(fabric, mailbox, spins)

    def take(self, address: int) -> bool:
        """Receive to an address if the message is here; False, with nothing done, if not."""
        link = self._fabric.ringed_from(self._fabric_id)
        if link is None or link.rx is None or not link.rx.has_bytes:
            return False  # read without a lock: bytes that arrive now could equally arrive later
        return self._pull(address, self._nbytes, 0) is not None

    def wait(self, address: int, deadline_ns: int) -> bool:
        """Receive to an address; False, with nothing done, if no message arrives soon."""
        return self._pull(address, self._nbytes, deadline_ns) is not None

    def wait_posted(self, receiving: Transfer, address: int, deadline_ns: int) -> bool:
        """Wait for the message of a receive that is posted, and end that; False, with nothing done, if not.

        Then it does not come in a moment, or it would go to another receive.
        """
        if not isinstance(receiving, Receiving):
            return False
        return self._pull(address, self._nbytes, deadline_ns, receiving) is not None

    def _pull(
        self, address: int, nbytes: int, deadline_ns: int, posted: Receiving | None = None
    ) -> Link | None:
        """Take the expected frame out of the ring, its payload to an address; return the link it came over.

        It does so with the role of the poller: a thread that has it may be about to take in the frame.
        """
        link = self._fabric.poller.play(self._take_out, None, address, nbytes, deadline_ns, posted)
        if link is not None and link.rx is not None and link.rx.writer_sleeps:
            link.wake_peer()
        return link

    def _take_out(self, address: int, nbytes: int, deadline_ns: int, posted: Receiving | None) -> Link | None:
        """Do as `_pull`, with the role."""
        fabric, link = self._fabric, self._link(posted)
        if link is None:
            return None
        rx = link.rx
        assert rx is not None  # it is how the link was found
        if not rx.has_bytes and not (deadline_ns and self._watch.sees(rx, deadline_ns)):
            return None
        try:
            with fabric.lock:
                if self._mailbox.fault is not None or not self._is_next(posted):
                    return None
                if not rx.pull(self._header, address, nbytes):
                    return None
                if posted is not None:
                    self._mailbox.forget(posted)
                    fabric.outcomes.message_received(posted)
                fabric.delivery.account_for(self._mailbox, self._peer, True, self._cost)
        except WireError:
            return None  # the queue finds it as well, and handles it
        return link

    def _is_next(self, posted: Receiving | None) -> bool:
        """Whether the next message of the lot would go to a receive; by default to one that is posted now."""
        if posted is None:
            return self._mailbox.is_free(*self._keys)
        return self._mailbox.is_first(posted, self._keys[1])

    def _link(self, posted: Receiving | None) -> Link | None:
        """Return the link of the message, if it would go to a receive; by default to one posted now."""
        fabric, mailbox = self._fabric, self._mailbox
        with fabric.lock:
            link = fabric.ringed_from(self._fabric_id)
            if link is None or mailbox.fault is not None or not link.reader.between_frames:
                return None
            return link if self._is_next(posted) else None


def compiled_express(fabric: Fabric, mailbox: Mailbox, lot: Lot, spins: int, lone_spins: int) -> Express:
    """Return the short path of a lot in C, out and in."""
    assert messages is not None  # checked by the caller
    whole = lot.whole_lot
    made: Express = messages.Express(
        fabric=fabric,
        mailbox=mailbox,
        rank=lot.peer,
        fingerprint=lot.fingerprint,
        header=lot.header(mailbox.context),
        key=(True, lot.peer, 0, lot.tag),
        key_of_any=(True, ANY_SOURCE, 0, lot.tag),
        nbytes=lot.nbytes,
        cost=lot.cost,
        credit=lot.credit,
        reported=REPORTED_BYTES,
        spins=spins,
        lone_spins=lone_spins,
        taken=Header(Kind.TAKEN, 0, mailbox.context).encode(),
        received=Header(Kind.CREDIT, TAGGED, mailbox.context).encode(),
        whole=None if whole is None else compiled_express(fabric, mailbox, whole, spins, lone_spins),
    )
    return made
