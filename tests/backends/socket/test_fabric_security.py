"""Which peers get a link to a fabric with a secret or TLS, over real connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import trustme
from support import certificates
from support.captured_logs import logged, refusals_in
from support.fabrics import World
from support.threads import ends_of

from dist2.backends.socket.transport import poller
from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links import acceptor
from dist2.backends.socket.transport.links.card import Card
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.wire import EAGER_BYTES, Header, Hello, Kind
from dist2.errors import AuthenticationError, PeerLostError
from dist2.runtime.config import Config
from dist2.runtime.deadline import deadline_in
from dist2.runtime.secret import Secret
from dist2.security.authenticator import Credentials
from dist2.security.handshake import Caller, Plane
from dist2.security.refusals import refusals

SECRET = Secret(b"the secret of these tests")
OTHER = Secret(b"not the secret of these tests")
KNOWS = Credentials(SECRET, "job")
NONE = Credentials(None, "job")
LONG = 3 << 20


def tls_of(directory: Path, authority: trustme.CA | None = None) -> Credentials:
    """Return credentials with a certificate that was just made."""
    return Credentials.of(Config.from_environment(certificates.make(directory, authority).variables))


@pytest.fixture(params=["secret", "tls", "both"])
def credentials(request: pytest.FixtureRequest, tmp_path: Path) -> Credentials:
    if request.param == "secret":
        return KNOWS
    tls = tls_of(tmp_path / "member")
    return attrs.evolve(tls, job_id="job", secret=SECRET if request.param == "both" else None)


ATTEND_S = 0.02
"""Interval at which processes read their links while no thread waits: refused ones still answer others."""


@pytest.fixture(autouse=True)
def _every_line_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist2.security.refusals._LINES_AT_ONCE", 10**6)


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    pairs: list[World] = []

    def make(*credentials: Credentials, attend_s: float = 0.0) -> World:
        pair = World([Fabric(credentials=each, attend_s=attend_s) for each in credentials])
        pairs.append(pair)
        pair.group()
        return pair

    yield make
    for pair in pairs:
        pair.close()


def exchange(endpoint: FabricEndpoint, nbytes: int, timeout_s: float = 10.0) -> bytes:
    """Send the rank's bytes to the other one, and return the bytes of that one."""
    mine, other = endpoint.rank, 1 - endpoint.rank
    buffer = bytearray(nbytes)
    sending = endpoint.send_tagged(other, 0, 11, memoryview(bytes([mine]) * nbytes))
    receiving = endpoint.recv_tagged(other, 0, 11, memoryview(buffer))
    endpoint.wait([sending, receiving], deadline_in(timeout_s))
    return bytes(buffer)


def both(pair: World, nbytes: int = 100) -> list[Any]:
    return ends_of(*(lambda each=each: exchange(each, nbytes) for each in pair.endpoints))


def pump(fabric: Fabric, until: Callable[[], bool]) -> None:
    """Make progress until something is so."""
    assert fabric.poller.run_until(until, deadline_in(10), lambda: False), "it never came"


def counted(reason: str) -> int:
    return refusals.counts().get(("data", reason), 0)


# Accepted peers


@pytest.mark.parametrize("nbytes", [0, 1, EAGER_BYTES, EAGER_BYTES + 1, LONG])
def test_members_exchange_messages_of_all_sizes(
    make: Callable[..., World], credentials: Credentials, nbytes: int
) -> None:
    pair = make(credentials, credentials)
    assert both(pair, nbytes) == [bytes([1]) * nbytes, bytes([0]) * nbytes]
    assert both(pair, nbytes) == [bytes([1]) * nbytes, bytes([0]) * nbytes]


def test_many_messages_one_way_arrive_in_order(make: Callable[..., World], credentials: Credentials) -> None:
    """Messages that were queued before the link was open arrive in order, too."""
    first, second = make(credentials, credentials).endpoints
    sizes = [7, 5000, EAGER_BYTES, 1, LONG, 100] * 10

    def send() -> None:
        transfers = [
            first.send_tagged(1, 0, 11, memoryview(bytes([n]) * size)) for n, size in enumerate(sizes)
        ]
        first.wait(transfers, deadline_in(15))

    def receive() -> None:
        for number, size in enumerate(sizes):
            buffer = bytearray(size)
            second.wait([second.recv_tagged(0, 0, 11, memoryview(buffer))], deadline_in(15))
            assert buffer == bytes([number]) * size

    assert ends_of(send, receive) == [None, None]


