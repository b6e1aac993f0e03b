"""Long sums over more than two hosts: a rank that waits for one of them holds up none of the others.

Between two hosts messages are answered in the order in which they are sent. With more, a message that one
rank waits for may depend, through others, on a message that it has not received yet.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from support.memory_endpoint import PostOffice
from support.oracle import check_sum
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket.traffic import Message, Receive, Send, Traffic, Ways
from dist2.backends.socket.transport.messages import dispatch
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.errors import OperationTimeoutError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from dist2.runtime.deadline import deadline_in

UNEVEN = Tenant("2+2+1", "socket", layout=(0, 0, 1, 1, 2))
FOUR = Tenant("2+2+2+2", "socket", layout=(0, 0, 1, 1, 2, 2, 3, 3))


class NoWay:
    """A short path that nothing can go now."""

    def send(self, address: int, seq: int = 0) -> bool:
        """Refuse."""
        return False

    def wait(self, address: int, deadline_ns: int, seq: int = 0) -> bool:
        """Have found nothing."""
        return False


MEMORY = torch.zeros(64, dtype=torch.uint8)


def traffic_of(office: PostOffice, *messages: Message) -> Traffic:
    """Return the messages of a call on rank 0: all have a short path, which is of no use now."""
    endpoint = office.endpoints[0]
    signature = Signature(OpKind.ALL_REDUCE, GroupInfo("g", "g", "", "socket", 0, (0, 1, 2)))
    ways = Ways(endpoint, (), signature.fingerprint)
    for message in messages:
        ways.sends[message.number] = cast(SocketSend, NoWay())
        ways.recvs[message.number] = cast(SocketReceive, NoWay())
    operation = Operation(signature, 1, 0, deadline_in(0.02), False)
    return Traffic(endpoint, operation, ways)


def start(traffic: Traffic, *messages: Message) -> None:
    for message in messages:
        begin = traffic.send if isinstance(message, Send) else traffic.receive
        begin(message, MEMORY.data_ptr() + 4 * message.number)


def received(number: int, peer: int, step: int = 0) -> Receive:
    return Receive(peer, step, 4, number)


def test_who_waits_for_a_message_has_posted_all_that_it_may_receive() -> None:
    office = PostOffice(3)
    awaited, other, later = received(0, 1), received(1, 2), received(2, 1, 1)
    traffic = traffic_of(office, awaited, other, later)
    start(traffic, awaited, other, later)
    assert not office.recvs
    with pytest.raises(OperationTimeoutError):
        traffic.wait((awaited.number,))
    assert set(office.recvs) == {(1, 0, 1, 0), (2, 0, 1, 0), (1, 0, 1, 1)}


def test_who_waits_for_a_send_has_posted_all_that_it_may_receive() -> None:
    office = PostOffice(3)
    send, recv = Send(1, 0, 4, 0), received(1, 2)
    traffic = traffic_of(office, send, recv)
    start(traffic, recv, send)
    assert set(office.sends) == {(0, 1, 1, 0)}
    with pytest.raises(OperationTimeoutError):
        traffic.wait((send.number,))
    assert set(office.recvs) == {(2, 0, 1, 0)}


def test_what_a_member_has_sent_before_is_received_before() -> None:
    """Otherwise it would be kept until it is asked for, and count against the credit."""
    office = PostOffice(3)
    first, second, third = received(0, 2), received(1, 2, 1), received(2, 2, 2)
    traffic = traffic_of(office, first, second, third)
    order: list[int] = []
    for number, way in traffic._ways.recvs.items():
        way.wait = lambda address, deadline_ns, seq, number=number: not order.append(number)  # type: ignore[assignment]  # in place of the method
    start(traffic, first, second, third)
    traffic.wait((second.number,))
    assert order == [0, 1]
    traffic.settle()
    assert order == [0, 1, 2]


def sums(pg: ProcessGroup) -> None:
    for turn, numel in enumerate((1_500_001, 300_000)):
        check_sum(pg, numel, turn)


@pytest.mark.parametrize("tenant", [UNEVEN, FOUR], ids=str)
def test_sums_of_long_vectors(tenant: Tenant) -> None:
    run_ranks(len(tenant.layout), sums, tenant)


def test_sums_end_where_all_messages_are_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no rank had any credit left, and nothing came in a moment."""
    monkeypatch.setattr(SocketSend, "send", NoWay.send)
    monkeypatch.setattr(SocketReceive, "wait", NoWay.wait)
    run_ranks(5, sums, UNEVEN)


def test_sums_end_where_all_messages_need_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if received but unwanted messages had used up the credit: later ones are announced."""
    monkeypatch.setattr(dispatch, "_may_be_prompt", lambda account, sending: False)
    monkeypatch.setattr(SocketSend, "send", NoWay.send)
    run_ranks(5, sums, UNEVEN)
