# cython: annotation_typing=False
"""`Courier`: sends frames to the members of groups. Under the fabric's lock; never blocks."""

from __future__ import annotations

from dist2.backends.socket.transport.links.connector import Connector
from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.linkage import Linkage
from dist2.backends.socket.transport.links.presence import Presence
from dist2.backends.socket.transport.messages.mailbox import Mailbox
from dist2.backends.socket.wire import Header
from dist2.errors import PeerLostError, ResourceError
from dist2.runtime.built import check_built

check_built(__name__, __file__)


class Courier:
    """Finds the links to members, and sends them control frames.

    Args:
        linkage: The existing links.
        connector: Makes those that are missing.
        presence: Knows dead processes, and is notified of unreachable ones.

    Attributes:
        silent: Whether sending has ended.
        put_off: Frames whose link needs a resource that this process lacks. They go in the order given: none
            has a link.
    """

    def __init__(self, linkage: Linkage, connector: Connector, presence: Presence) -> None:
        self.silent = False
        self.put_off: list[tuple[Mailbox, int, bytes]] = []
        self._linkage = linkage
        self._outgoing = linkage.outgoing
        self._connector = connector
        self._presence = presence

    def reach(self, mailbox: Mailbox, peer: int) -> Link:
        """Return the link to a member, connecting if there is none.

        Raises:
            PeerLostError: No process answers there any more.
            ResourceError: This process lacks descriptors or memory.
        """
        fabric_id = mailbox.fabric_ids[peer]
        link = self._outgoing.get(fabric_id)
        if link is not None:
            return link
        if fabric_id in self._presence.dead:
            ended = mailbox.names.ended({peer: self._presence.dead[fabric_id]})
            raise PeerLostError(ended, ranks=[peer])
        beside = peer in mailbox.beside
        return self._connector.connect(mailbox.cards[peer], inside=mailbox.inside, beside=beside)

    def answer(self, mailbox: Mailbox, peer: int, header: Header) -> None:
        """Send a frame without payload about a message; a peer that is gone needs none."""
        try:
            link = self.reach(mailbox, peer)
        except PeerLostError as error:
            self._presence.suspect(mailbox.fabric_ids[peer], str(error))
            return
        except ResourceError as error:
            self._put_off(mailbox, peer, header.encode(), error)
            return
        self._linkage.say(link, header.encode())

    def tell(self, mailbox: Mailbox, rank: int, frame: bytes) -> None:
        """Send a frame about the group to a member; where there is no way to it, it is gone."""
        fabric_id = mailbox.fabric_ids[rank]
        if rank == mailbox.rank or fabric_id in self._presence.dead or self.silent:
            return
        try:
            link = self.reach(mailbox, rank)
        except PeerLostError as error:
            self._presence.suspect(fabric_id, str(error))
            return
        except ResourceError as error:
            self._put_off(mailbox, rank, frame, error)
            return
        self._linkage.send(link, frame)

    def _put_off(self, mailbox: Mailbox, rank: int, frame: bytes, shortage: ResourceError) -> None:
        self.put_off.append((mailbox, rank, frame))
        self._linkage.note_shortage(shortage)

    def retry(self) -> None:
        """Send the frames again that were put off for lack of a resource."""
        frames, self.put_off = self.put_off, []
        for mailbox, rank, frame in frames:
            self.tell(mailbox, rank, frame)

    def has_told(self, mailbox: Mailbox) -> bool:
        """Whether all short frames to the members have been handed to the kernel."""
        if any(each is mailbox for each, *_ in self.put_off):
            return False
        links = [self._outgoing.get(fabric_id) for fabric_id in mailbox.fabric_ids]
        return all(link is None or link.prompt for link in links)
