"""Payloads over sockets: how many bytes came, and whether the stream has ended behind them."""

from __future__ import annotations

import socket

import pytest

from dist2.backends.socket.transport.messages.streams import read_whole
from dist2.backends.socket.transport.raw import address_of


@pytest.mark.parametrize("text", [b"", b"abc"])
@pytest.mark.parametrize("ends", [False, True])
def test_what_came_before_the_end_is_counted(text: bytes, ends: bool) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.sendall(text)
        if ends:
            there.close()
        buffer = bytearray(8)
        count = read_whole(here.fileno(), address_of(memoryview(buffer)), len(buffer), False)
    assert count == (~len(text) if ends else len(text))
    assert buffer[: len(text)] == text


def test_all_that_is_wanted_is_read_and_no_more() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.sendall(b"abcd")
        buffer = bytearray(3)
        assert read_whole(here.fileno(), address_of(memoryview(buffer)), 3, False) == 3
        assert buffer == b"abc"
        assert here.recv(4) == b"d"
