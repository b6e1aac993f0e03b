"""Messages that do not fit: both sides name the calls of that message. Also in random programs."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import Dist2Error, MismatchError, OperationTimeoutError, ProcessGroup

TENANTS = (
    Tenant("inproc", "socket", {"transport": "inproc"}),
    Tenant("tcp", "socket", {"transport": "tcp"}),
    Tenant("shm", "socket", {"transport": "shm"}),
    Tenant("2+1", "socket", layout=(0, 0, 1)),
)
RANKS = 3
LENGTHS = (1, 3, 10, 20_000, 400_000)
"""Short messages, and long ones: sent at once or announced."""


@attrs.frozen
class Message:
    """A message, and the tensor that its receiver has for it.

    Attributes:
        room: Length of that tensor.
        blocks: Its sender waits for it.
        from_any: Its receiver takes it from any rank.
    """

    src: int
    dst: int
    tag: int
    numel: int
    room: int
    dtype: torch.dtype
    blocks: bool
    from_any: bool


def program(plan: random.Random) -> tuple[list[Message], int]:
    """Return messages in order, and the index of the one that does not fit."""
    messages = []
    for at in range(plan.randrange(3, 12)):
        src = plan.randrange(RANKS)
        dst = plan.choice([rank for rank in range(RANKS) if rank != src])
        numel = plan.choice(LENGTHS)
        messages.append(Message(src, dst, at % 4, numel, numel, torch.float32, plan.random() < 0.3, False))
    bad = plan.randrange(len(messages))
    wrong = messages[bad]
    if plan.random() < 0.5:
        wrong = attrs.evolve(wrong, room=plan.choice([each for each in LENGTHS if each != wrong.numel]))
    else:
        wrong = attrs.evolve(wrong, dtype=torch.int32)
    if plan.random() < 0.2:
        wrong = attrs.evolve(wrong, from_any=True, tag=100)  # no other message could be taken in its place
    messages[bad] = wrong
    return messages, bad


def run(messages: list[Message], pg: ProcessGroup) -> Dist2Error | None:
    """Make this rank's calls; return its error."""
    me, works = pg.rank(), []
    try:
        for each in messages:
            if each.src == me:
                send = pg.send if each.blocks else pg.isend
                works.append(send(torch.ones(each.numel), each.dst, each.tag))
            if each.dst == me:
                room = torch.empty(each.room, dtype=each.dtype)
                pg.recv(room, None if each.from_any else each.src, each.tag)
        for work in works:
            work.wait()
        pg.barrier()
    except Dist2Error as error:
        return error
    return None


@pytest.mark.parametrize("tenant", TENANTS, ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_both_sides_name_the_calls_of_the_message_that_does_not_fit(tenant: Tenant, seed: int) -> None:
    messages, bad = program(random.Random(seed))
    wrong = messages[bad]
    all_have_ended = threading.Barrier(RANKS)

    def body(pg: ProcessGroup) -> Dist2Error | None:
        error = run(messages, pg)
        all_have_ended.wait(20)  # a rank that leaves could be noticed before the reports of others
        return error

    errors: list[Any] = run_ranks(RANKS, body, tenant)
    for rank in (wrong.src, wrong.dst):
        error = errors[rank]
        assert isinstance(error, MismatchError), (rank, errors, messages, bad)
        sent, received = error.calls[wrong.src], error.calls[wrong.dst]
        assert (sent.op, sent.peer, sent.tag, sent.shapes) == (
            "send",
            wrong.dst,
            wrong.tag,
            ((wrong.numel,),),
        )
        assert (received.op, received.tag, received.shapes) == ("recv", wrong.tag, ((wrong.room,),))
        assert received.peer == (None if wrong.from_any else wrong.src)
        assert error.expected == error.calls[rank].text
    other = errors[3 - wrong.src - wrong.dst]
    assert isinstance(other, MismatchError), errors
    assert other.calls[wrong.dst].op == "recv" and other.calls[wrong.src].op == "send"


def _timeout_of(call: Callable[[], object], both_have_ended: threading.Barrier) -> str:
    with pytest.raises(OperationTimeoutError) as raised:
        call()
    both_have_ended.wait(20)  # the other would see that this rank leaves
    return str(raised.value)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_two_ranks_that_both_send_first_see_the_send_of_the_other(transport: str) -> None:
    both_have_ended = threading.Barrier(2)

    def body(pg: ProcessGroup) -> str:
        send = partial(pg.send, torch.ones(1_000_000), 1 - pg.rank(), timeout=0.5)
        return _timeout_of(send, both_have_ended)

    texts = run_ranks(2, body, Tenant(transport, "socket", {"transport": transport}))
    for rank, text in enumerate(texts):
        assert re.search(rf"rank {1 - rank}: send\((float32\[1000000\], )?peer={rank}, tag=0\)", text), text
    assert any("has posted no recv; if each sends first, one must use isend" in text for text in texts)


def test_a_receive_with_another_tag_sees_the_message_that_came() -> None:
    both_have_ended = threading.Barrier(2)

    def body(pg: ProcessGroup) -> str:
        data = torch.ones(1_000_000)
        if pg.rank():
            return _timeout_of(partial(pg.recv, data, 0, tag=7, timeout=0.5), both_have_ended)
        return _timeout_of(partial(pg.send, data, 1, tag=5, timeout=2.0), both_have_ended)

    sent, received = run_ranks(2, body, TENANTS[1])
    assert "rank 0: send(float32[1000000], peer=1, tag=5)" in received
    assert "for which this rank has posted no recv" in received
    assert "rank 1: no operation that this rank knows of" in sent


@pytest.mark.parametrize("asks_first", [True, False])
@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_a_rank_that_waits_for_a_message_is_told_that_collectives_differ(
    tenant: Tenant, asks_first: bool
) -> None:
    """It has passed that collective; the rank whose message it waits for has not, and sends nothing."""
    has_passed, has_failed = threading.Event(), threading.Event()
    all_have_ended = threading.Barrier(RANKS)

    def body(pg: ProcessGroup) -> MismatchError:
        pg.barrier()  # the members of a host meet in the first collective
        with pytest.raises(MismatchError) as raised:
            if pg.rank() == 2:
                assert has_passed.wait(20)
                pg.all_reduce(torch.ones(3, dtype=torch.int16))
            pg.broadcast(torch.ones(6), 0)
            if pg.rank() == 1:
                has_passed.set()
                if not asks_first:
                    assert has_failed.wait(20)
                pg.recv(torch.ones(1), 0)
            assert has_passed.wait(20)
            pg.barrier()
        has_failed.set()
        all_have_ended.wait(20)  # a rank that leaves would be noticed
        return raised.value

    for error in run_ranks(RANKS, body, tenant):
        assert [error.calls[rank].op for rank in (0, 2)] == ["broadcast", "all_reduce"]
