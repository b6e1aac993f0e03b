"""Long sums over more than two hosts: a rank that waits for one of them holds up none of the others.

Between two hosts messages are answered in the order in which they are sent. With more, a message that one
rank waits for may depend, through others, on a message that it has not sent yet, or not received.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
import torch
from support.memory_endpoint import PostOffice
from support.oracle import check_sum
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket.executor import Memory
from dist2.backends.socket.overlap import Message, Messages, Place
from dist2.backends.socket.passing import Passing, Ways
from dist2.backends.socket.plan import Plan
from dist2.backends.socket.transport.messages import dispatch
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.backends.socket.transport.messages.ways import ShortWays
from dist2.errors import OperationTimeoutError
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from dist2.runtime.deadline import deadline_in

UNEVEN = Tenant("2+2+1", "socket", layout=(0, 0, 1, 1, 2))
FOUR = Tenant("2+2+2+2", "socket", layout=(0, 0, 1, 1, 2, 2, 3, 3))


class NoWay:
    """A short path that nothing can go now."""

    held_up = True

    def send(self, address: int, seq: int = 0) -> bool:
        """Refuse."""
        return False

    def wait(self, address: int, deadline_ns: int, seq: int = 0) -> bool:
        """Have found nothing."""
        return False


def passing(office: PostOffice, messages: tuple[Message, ...], short: tuple[int, ...]) -> Passing:
    """Return the messages of a call on rank 0, some of which have a short path that is of no use now."""
    endpoint = office.endpoints[0]
    signature = Signature(OpKind.ALL_REDUCE, GroupInfo("g", "g", "", "socket", 0, (0, 1, 2)))
    ways = Ways(endpoint, Plan((), torch.uint8, 0, len(messages), False), signature.fingerprint)
    for number in short:
        ways.sends[number] = cast(SocketSend, NoWay())
        ways.recvs[number] = cast(SocketReceive, NoWay())
    memory = Memory(torch.zeros(64, dtype=torch.uint8))
    return Passing(
        endpoint, Operation(signature, 1, 0, deadline_in(0.02), False), [memory], len(messages), ways
    )


def message(number: int, peer: int, step: int = 0) -> Message:
    return Message(peer, step, Place(0, 4 * number, 4 * number + 4), number)


def test_who_waits_for_a_message_has_handed_over_what_it_held_back() -> None:
    office = PostOffice(3)
    send, recv = message(0, 1), message(1, 2)
    traffic = passing(office, (send, recv), (0, 1))
    traffic.start(Messages((send,), (recv,)))
    assert not office.sends
    with pytest.raises(OperationTimeoutError):
        traffic.wait((recv.number,))
    assert set(office.sends) == {(0, 1, 1, 0)}


def test_who_waits_for_a_send_has_posted_what_it_may_receive() -> None:
    office = PostOffice(3)
    send, awaited, expected = message(0, 1), message(1, 2), message(2, 2, 1)
    traffic = passing(office, (send, awaited, expected), (1, 2))
    traffic.start(Messages((send,), (awaited,)))
    traffic.expect((expected,))
    assert not office.recvs
    with pytest.raises(OperationTimeoutError):
        traffic.wait((send.number,))
    assert set(office.recvs) == {(2, 0, 1, 0), (2, 0, 1, 1)}


def test_what_a_member_has_sent_before_is_received_before() -> None:
    """Otherwise it would be kept until it is asked for, and count against the credit."""
    office = PostOffice(3)
    first, second, third = message(0, 2), message(1, 2, 1), message(2, 2, 2)
    traffic = passing(office, (first, second, third), (0, 1, 2))
    traffic.start(Messages((), (first, second, third)))
    peer = office.endpoints[2]
    for step in range(3):
        peer.send(0, 1, step, 1, memoryview(bytes([step] * 4)))
    traffic.wait((second.number,))
    assert set(office.sends) == {(2, 0, 1, 2)}
    traffic.settle()
    assert not office.sends


@pytest.fixture(params=["one by one", "as a journey"])
def without_scripts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python send and receive: in stages, or step by step as where scripts have stopped."""
    if request.param == "one by one":
        monkeypatch.setattr(ShortWays, "rails", lambda self, fingerprint: None)
    else:
        monkeypatch.setattr(Rails, "open", lambda self, seq, early: False)


def sums(pg: ProcessGroup) -> None:
    for turn, numel in enumerate((1_500_001, 300_000)):
        check_sum(pg, numel, turn)


@pytest.mark.usefixtures("without_scripts")
def test_sums_end_where_all_messages_are_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no rank had any credit left: nothing is sent before a rank waits."""

    def refuse(self: SocketSend, address: int, seq: int = 0) -> bool:
        self.held_up = True
        return False

    monkeypatch.setattr(SocketSend, "send", refuse)
    monkeypatch.setattr(SocketReceive, "wait", lambda self, address, deadline_ns, seq=0: False)
    run_ranks(5, sums, UNEVEN)


@pytest.mark.usefixtures("without_scripts")
def test_sums_end_where_all_messages_need_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if received but unwanted messages had used up the credit: later ones are announced."""
    monkeypatch.setattr(dispatch, "_may_be_prompt", lambda account, sending: False)

    def leave_to_others(self: SocketSend, address: int, seq: int = 0) -> bool:
        return False

    monkeypatch.setattr(SocketSend, "send", leave_to_others)
    run_ranks(5, sums, UNEVEN)


@pytest.mark.parametrize("tenant", [UNEVEN, FOUR], ids=str)
def test_scripts_send_to_several_hosts(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    opening = Rails.open

    def noting(self: Rails, seq: int, early: Mapping[int, int]) -> bool:
        opened.append(opening(self, seq, early) and len(self._tracks) > 1)
        return opened[-1] or self.is_open

    monkeypatch.setattr(Rails, "open", noting)
    run_ranks(len(tenant.layout), sums, tenant)
    assert any(opened)
