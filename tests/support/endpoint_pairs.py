"""Two ranks of one process whose messages go through rings in shared memory, or over sockets, as `Side`s."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import attrs

from dist2.backends.socket.transport.messages.calls import Called
from dist2.backends.socket.transport.messages.credit import Account
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.transfer import Receiving
from dist2.backends.socket.transport.messages.ways import Lot
from dist2.backends.socket.transport.node import Node
from dist2.runtime.deadline import deadline_in
from support.threads import together

PRINT = 11
NBYTES = 24


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins. Keep it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@attrs.frozen
class Side:
    """One of two ranks."""

    node: Node
    endpoint: FabricEndpoint
    peer: int

    def send(self, text: bytes, tag: int = 0) -> bool:
        lot = Lot(self.peer, tag, PRINT, len(text))
        way = self.endpoint.ways.express(lot)
        held = bytearray(text) or bytearray(1)
        return way.send(address_of(memoryview(held)))

    def take(self, nbytes: int = NBYTES, tag: int = 0, fingerprint: int = PRINT) -> bytes | None:
        lot = Lot(self.peer, tag, fingerprint, nbytes)
        way = self.endpoint.ways.express(lot)
        buffer = bytearray(nbytes or 1)
        return bytes(buffer[:nbytes]) if way.take(address_of(memoryview(buffer))) else None

    def post(self, buffer: bytearray, tag: int = 0, peer: int | None = None) -> Receiving:
        source = self.peer if peer is None else peer
        posted = self.endpoint.recv_tagged(source, tag, PRINT, memoryview(buffer))
        assert isinstance(posted, Receiving)
        return posted

    @property
    def account(self) -> Account:
        """The account of messages to and from the other side."""
        return self.endpoint._mailbox.accounts[True][self.peer]

    def send_long_way(self, text: bytes, tag: int = 0) -> None:
        self.endpoint.wait([self.endpoint.send_tagged(self.peer, tag, PRINT, memoryview(text))], soon())

    def take_long_way(self, nbytes: int = NBYTES, tag: int = 0, peer: int | None = None) -> bytes:
        buffer = bytearray(nbytes)
        source = self.peer if peer is None else peer
        transfer = self.endpoint.recv_tagged(source, tag, PRINT, memoryview(buffer))
        self.endpoint.wait([transfer], soon())
        return bytes(buffer[: transfer.nbytes])


def each_in_turn(one: Side, two: Side, receive: Callable[[], bytes], count: int = 50) -> None:
    """Have one side send messages that the other receives in some way, one after the other."""
    got = []

    def take() -> None:
        for _ in range(count):
            got.append(receive())
            two.send_long_way(b"next")

    def send() -> None:
        for number in range(count):
            one.send_long_way(text(number))
            one.take_long_way(4)

    together(take, send)
    assert got == [text(number) for number in range(count)]


def soon(timeout_s: float = 10.0) -> int:
    return deadline_in(timeout_s)


def text(number: int) -> bytes:
    return bytes((number * 7 + each) % 256 for each in range(NBYTES))


def pattern(nbytes: int, salt: int = 0) -> bytearray:
    """Return the bytes of a long message: different ones for each salt."""
    return bytearray(random.Random(salt).randbytes(nbytes))


@contextmanager
def two_sides(share: bool = True) -> Iterator[tuple[Side, Side]]:
    """Two ranks whose rings, or sockets, are in use: the first messages go before there are any.

    Args:
        share: Rings, not sockets.
    """
    nodes = [Node(attend_s=0), Node(attend_s=0)]
    cards = [node.card for node in nodes]
    ranks = [
        Side(
            node,
            node.endpoint(
                5,
                rank,
                [card.card for card in cards],
                node.company(rank, cards, inside=False, share=True),
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

    together(*(partial(greet, side) for side in ranks))
    for side in ranks * 2:
        side.endpoint.attend()  # after a long wait, a side may have asked the other for its call
    yield ranks[0], ranks[1]
    for side in ranks:
        side.endpoint.close()
    together(*(node.close for node in nodes))