def test_a_member_that_computes_is_waited_for(
    make: Callable[..., World], credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handshake without an answer for long is closed by the other side, and started again."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.05)
    pair = make(credentials, credentials)
    first, second = pair.endpoints
    sending = first.send_tagged(1, 0, 11, memoryview(b"x" * 10))
    for _ in range(2):
        pump(pair.fabrics[1], until=lambda: len(pair.fabrics[1]._reception.acceptor) == 1)
        time.sleep(0.1)
        pump(pair.fabrics[1], until=lambda: len(pair.fabrics[1]._reception.acceptor) == 0)
        with pytest.raises(TimeoutError):
            first.wait([first.recv_tagged(1, 9, 11, memoryview(bytearray(1)))], deadline_in(0.05))
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 10.0)
    buffer = bytearray(10)
    receiving = second.recv_tagged(0, 0, 11, memoryview(buffer))
    waits = ends_of(
        lambda: first.wait([sending], deadline_in(5)), lambda: second.wait([receiving], deadline_in(5))
    )
    assert waits == [None, None]
    assert buffer == b"x" * 10


def test_a_member_that_dies_in_the_handshake_is_lost(
    make: Callable[..., World], credentials: Credentials
) -> None:
    pair = make(credentials, credentials)
    first, _ = pair.endpoints
    receiving = first.recv_tagged(1, 0, 11, memoryview(bytearray(1)))
    pair.fabrics[1].close()
    start = time.monotonic()
    with pytest.raises(PeerLostError):
        first.wait([receiving], deadline_in(10))
    assert time.monotonic() - start < 2


# Refused peers


DIFFERENCES = pytest.mark.parametrize(
    ("theirs", "reason", "words"),
    [
        (attrs.evolve(KNOWS, secret=OTHER), "wrong_secret", "it has another secret"),
        (attrs.evolve(KNOWS, job_id="other"), "other_job", "it belongs to another job"),
        (NONE, "no_secret", "DIST2_SECRET"),
    ],
    ids=["wrong secret", "other job", "no secret"],
)


@DIFFERENCES
def test_ranks_that_differ_both_learn_why(
    make: Callable[..., World], theirs: Credentials, reason: str, words: str
) -> None:
    before = sum(counted(each) for each in (reason, f"{reason}_there", f"{reason}_here"))
    errors = both(make(KNOWS, theirs, attend_s=ATTEND_S))
    for rank, error in enumerate(errors):
        assert isinstance(error, AuthenticationError), error
        assert f"rank {1 - rank}" in str(error)
        assert words in str(error)
        assert not error.group_usable
    assert sum(counted(each) for each in (reason, f"{reason}_there", f"{reason}_here")) > before


@DIFFERENCES
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_calls_long_after_the_other_was_refused_learns_why(
    make: Callable[..., World], theirs: Credentials, reason: str, words: str, late: int
) -> None:
    """No thread waits on the other side, which has raised long ago."""
    pair = make(KNOWS, theirs, attend_s=ATTEND_S)
    tardy = pair.fabrics[late]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(exchange, pair.endpoints[1 - late], 10)
        while not early.done():  # it attends to callers, and calls no peer yet
            tardy.poller.attend()
        with pytest.raises(AuthenticationError):
            early.result()
    assert not tardy.linkage.links
    assert not tardy.poller.is_watched()
    with pytest.raises(AuthenticationError, match=words):
        exchange(pair.endpoints[late], 10)


