"""Two ranks of one process whose messages go through rings in shared memory, or over sockets, as `Side`s."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from dist2.backends.socket.transport.endpoint import FabricEndpoint
from dist2.backends.socket.transport.express import Lot
from dist2.backends.socket.transport.mailbox import Called
from dist2.backends.socket.transport.node import Node
from dist2.backends.socket.transport.raw import address_of
from dist2.clock import deadline_in

PRINT = 11
NBYTES = 24


@attrs.frozen
class Side:
    """One of two ranks."""

    node: Node
    endpoint: FabricEndpoint
    peer: int

    def send(self, text: bytes, tag: int = 0) -> bool:
        way = self.endpoint.express_send(Lot(self.peer, tag, PRINT, len(text)))
        held = bytearray(text) or bytearray(1)
        return way.send(address_of(memoryview(held)))

    def take(self, nbytes: int = NBYTES, tag: int = 0, fingerprint: int = PRINT) -> bytes | None:
        way = self.endpoint.express_receive(Lot(self.peer, tag, fingerprint, nbytes))
        buffer = bytearray(nbytes or 1)
        return bytes(buffer[:nbytes]) if way.take(address_of(memoryview(buffer))) else None

    def send_long_way(self, text: bytes, tag: int = 0) -> None:
        self.endpoint.wait([self.endpoint.send_tagged(self.peer, tag, PRINT, memoryview(text))], soon())

    def take_long_way(self, nbytes: int = NBYTES, tag: int = 0, peer: int | None = None) -> bytes:
        buffer = bytearray(nbytes)
        source = self.peer if peer is None else peer
        transfer = self.endpoint.recv_tagged(source, tag, PRINT, memoryview(buffer))
        self.endpoint.wait([transfer], soon())
        return bytes(buffer[: transfer.nbytes])


def soon(timeout_s: float = 10.0) -> int:
    return deadline_in(timeout_s)


def text(number: int) -> bytes:
    return bytes((number * 7 + each) % 256 for each in range(NBYTES))


@contextmanager
def two_sides(share: bool = True) -> Iterator[tuple[Side, Side]]:
    """Two ranks whose rings, or sockets, are in use: the first messages go before there are any."""
    nodes = [Node(attend_s=0), Node(attend_s=0)]
    cards = [node.card for node in nodes]
    ranks = [
        Side(
            node,
            node.endpoint(
                5,
                rank,
                cards,
                inside=False,
                share=share,
                describe=lambda seq, number: Called(1, PRINT, "a test"),
                on_revoked=lambda *_: None,
            ),
            1 - rank,
        )
        for rank, node in enumerate(nodes)
    ]

    def greet(side: Side) -> None:
        for _ in range(2):
            side.send_long_way(text(0), 99)
            assert side.take_long_way(tag=99) == text(0)

    threads = [threading.Thread(target=greet, args=(side,)) for side in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for side in ranks * 2:
        side.endpoint.attend()  # one that had to wait long may have asked the other what it calls
    yield ranks[0], ranks[1]
    for side in ranks:
        side.endpoint.close()
    closing = [threading.Thread(target=node.close) for node in nodes]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(20)
