"""Which congestion control connections have: BBR only to hosts that are far."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.links import linkage
from dist2.backends.socket.transport.links.pacing import NEAR_US, settle
from dist2.backends.socket.transport.messages.calls import Called
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.node import Node
from dist2.clock import deadline_in
from dist2.config import Config

INFO_BYTES, RTT_AT = 152, 148


class Connection:
    """What a socket says of itself.

    Args:
        control: Its congestion control.
        rtt_us: How soon the other host has answered at best.
        allowed: What it may be changed to.
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
    ("connection", "near", "control", "settled"),
    [
        (Connection("bbr", 40), "reno", "reno", True),
        (Connection("bbr", NEAR_US + 1), "reno", "bbr", False),
        (Connection("bbr", (1 << 32) - 1), "reno", "bbr", False),
        (Connection("cubic", 40), "reno", "cubic", True),
        (Connection("bbr", 40), "bbr", "bbr", True),
        (Connection("bbr", 40), "cubic", "bbr", True),
        (Connection("bbr", 40, allowed="cubic"), "cubic", "cubic", True),
    ],
    ids=["near", "far", "not yet known", "another", "left", "not allowed", "chosen"],
)
def test_bbr_is_for_far_hosts(connection: Connection, near: str, control: str, settled: bool) -> None:
    assert settle(connection, near) is settled
    assert connection.control == control


def test_other_sockets_are_left_alone() -> None:
    first, second = socket.socketpair()
    with first, second:
        assert settle(first, "reno")


def congestion_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_a_real_connection_to_this_host_is_near() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
        listener.accept()[0] as called,
    ):
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this kernel has no BBR")
        end = time.monotonic() + 10
        while not settle(caller, "reno") and time.monotonic() < end:  # a busy machine answers late
            caller.sendall(b"!")
            assert called.recv(1) == b"!"
        assert congestion_of(caller) == b"reno"


def test_it_can_be_chosen() -> None:
    assert Config.from_environment({}).congestion == "reno"
    config = Config.from_environment({"DIST2_CONGESTION": "bbr"})
    node = Node(config=config)
    try:
        assert node._fabric.linkage.congestion == "bbr"
    finally:
        node.close()


def test_links_are_settled_when_their_fabric_looks_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    wanted: list[str] = []

    def settle_some(sock: socket.socket, near: str) -> bool:
        wanted.append(near)
        if len(wanted) > 2:
            asked.set()
        return len(wanted) > 2

    monkeypatch.setattr(linkage, "settle", settle_some)
    fabrics = [Fabric(job_id="test", attend_s=0.01) for _ in range(2)]
    try:
        for fabric in fabrics:
            fabric.linkage.congestion = "cubic"
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
        assert asked.wait(20)
        assert set(wanted) == {"cubic"}
        for end in ends:
            end.close()
    finally:
        for fabric in fabrics:
            fabric.close()
