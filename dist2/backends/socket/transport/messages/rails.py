"""`Rails`: the messages of one operation between hosts, sent and received by scripts in C.

While rails are open, no other thread reads or writes their links: the opening thread acts as the poller, and
frames of other threads are queued in the links. Closing hands unfinished messages to the queued path, which
continues in the middle of a frame. So a script handles the regular case only; all others (no data for a
while, an unexpected frame, a failure of the group) are decided in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns

import attrs

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import FRAME_COST, PROMPT_CREDIT_BYTES, REPORTED_BYTES
from dist2.backends.socket.transport.messages.express import Lot
from dist2.backends.socket.transport.messages.express_socket import has_socket
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.transport.messages.transfer import Message, Receiving, Sending
from dist2.backends.socket.wire import SEQ_AT, Header, Kind
from dist2.compiled import steps
from dist2.errors import PeerLostError
from dist2.runtime.signals import ctrl_c

PATIENCE_NS = 5_000_000
"""Idle time after which the long path takes over."""
_AT_ONCE = (False,)


@attrs.frozen
class Freight:
    """A message of a rail.

    Attributes:
        lot: The lot of messages.
        memory: Where it lies.
    """

    lot: Lot
    memory: memoryview


Find = Callable[[int], Freight]
"""Returns the message of a number."""


@attrs.frozen
class Left:
    """The unfinished messages at the close of rails.

    Attributes:
        transfers: Messages that the long path continues, by number.
        unsent: Numbers of those without any sent byte, in order.
    """

    transfers: dict[int, Message] = attrs.field(factory=dict)
    unsent: list[int] = attrs.field(factory=list)


class _Track:
    """The messages to and from one member.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        peer: Group rank of the member.
        fingerprint: The operation's fingerprint.

    Attributes:
        rail: The same in C.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, peer: int, fingerprint: int) -> None:
        self._fabric = fabric
        self._mailbox = mailbox
        self._peer = peer
        self._fingerprint = fingerprint
        self._fabric_id = mailbox.fabric_ids[peer]
        self._account = mailbox.accounts[False][peer]
        credit = Header(Kind.CREDIT, context=mailbox.context).encode()
        self.rail = steps.Rail(credit, PROMPT_CREDIT_BYTES, REPORTED_BYTES, FRAME_COST)
        self._links: tuple[Link, Link] | None = None
        self._leased = False
        self._kept = 0

    def find(self, seq: int, early: int) -> bool:
        """Find links without other transfers; under the fabric's lock.

        Args:
            seq: Number of the operation.
            early: Messages that were received before their steps.
        """
        fabric, mailbox, peer = self._fabric, self._mailbox, self._peer
        out, into = fabric.outgoing(self._fabric_id), fabric.heard_from(self._fabric_id)
        if out is None or into is None or peer in mailbox.left:
            return False
        if self._fingerprint not in mailbox.calls.told[peer]:
            fabric.comparison.introduce(mailbox, out, peer, self._fingerprint, seq)
        if not (has_socket(out) and has_socket(into)) or not out.is_free_socket:
            return False
        if into.rx is not None or not into.reader.between_frames or self._account.waiting:
            return False
        kept = mailbox.whole_messages_of(peer, seq)
        if kept is None:
            return False
        self._links, self._kept = (out, into), early + kept
        return True

    def open(self, seq: int) -> None:
        """Have scripts use the links that were found; under the fabric's lock."""
        assert self._links is not None  # see `find`
        out, into = self._links
        self._leased = True
        self.rail.open(out.fileno(), into.fileno(), seq, self._account.used, self._account.owed, self._kept)
        out.leased = True

    def take(self, seq: int, freight: Freight) -> bool:
        """Receive a message that arrived before the rail was open; under the fabric's lock."""
        lot = freight.lot
        key = (False, self._peer, seq, lot.tag)
        payload = self._mailbox.take_whole(key, lot.fingerprint, lot.nbytes)
        if payload is None:
            return False
        freight.memory[:] = payload
        self.rail.took(FRAME_COST + lot.nbytes)
        return True

    @property
    def is_awaited(self) -> bool:
        """Whether others have something to send over the link."""
        return self._links is not None and self._links[0].has_frames

    def close(self, seq: int, find: Find, coming: int | None, left: Left) -> None:
        """Go on by the long path; under the fabric's lock."""
        assert self._links is not None  # it is open
        out, into = self._links
        used, owed, unsent, credit, staged, came = self.rail.close()
        out.leased = False
        self._account.used, self._account.owed = used, owed
        if credit:
            out.finish_frame(credit)
        for number, done in unsent:
            if done:
                left.transfers[number] = self._go_on_sending(out, seq, find(number), done)
            else:
                left.unsent.append(number)
        # The last receives may be unreported: the script ended, or the socket was full.
        self._fabric.delivery.account_for(self._mailbox, self._peer, False, 0)
        if self.rail.received:
            self._mailbox.calls.note_called(self._peer, seq)
        if staged:
            found = None if coming is None else find(coming)
            if found is not None and found.lot.peer != self._peer:
                found = None  # another member's has the same header
            if coming is not None and found is not None and staged == self._header(seq, found.lot):
                left.transfers[coming] = self._go_on_receiving(into, seq, found, staged, came)
            else:
                self._fabric.take_in(into, memoryview(staged))
        self._fabric.linkage.flush(out)
        self._links, self._leased = None, False

    def abandon(self) -> None:
        """Drop the links if scripts still hold them: partly written frames are unknown."""
        links, self._links = self._links, None
        if links is not None and self._leased:
            self._leased = links[0].leased = False
            self.rail.close()
            for link in links:
                self._fabric.cut(link)

    def _header(self, seq: int, lot: Lot) -> bytes:
        header = header_of(self._mailbox.context, lot)
        return header[:SEQ_AT] + seq.to_bytes(8, "little") + header[SEQ_AT + 8 :]

    def _go_on_sending(self, link: Link, seq: int, freight: Freight, done: int) -> Sending:
        lot, mailbox = freight.lot, self._mailbox
        sending = Sending(mailbox.context, lot.peer, False, seq, lot.tag, lot.fingerprint, freight.memory)
        sending.unasked = True
        if link.fileno() < 0:
            self._fabric.outcomes.finish(sending, self._gone())
        else:
            self._fabric.dispatch.send_rest(mailbox, link, self._header(seq, lot), sending, done)
        return sending

    def _go_on_receiving(self, link: Link, seq: int, freight: Freight, header: bytes, came: int) -> Receiving:
        lot, mailbox, data = freight.lot, self._mailbox, freight.memory
        receiving = Receiving(mailbox.context, lot.peer, False, seq, lot.tag, lot.fingerprint, data)
        if link.fileno() < 0:
            self._fabric.outcomes.finish(receiving, self._gone())
            return receiving
        self._fabric.delivery.account_for(mailbox, self._peer, False, FRAME_COST + lot.nbytes)
        mailbox.calls.note_called(self._peer, seq)
        mailbox.accepted.add(receiving)
        link.receiving = receiving
        link.reader.resume(Header.decode(header), data[came:])
        return receiving

    def _gone(self) -> PeerLostError:
        return PeerLostError(f"{self._mailbox.names([self._peer])} is gone", ranks=[self._peer])


