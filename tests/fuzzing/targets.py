"""Fuzz targets: each takes any bytes, and raises only if a decoder misbehaves.

A decoder may accept, or refuse by its own error; anything else (another exception, memory that grows with an
announced length, no end) is a finding.
"""

from __future__ import annotations

import itertools
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.messages.calls import Called
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.node import NodeCard
from dist2.backends.socket.wire import HEADER_BYTES, FrameReader, Header, Hello, Kind
from dist2.errors import AuthenticationError, Dist2Error, InvalidUsageError, WireError
from dist2.group.serialization import PLAIN, decode
from dist2.rendezvous.requests import JoinRequest, Verdict
from dist2.runtime.secret import Secret
from dist2.security.authenticator import Credentials
from dist2.security.handshake import OPENER_BYTES, Caller, Listener, Plane, RefusalError
from dist2.security.sealing import seal, unseal
from dist2.store.file import replay
from dist2.store.protocol import Query, ReplyDecoder, Request, RequestDecoder, encode_request
from dist2.store.server_core import StoreCore

Target = Callable[[bytes], None]

SLACK_BYTES = 4 << 20
"""Bytes that a decoder may allocate beside a small multiple of its input."""
MULTIPLE = 64

MOST_FRAMES = 32
"""That a plausible peer says."""

CONTEXT, STRANGE_CONTEXT = 7, 8
_PEER = "f" * 32
_SECRET = Secret(b"a secret that the fuzzer does not know")
_MEMBER = Credentials(_SECRET, "job")


@contextmanager
def bounded(data: bytes) -> Iterator[None]:
    """Fail if much more is allocated than came."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < SLACK_BYTES + MULTIPLE * len(data), f"{peak} bytes allocated for {len(data)}"


def objects(data: bytes) -> None:
    """The safe encoding of objects."""
    with suppress(WireError, InvalidUsageError):
        decode(bytes([PLAIN]) + data)


def frames(data: bytes) -> None:
    """The data plane's frames, in pieces of any length."""
    sink = memoryview(bytearray(1 << 20))
    ended: list[Header] = []
    reader = FrameReader(lambda header: sink[: header.nbytes], ended.append)
    with suppress(WireError):
        _feed(reader, data)
    assert sum(HEADER_BYTES + header.nbytes for header in ended) <= len(data)


def _feed(reader: FrameReader, data: bytes) -> None:
    view = memoryview(data)
    for length in itertools.cycle((1, 7, 64, 1 << 20)):
        if not view:
            return
        target = reader.target()
        count = min(len(target), len(view), length)
        assert count > 0, "no place for what comes"
        target[:count] = view[:count]
        reader.received(count)
        view = view[count:]


def hello(data: bytes) -> None:
    """The first frame of a connection."""
    with suppress(WireError):
        Hello.decode(data)


def handshakes(data: bytes) -> None:
    """The input of either side of a handshake; no input passes without the secret."""
    sides = (
        Listener(_SECRET, Plane.DATA, "job", "me"),
        Caller(_SECRET, Plane.DATA, "job", "me", "you"),
        _challenged(),
    )
    for side in sides:
        rest = data
        with suppress(RefusalError):
            while rest:
                count = side.wanted
                assert 0 < count <= OPENER_BYTES, "it reads what is not for it"
                side.feed(rest[:count])
                rest = rest[count:]
        assert not side.done


def _challenged() -> Caller:
    """Return a caller that is answered by a listener with another secret."""
    listener = Listener(Secret(b"another secret than the members'"), Plane.DATA, "job", "you")
    caller = Caller(_SECRET, Plane.DATA, "job", "me", "you")
    caller.feed(listener.feed(caller.opener))
    return caller


def cards(data: bytes) -> None:
    """Records that members publish in the store, sealed and not; and their decisions before."""
    text = data.decode(errors="replace")
    with suppress(WireError):
        NodeCard.from_json(text)
    JoinRequest.read(data)
    with suppress(WireError):
        Verdict.read(data)
    for sealed in (text, f"dist2-seal-1:{text}", seal(_MEMBER, text, "b")):
        with suppress(AuthenticationError):
            raise AssertionError(f"{unseal(_MEMBER, sealed, 'a')!r} was taken for a member's")


def store_requests(data: bytes) -> None:
    """Input of the store's server."""
    with suppress(WireError):
        for _ in RequestDecoder().feed(data):
            pass


def store_replies(data: bytes) -> None:
    """Input of the store's client."""
    decoder = ReplyDecoder()
    for query in (Query.GET, Query.MULTI_GET, Query.WAIT, Query.LIST_KEYS, Query.ADD):
        decoder.expect(Request(query, keys=(b"a", b"b")))
    with suppress(WireError):
        for _ in decoder.feed(data):
            pass