def test_who_writes_to_a_port_that_has_refused_it_learns_why(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is reset, and frames that were sent before still count."""
    monkeypatch.setattr(poller, "_GLANCE_NS", 1 << 62)
    pair = make(KNOWS, NONE)
    _, second = pair.endpoints
    before = counted("no_secret_there")
    second.recv_tagged(0, 0, 11, memoryview(bytearray(1)))  # which makes a connection, and says hello
    pump(pair.fabrics[0], until=lambda: counted("no_secret_there") > before)
    sent = [second.send_tagged(0, tag, 11, memoryview(b"x")) for tag in range(3)]
    with pytest.raises(AuthenticationError, match="rank 0"):
        second.wait(sent, deadline_in(5))


def test_tls_on_one_side_only_is_told_to_both(make: Callable[..., World], tmp_path: Path) -> None:
    errors = both(make(attrs.evolve(tls_of(tmp_path / "member"), job_id="job"), NONE, attend_s=ATTEND_S))
    assert all(isinstance(error, AuthenticationError) for error in errors), errors
    assert "DIST2_TLS_CERT" in str(errors[0])
    assert "it speaks TLS" in str(errors[1])


def test_certificates_of_different_authorities_do_not_meet(
    make: Callable[..., World], tmp_path: Path
) -> None:
    errors = both(make(tls_of(tmp_path / "one"), tls_of(tmp_path / "two"), attend_s=ATTEND_S))
    assert all(isinstance(error, AuthenticationError) for error in errors), errors
    assert "TLS" in str(errors[0])


def test_a_caller_whose_certificate_is_not_taken_learns_it(
    make: Callable[..., World], tmp_path: Path
) -> None:
    """The caller trusts the listener, but the listener does not trust the caller."""
    authority = trustme.CA()
    ours = tls_of(tmp_path / "ours", authority)
    theirs = tls_of(tmp_path / "theirs")
    assert ours.tls is not None
    assert theirs.tls is not None
    mixed = attrs.evolve(theirs, tls=attrs.evolve(theirs.tls, ca=ours.tls.ca))
    pair = make(mixed, ours)
    first, second = pair.endpoints
    errors = ends_of(
        lambda: exchange(first, 10),
        lambda: second._fabric.poller.run_until(lambda: False, deadline_in(1), bool),
    )
    assert isinstance(errors[0], AuthenticationError)
    assert "unknown ca" in str(errors[0])


# Strangers, byte by byte


@attrs.frozen
class Recorded:
    """The bytes that a member sent on an accepted connection."""

    opener: bytes
    proof: bytes
    hello: bytes


def come_in(
    card: Card, fabric: Fabric, *, name: str = "stranger", hello_as: str | None = None
) -> tuple[socket.socket, Recorded]:
    """Do a whole handshake by hand."""
    caller = Caller(SECRET, Plane.DATA, "job", name, card.fabric_id)
    sock = socket.create_connection((card.host, card.port), timeout=5)
    sock.sendall(caller.opener)
    proof = caller.feed(answer(sock, fabric))
    sock.sendall(proof)
    caller.feed(answer(sock, fabric))
    assert caller.done
    hello = Hello("job", hello_as or name, card.fabric_id).encode()
    sock.sendall(hello)
    return sock, Recorded(caller.opener, proof, hello)


def answer(sock: socket.socket, fabric: Fabric, nbytes: int = 48) -> bytes:
    """Read a fabric's answer, letting it make progress."""
    sock.setblocking(False)
    got = bytearray()

    def came() -> bool:
        try:
            data = sock.recv(nbytes - len(got))
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        got.extend(data)
        return not data or len(got) == nbytes

    deadline = time.monotonic() + 10
    while not came():
        assert time.monotonic() < deadline
        fabric.poller.run_until(lambda: False, deadline_in(0.002), lambda: False)
    sock.setblocking(True)
    return bytes(got)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    fabric = Fabric(credentials=KNOWS)
    yield fabric
    fabric.close()


def test_who_proves_the_secret_gets_a_link(fabric: Fabric) -> None:
    sock, _ = come_in(fabric.card, fabric)
    with sock:
        pump(fabric, until=lambda: len(fabric.linkage.links) == 1)


def test_a_recorded_handshake_opens_nothing_a_second_time(fabric: Fabric) -> None:
    sock, recorded = come_in(fabric.card, fabric)
    with sock:
        pump(fabric, until=lambda: len(fabric.linkage.links) == 1)
        before = counted("wrong_secret")
        with socket.create_connection((fabric.card.host, fabric.card.port), timeout=5) as again:
            again.sendall(recorded.opener + recorded.proof + recorded.hello)
            assert len(answer(again, fabric)) == 48
            told = answer(again, fabric)
            assert told[11] == 5, "a refusal"
            assert answer(again, fabric, 1) == b""
        assert counted("wrong_secret") == before + 1
        assert len(fabric.linkage.links) == 1


def test_a_member_cannot_call_itself_by_anothers_name(fabric: Fabric) -> None:
    before = counted("wrong_hello")
    sock, _ = come_in(fabric.card, fabric, hello_as="somebody else")
    with sock:
        assert answer(sock, fabric, 1) == b""
    assert counted("wrong_hello") == before + 1
    assert not fabric.linkage.links


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (lambda card: Hello("job", "stranger", card.fabric_id).encode(), "no_secret_there"),
        (lambda card: b"GET / HTTP/1.1\r\n\r\n", "no_secret_there"),
        (lambda card: b"dist2-hs" + bytes([0, 0, 1, 1]) + bytes(200), "other_version"),
        (lambda card: Caller(SECRET, Plane.STORE, "job", "a", card.fabric_id).opener, "other_plane"),
        (lambda card: Caller(SECRET, Plane.DATA, "another", "a", card.fabric_id).opener, "other_job"),
        (lambda card: Caller(SECRET, Plane.DATA, "job", "a", "another").opener, "other_target"),
        (lambda card: bytes.fromhex("1603010200010001fc0303"), "tls_unexpected"),
    ],
    ids=["plain hello", "http", "old version", "store", "other job", "other target", "tls"],
)
def test_strangers_get_no_further(fabric: Fabric, says: Callable[[Card], bytes], reason: str) -> None:
    before = counted(reason)
    with (
        logged() as logs,
        socket.create_connection((fabric.card.host, fabric.card.port), timeout=5) as sock,
    ):
        sock.sendall(says(fabric.card))
        assert answer(sock, fabric, 1000) in (b"",) or reason != "tls_unexpected"
        where = sock.getsockname()
    assert counted(reason) == before + 1
    (entry,) = refusals_in(logs)
    assert entry["peer"] == f"{where[0]}:{where[1]}"
    assert (entry["plane"], entry["reason"]) == ("data", reason)
    assert not fabric.linkage.links
    assert not len(fabric._reception.acceptor)


