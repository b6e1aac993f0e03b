"""`AbsentGroups`: frames for groups that are not open here: not yet, or no longer."""

from __future__ import annotations

from collections import deque

from dist2.backends.socket.transport.links.link import Link
from dist2.backends.socket.transport.messages.credit import CREDIT_BYTES, FRAME_COST
from dist2.backends.socket.wire import Header
from dist2.errors import WireError

HELD_BYTES = 8 * CREDIT_BYTES
"""Bound on the frames of one link that are held for groups that this process has not opened yet."""
MAX_CLOSED = 1 << 16
"""Closed groups that are remembered, so that late frames for them are dropped."""
MAX_UNTOLD = 1 << 10
"""Closed groups to be reported to a process once there is a link to it."""

Frame = tuple[Link, Header, "bytearray | None"]


class AbsentGroups:
    """Frames of groups that are not open, and members to notify that a group was closed.

    The fabric's lock guards it.
    """

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._closed: dict[int, None] = {}
        self._untold: dict[str, deque[bytes]] = {}

    def hold(self, link: Link, header: Header, payload: bytearray | None) -> None:
        """Keep a frame until its group is opened; drop it if the group has been closed.

        None of a group to come may be dropped: the group would wait for it.

        Raises:
            WireError: More is held of this link than may be.
        """
        if header.context in self._closed:
            return
        link.held += FRAME_COST + len(payload or b"")
        if link.held > HELD_BYTES:
            raise WireError(f"more than {HELD_BYTES} bytes for groups that are not open here")
        self._frames.append((link, header, payload))

    def take(self, context: int) -> list[Frame]:
        """Return the frames that arrived for a group before it was opened."""
        if not self._frames:
            return []
        taken = [frame for frame in self._frames if frame[1].context == context]
        self._frames = [frame for frame in self._frames if frame[1].context != context]
        for link, _, payload in taken:
            link.held -= FRAME_COST + len(payload or b"")
        return taken

    def close(self, context: int) -> None:
        """Remember that a group has been closed."""
        self._closed[context] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def closed_last(self, most: int) -> list[int]:
        """Return the contexts of the groups that have been closed here last."""
        return list(self._closed)[-most:]

    def is_closed(self, context: int) -> bool:
        """Whether a group has been closed here, as far as that is remembered."""
        return context in self._closed

    def tell_later(self, fabric_id: str, frame: bytes) -> None:
        """Keep the report that a group has been closed for a member without a link."""
        self._untold.setdefault(fabric_id, deque(maxlen=MAX_UNTOLD)).append(frame)

    def tell(self, link: Link) -> None:
        """Notify a newly linked process of the groups that were closed before."""
        for frame in self._untold.pop(link.peer_id or "", ()):
            link.put(frame)