def store_server(data: bytes) -> None:
    """The server's state: two sessions, one of them valid, share the input."""
    core = StoreCore()
    stranger, friend = core.join("stranger"), core.join("friend")
    with suppress(WireError):
        core.receive(stranger, data)
    core.leave(stranger)
    core.leave(friend)


def store_file(data: bytes) -> None:
    """The file of a `FileStore`."""
    taken = replay(data, {})
    assert 0 <= taken <= len(data)


class _Peer:
    """A fabric with a group of two, whose other member is the fuzzer, past its hello."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        called = Called(0, 0, "nothing")
        others = (self.fabric.card, Card(_PEER, "127.0.0.1", 1))
        self.endpoint = FabricEndpoint(self.fabric, CONTEXT, 0, others, True, lambda seq, number: called)
        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        theirs.setblocking(False)
        self.fabric._reception.adopt(theirs)
        self.sock.send(Hello("", _PEER, self.fabric.card.fabric_id).encode())
        self.turn()

    def turn(self) -> None:
        for _ in range(3):
            self.fabric.poller.progress(0)

    def receive(self) -> None:
        """Post receives that arriving messages may match."""
        self.endpoint.begin(1, 1)
        for step in range(2):
            self.endpoint.recv(1, 1, step, 1, memoryview(bytearray(16)))
            self.endpoint.recv_tagged(1, step, 1, memoryview(bytearray(100_000)))
        self.endpoint.send_tagged(1, 0, 1, memoryview(bytearray(100_000)))

    def say(self, data: bytes) -> None:
        while data:
            try:
                count = self.sock.send(data[: 1 << 16])
            except BlockingIOError:
                count = 0
            except OSError:
                return  # it was hung up on
            data = data[count:]
            self.turn()
            with suppress(BlockingIOError, ConnectionError):
                self.sock.recv(1 << 20)

    def close(self) -> None:
        self.sock.close()
        self.turn()
        self.endpoint.close()
        self.fabric.close()


def peer(data: bytes) -> None:
    """A peer that says well-formed frames that make no sense: only its link and its groups may suffer."""
    stranger = _Peer()
    try:
        with suppress(Dist2Error):
            stranger.receive()
            stranger.say(b"".join(_plausible(data)))
    finally:
        stranger.close()


_LENGTHS = (0, 1, 16, 100, 65536, 65537, 100_000, 2**63)
_RECIPE = struct.Struct("<8B")


def _plausible(data: bytes) -> Iterator[bytes]:
    """Yield frames with fields that are almost valid."""
    kinds = tuple(Kind)
    for at in range(0, min(len(data), MOST_FRAMES * _RECIPE.size) - _RECIPE.size + 1, _RECIPE.size):
        kind, flags, context, seq, tag, fingerprint, length, transfer = _RECIPE.unpack_from(data, at)
        total = _LENGTHS[length % len(_LENGTHS)]
        chosen = kinds[kind % len(kinds)]
        nbytes = min(total, 70_000) if chosen in (Kind.EAGER, Kind.DATA) else length % 3 * 20
        header = Header(
            chosen,
            flags % 3,
            (CONTEXT, STRANGE_CONTEXT, 0)[context % 3],
            (0, 1, 2, 2**64 - 1)[seq % 4],
            (0, 1, 2, -1, 2**62)[tag % 5],
            fingerprint % 3,
            nbytes,
            transfer % 5,
            nbytes if chosen is Kind.EAGER else total,
        )
        yield header.encode() + bytes(nbytes)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(objects, frames, hello, handshakes, cards, peer),
        *(store_requests, store_replies, store_server, store_file),
    )
}
"""By name."""

SEEDS = [
    Hello("job", "a", "b").encode(),
    Hello("job", "a", "b").encode()[HEADER_BYTES:],
    encode_request(Request(Query.VALIDATE))
    + encode_request(Request(Query.SET, keys=(b"k",), values=(b"v",))),
    b'{"card": {"fabric_id": "f", "host": "h", "port": 1}, "pid": 1, "host_id": "i", "memory": {"a": "b"}}',
    Caller(_SECRET, Plane.DATA, "job", "you", "me").opener + bytes(48),
    b'{"card": [], "pid": 1}',
    b'{"card": {"fabric_id": 1, "host": [], "port": null}, "pid": "x", "host_id": "i", "memory": {"a": 1}}',
    b"[" * 100_000,
    b"\xff" * 64,
]
"""The initial inputs: one of each kind, and inputs that have broken decoders before."""
