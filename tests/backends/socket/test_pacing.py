"""Which congestion control connections have: BBR only to hosts that are far."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import TypeGuard

import pytest

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links import linkage, pacing
from dist2.backends.socket.transport.links.pacing import NEAR_US, SETTLING_LOOKS, begin, settle
from dist2.backends.socket.transport.messages.calls import Called
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.node import Node
from dist2.runtime.config import Config
from dist2.runtime.deadline import deadline_in

RTT_AT = 148
FAR = ["reno", "reno", "bbr"]


class Connection:
    """The state of a socket.

    Args:
        control: Its congestion control.
        rtt_us: The shortest round trip to the other host.
        allowed: The congestion control that the system permits.
    """

    def __init__(self, control: str, rtt_us: int, allowed: str = "reno") -> None:
        self.family: int = socket.AF_INET
        self.control = control
        self._rtt_us = rtt_us
        self._allowed = allowed

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert level == socket.IPPROTO_TCP
        if option == socket.TCP_CONGESTION:
            return self.control.encode().ljust(size, b"\0")
        assert option == socket.TCP_INFO
        return bytes(RTT_AT) + struct.pack("I", self._rtt_us)

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if value.decode() != self._allowed:
            raise PermissionError(value)
        self.control = value.decode()


@pytest.mark.parametrize(
    ("control", "near", "allowed", "begins"),
    [
        ("bbr", "reno", "reno", "reno"),
        ("bbr", "cubic", "cubic", "cubic"),
        ("cubic", "reno", "reno", "cubic"),
        ("bbr", "bbr", "bbr", "bbr"),
        ("bbr", "cubic", "reno", "bbr"),
    ],
    ids=["the default", "chosen", "another", "left", "not allowed"],
)
def test_no_connection_begins_with_bbr(control: str, near: str, allowed: str, begins: str) -> None:
    connection = Connection(control, 0, allowed)
    begin(connection, near)
    assert connection.control == begins


@pytest.mark.parametrize(
    ("rtt_us", "after"),
    [(40, ["reno"]), (NEAR_US, ["reno"]), (NEAR_US + 1, FAR), ((1 << 32) - 1, FAR)],
    ids=["near", "just near", "far", "not yet known"],
)
def test_bbr_is_for_far_hosts(rtt_us: int, after: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_usual", lambda family: b"bbr")
    connection = Connection("reno", rtt_us, allowed="bbr")
    had, looks = [], 3
    while looks:
        looks = settle(connection, looks)
        had.append(connection.control)
    assert had == after
    assert settle(connection, 0) == 0


@pytest.mark.parametrize(
    ("control", "usual"),
    [("cubic", "cubic"), ("bbr", "bbr"), ("reno", "cubic")],
    ids=["another is usual", "it was not allowed to begin otherwise", "not for BBR"],
)
def test_what_did_not_begin_without_bbr_is_left_alone(
    control: str, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_usual", lambda family: usual.encode())
    connection = Connection(control, NEAR_US + 1, allowed=usual)
    assert settle(connection, 1) == 0
    assert connection.control == control


def test_a_host_that_answered_late_at_first_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_usual", lambda family: b"bbr")
    assert settle(Connection("reno", NEAR_US + 1, allowed="bbr"), 2) == 1
    assert settle(Connection("reno", NEAR_US, allowed="bbr"), 1) == 0


def test_what_the_system_gives_is_asked_for_at_the_last_look_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def usual(family: int) -> bytes:
        asked.append(family)
        return b"bbr"

    monkeypatch.setattr(pacing, "_usual", usual)
    assert settle(Connection("reno", NEAR_US + 1, allowed="bbr"), 2) == 1
    assert settle(Connection("reno", NEAR_US, allowed="bbr"), 1) == 0
    assert not asked
    assert settle(Connection("reno", NEAR_US + 1, allowed="bbr"), 1) == 0
    assert asked == [socket.AF_INET]


def test_other_sockets_are_left_alone() -> None:
    first, second = socket.socketpair()
    with first, second:
        begin(first, "reno")
        assert settle(first, 5) == 0


def congestion_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def choose_bbr(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        pytest.skip("this kernel has no BBR")


def test_what_is_accepted_begins_as_what_listens_does() -> None:
    with socket.socket() as listener, socket.socket() as caller:
        choose_bbr(listener)
        choose_bbr(caller)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        begin(listener, "reno")
        begin(caller, "reno")
        caller.connect(listener.getsockname())
        called, _ = listener.accept()
        with called:
            assert congestion_of(caller) == congestion_of(called) == b"reno"


def test_a_real_connection_to_this_host_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_usual", lambda family: b"bbr")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
        listener.accept()[0] as called,
    ):
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        end = time.monotonic() + 10
        while settle(caller, 2) and time.monotonic() < end:  # a busy machine answers late
            caller.sendall(b"!")
            assert called.recv(1) == b"!"
        assert congestion_of(caller) == b"reno"


def controls_of(fabric: Fabric) -> set[bytes]:
    with fabric.lock:
        return {congestion_of(link.sock) for link in fabric.linkage.links.values() if _is_socket(link.sock)}


def _is_socket(stream: object) -> TypeGuard[socket.socket]:
    return isinstance(stream, socket.socket)


def test_it_can_be_chosen() -> None:
    assert Config.from_environment({}).congestion == "reno"
    config = Config.from_environment({"DIST2_CONGESTION": "bbr"})
    node = Node(config=config)
    try:
        assert node._fabric.linkage.congestion == "bbr"
    finally:
        node.close()


@pytest.fixture
def fabrics() -> Iterator[list[Fabric]]:
    made = [Fabric(job_id="test", attend_s=0.01, congestion="reno") for _ in range(2)]
    yield made
    for fabric in made:
        fabric.close()


def exchange(fabrics: list[Fabric]) -> None:
    """Send a message from the first to the second."""
    cards = [fabric.card for fabric in fabrics]
    ends = [
        FabricEndpoint(fabric, 1, rank, cards, False, lambda seq, number: Called(1, 11, "a test"))
        for rank, fabric in enumerate(fabrics)
    ]
    place = bytearray(4)
    deadline_ns = deadline_in(20)
    receiving = ends[1].recv_tagged(0, 0, 11, memoryview(place))
    ends[0].wait([ends[0].send_tagged(1, 0, 11, memoryview(b"four"))], deadline_ns)
    ends[1].wait([receiving], deadline_ns)


def test_links_are_settled_when_their_fabric_looks_after_them(
    fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    left: list[int] = []

    def settle_some(sock: socket.socket, looks: int) -> int:
        left.append(looks)
        if looks == SETTLING_LOOKS - 2:
            asked.set()
            return 0
        return looks - 1

    monkeypatch.setattr(linkage, "settle", settle_some)
    exchange(fabrics)
    assert asked.wait(20)
    assert set(left) == {SETTLING_LOOKS, SETTLING_LOOKS - 1, SETTLING_LOOKS - 2}


def test_links_begin_with_what_was_chosen_for_near_hosts(fabrics: list[Fabric]) -> None:
    """At both ends, with any default of the system."""
    with socket.socket() as usual:
        was = congestion_of(usual)
    exchange(fabrics)
    for fabric in fabrics:
        controls = controls_of(fabric)
        assert controls == ({b"reno"} if was.startswith(b"bbr") else {was})
