# cython: annotation_typing=False
"""`Rings`: the links of one process whose frames go through shared memory. The fabric's lock guards it."""

from __future__ import annotations

from typing import Protocol

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.links.ring import RingReader, RingWriter
from dist2.errors import PeerLostError, WireError
from dist2.runtime.built import check_built

check_built(__name__, __file__)

_REFUSALS = (
    PeerLostError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a text that a peer has sent may raise: its process is gone, or the text is malformed."""


class RingMaker(Protocol):
    """Makes the rings of links inside the host."""

    def offer(self) -> tuple[RingWriter, str] | None:
        """Return the writing end of a new ring, and its address for the reader."""

    def take(self, fabric_id: str, text: str) -> RingReader:
        """Return the reading end of a ring that a peer has offered."""


class Rings:
    """Which links have rings, and their reading ends.

    Attributes:
        maker: Makes rings, where memory is shared.
        links: The links that have one, out or in.
        links_from: Those with one to read from, by the writer's fabric id.
        readers: All reading ends. Replaced, never changed, as others look at it without the lock.
    """

    def __init__(self) -> None:
        self.maker: RingMaker | None = None
        self.links: set[Link] = set()
        self.links_from: dict[str, Link] = {}
        self.readers: tuple[RingReader, ...] = ()

    def offer(self) -> tuple[RingWriter, str] | None:
        """Return the writing end of a new ring, and its address for the reader; None without one."""
        return None if self.maker is None else self.maker.offer()

    def write(self, link: Link, writer: RingWriter) -> None:
        """Have a link send through a ring from now on."""
        link.tx = writer
        self.links.add(link)

    def read(self, link: Link, text: str) -> None:
        """Have a link receive through a ring that its peer offers from now on.

        Raises:
            WireError: It cannot be found.
        """
        if self.maker is None:
            raise WireError("a ring, but no memory is shared")
        try:
            link.rx = self.maker.take(link.peer_id or "", text)
        except _REFUSALS as error:
            raise WireError(f"a ring that cannot be opened: {error}") from error
        self.readers = (*self.readers, link.rx)
        self.links.add(link)
        self.links_from[link.peer_id or ""] = link

    def forget(self, link: Link) -> None:
        """Look no more into the rings of a link."""
        self.links.discard(link)
        self.readers = tuple(reader for reader in self.readers if reader is not link.rx)
        if self.links_from.get(link.peer_id or "") is link:
            del self.links_from[link.peer_id or ""]

    def have_bytes(self, looks: int) -> bool:
        """Poll the rings so many times, without a system call or a lock; whether data has arrived."""
        for _ in range(looks):
            for reader in self.readers:
                if reader.has_bytes:
                    return True
        return False

    def doze(self, sleeping: bool) -> None:
        """Set whether the other ends must wake this process."""
        for link in self.links:
            if link.rx is not None:
                link.rx.doze(sleeping)
            if link.tx is not None and link.wants_write:
                link.tx.doze(sleeping)