def header_of(context: int, lot: Lot) -> bytes:
    """Return the header of a message of a rail, but for the number of the operation."""
    return Header(Kind.EAGER, 0, context, 0, lot.tag, lot.fingerprint, lot.nbytes, total=lot.nbytes).encode()


class Rails:
    """Those of one plan.

    Args:
        fabric: This process's fabric.
        mailbox: The group's mailbox.
        fingerprint: The operation's fingerprint.

    Attributes:
        is_open: Whether scripts may use them.
    """

    def __init__(self, fabric: Fabric, mailbox: Mailbox, fingerprint: int) -> None:
        self.is_open = False
        self._fabric = fabric
        self._mailbox = mailbox
        self._fingerprint = fingerprint
        self._tracks: dict[int, _Track] = {}
        self._taken: list[bool] = []
        self._seq = 0
        self._moved = 0
        self._until_ns = 0

    def rail(self, peer: int) -> steps.Rail:
        """Return the rail to a member, for the steps of a script."""
        track = self._tracks.get(peer)
        if track is None:
            track = self._tracks[peer] = _Track(self._fabric, self._mailbox, peer, self._fingerprint)
        return track.rail

    def header(self, lot: Lot) -> bytes:
        """Return the header of a message, for the step of a script."""
        return header_of(self._mailbox.context, lot)

    def open(self, seq: int, early: Mapping[int, int]) -> bool:
        """Take exclusive use of the links for scripts, if no other transfer is in progress; return whether it
        did.

        The caller calls `abandon` afterwards, even after an exception.

        Args:
            seq: Number of the operation.
            early: Number of messages of each member that were received before their steps: scripts stop at
                those.
        """
        fabric = self._fabric
        self._seq, self._until_ns = seq, 0
        # In one step: a signal handler that raised between the two would leave the role taken for ever.
        self._taken += map(fabric.poller.role.acquire, _AT_ONCE)
        if self._taken[0] and not fabric.poller.closed:
            with fabric.lock:
                self.is_open = self._open_tracks(seq, early)
        if not self.is_open:
            self._give_role()
        return self.is_open

    def _open_tracks(self, seq: int, early: Mapping[int, int]) -> bool:
        """Open all tracks, if they are free; under the lock."""
        mailbox, tracks = self._mailbox, self._tracks
        if mailbox.fault is not None or mailbox.aborted is not None or mailbox.aborters:
            return False
        if not all(track.find(seq, early.get(peer, 0)) for peer, track in tracks.items()):
            return False
        for track in tracks.values():
            track.open(seq)
        return True

    def go_on(self, deadline_ns: int) -> bool:
        """Resume a script that stopped for lack of data; False if it must not wait any longer."""
        fabric, mailbox = self._fabric, self._mailbox
        tracks = self._tracks.values()
        if not any(track.rail.stalled for track in tracks):
            return False
        now, moved = monotonic_ns(), sum(track.rail.moved for track in tracks)
        if moved != self._moved or not self._until_ns:
            self._moved, self._until_ns = moved, min(now + PATIENCE_NS, deadline_ns)
        if now >= self._until_ns or mailbox.aborted is not None or mailbox.fault is not None:
            return False
        fabric.press()
        if ctrl_c.pending or fabric.poller.is_wanted() or any(track.is_awaited for track in tracks):
            return False
        for track in tracks:
            track.rail.go_on()
        return True

    def take(self, coming: Freight) -> bool:
        """Receive a message that arrived before the rails were opened: the script may go on.

        Args:
            coming: The messages that the script was about to receive.
        """
        track = self._tracks[coming.lot.peer]
        if not track.rail.kept:
            return False
        with self._fabric.lock:
            return track.take(self._seq, coming)

    def skip(self, peer: int) -> None:
        """Let a script go on that stopped at the receive of a message that is here already."""
        self._tracks[peer].rail.took(0)

    def close(self, find: Find, coming: int | None) -> Left:
        """Release the links, and let the queue finish the messages in flight.

        Args:
            find: Returns the message of a number.
            coming: Number of the one that the script was about to receive.
        """
        left, fabric = Left(), self._fabric
        self.is_open = False
        with fabric.lock:
            for track in self._tracks.values():
                track.close(self._seq, find, coming, left)
        self._give_role()
        fabric.poller.tell_finished()
        return left

    def abandon(self) -> None:
        """Abandon rails that are still (partly) open: a signal handler raised during open or close."""
        if not self._taken:
            return
        self.is_open = False
        try:
            if self._taken[0]:
                for track in self._tracks.values():
                    track.abandon()
        finally:
            self._give_role()

    def _give_role(self) -> None:
        poller, taken, self._taken = self._fabric.poller, self._taken, []
        if taken[0]:
            poller.role.release()
            poller.tell_waiters()