def test_no_frame_counts_before_the_handshake(make: Callable[..., World]) -> None:
    """Frames behind a failed handshake are never read: not even a report of a death counts."""
    pair = make(KNOWS, KNOWS)
    fabric = pair.fabrics[0]
    caller = Caller(OTHER, Plane.DATA, "job", pair.cards[1].fabric_id, fabric.card.fabric_id)
    with socket.create_connection((fabric.card.host, fabric.card.port), timeout=5) as sock:
        sock.sendall(caller.opener)
        proof = caller.feed(answer(sock, fabric))
        payload = pair.cards[1].fabric_id.encode()
        death = Header(Kind.DEATH, nbytes=len(payload)).encode() + payload
        hello = Hello("job", pair.cards[1].fabric_id, fabric.card.fabric_id).encode()
        sock.sendall(proof + hello + death)
        answer(sock, fabric)
    assert both(pair) == [bytes([1]) * 100, bytes([0]) * 100]


def test_an_impostor_gets_no_hello(make: Callable[..., World]) -> None:
    """A listener at a member's address without the secret learns nothing of the job."""
    pair = make(KNOWS, KNOWS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair.cards[1] = Card("impostor", *listener.getsockname())
        first = pair.open(0, context=2)
        heard = bytearray()

        def impersonate() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.extend(connection.recv(144, socket.MSG_WAITALL))
                connection.sendall(heard[:11] + bytes([2]) + bytes(36))
                heard.extend(connection.recv(48, socket.MSG_WAITALL))
                connection.sendall(heard[:11] + bytes([4]) + bytes(36))
                while data := connection.recv(1 << 16):
                    heard.extend(data)

        (error, other) = ends_of(lambda: exchange(first, 10), impersonate)
        assert other is None
        assert isinstance(error, AuthenticationError)
        assert "its proof is wrong" in str(error)
        assert len(heard) <= 144 + 48 + 48
        first.close()


@pytest.mark.parametrize("says", [b"", b"dist2-hs\x01", b"\xd2\x01"], ids=["nothing", "a magic", "a frame"])
@pytest.mark.parametrize("who", [KNOWS, NONE], ids=["secret", "open"])
def test_a_thousand_idle_strangers_cost_a_job_nothing(
    make: Callable[..., World], descriptors: None, who: Credentials, says: bytes
) -> None:
    pair = make(who, who)
    strangers = []
    try:
        for _ in range(1000):  # before the members meet, and while no thread polls
            stranger = socket.create_connection((pair.cards[1].host, pair.cards[1].port), timeout=5)
            stranger.sendall(says)
            strangers.append(stranger)
        start = time.monotonic()
        for _ in range(20):
            assert both(pair) == [bytes([1]) * 100, bytes([0]) * 100]
        assert time.monotonic() - start < 5
        assert len(pair.fabrics[1]._reception.acceptor) <= acceptor.MAX_STRANGERS
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_member_is_let_in_before_strangers_that_came_first(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_STRANGERS", 3)
    address = (fabric.card.host, fabric.card.port)
    caller = Caller(SECRET, Plane.DATA, "job", "member", fabric.card.fabric_id)
    with socket.create_connection(address, timeout=5) as member:
        member.sendall(caller.opener)
        proof = caller.feed(answer(member, fabric))
        strangers = [socket.create_connection(address, timeout=5) for _ in range(20)]
        pump(fabric, until=lambda: counted("crowded") > 0)
        member.sendall(proof)
        caller.feed(answer(member, fabric))
        assert caller.done, "it has named this process, so strangers go first"
        for stranger in strangers:
            stranger.close()
