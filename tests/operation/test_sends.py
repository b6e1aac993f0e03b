"""Messages that are sent before they are recorded: the same records, and earlier arrival."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.ranks import Tenant, run_ranks
from support.torch_features import needs

from dist2 import GroupAbortedError, InvalidUsageError, ProcessGroup, add_instrument
from dist2.backends.socket.transport import shared_memory
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation, State
from dist2.operation.work import Work

SHM = Tenant("shm", "socket", {"transport": "shm"})
TRIALS = 20
A_WHILE_S = 0.5

pytestmark = [
    pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory"),
]


class Listener:
    """An instrument that passes the sends of rank 0 on."""

    def __init__(self, started: Callable[[Operation], None], finished: Callable[[Operation], None]) -> None:
        self._started = started
        self._finished = finished

    def group_opened(self, group: Any) -> None: ...

    def group_closed(self, group: Any) -> None: ...

    def operation_started(self, operation: Operation) -> None:
        if operation.signature.kind is OpKind.SEND and operation.signature.group.rank == 0:
            self._started(operation)

    def operation_finished(self, operation: Operation) -> None:
        if operation.signature.kind is OpKind.SEND and operation.signature.group.rank == 0:
            self._finished(operation)


@contextmanager
def listening(
    started: Callable[[Operation], None] = lambda operation: None,
    finished: Callable[[Operation], None] = lambda operation: None,
) -> Iterator[None]:
    remove = add_instrument(Listener(started, finished))
    try:
        yield
    finally:
        remove()


def warm_up(pg: ProcessGroup) -> None:
    """Have rings between both ranks, and plans of messages of four elements."""
    for number in range(4):
        expect(pg, number)


def expect(pg: ProcessGroup, number: int) -> None:
    """Send a tensor from rank 0 to rank 1."""
    tensor = torch.full((4,), float(number))
    if pg.rank() == 0:
        pg.send(tensor, 1)
    else:
        got = torch.zeros(4)
        pg.recv(got, 0)
        assert torch.equal(got, tensor)


@needs("exchange")
def test_a_message_is_out_before_instruments_are_told_of_it() -> None:
    got, told = [threading.Event() for _ in range(TRIALS)], list[bool]()

    def send(pg: ProcessGroup, number: int) -> None:
        tensor = torch.full((4,), float(number))
        pg.send(tensor, 1)  # the first in a while has the fabric look around before it goes
        with listening(lambda operation: told.append(got[number].wait(A_WHILE_S))):
            pg.send(tensor, 1)

    def body(pg: ProcessGroup) -> None:
        warm_up(pg)
        tensor, last = torch.zeros(4), torch.full((4,), -1.0)
        if pg.rank() == 0:
            for number in range(TRIALS):
                if True not in told:
                    send(pg, number)
            pg.send(last, 1)
            return
        pg.recv(tensor, 0)
        while not torch.equal(tensor, last):
            number = int(tensor[0])
            pg.recv(tensor, 0)
            got[number].set()
            pg.recv(tensor, 0)

    run_ranks(2, body, SHM)
    assert told[-1]


@pytest.mark.parametrize("name", ["send", "isend"])
def test_it_is_noted_as_every_other(name: str) -> None:
    events = list[tuple[str, State, int]]()

    def body(pg: ProcessGroup) -> None:
        warm_up(pg)
        pg.barrier()
        if pg.rank() == 1:
            expect(pg, 7)
            return
        tensor = torch.full((4,), 7.0)
        hooked = list[Operation]()
        unhook = pg.register_completion_hook(hooked.append)
        with listening(
            lambda operation: events.append(("started", operation.state, operation.seq)),
            lambda operation: events.append(("finished", operation.state, operation.seq)),
        ):
            work = getattr(pg, name)(tensor, 1)
            line = sys._getframe().f_lineno - 1
        unhook()
        operation = work.operation
        assert isinstance(work, Work)
        assert list(work.outputs) == []
        assert work.wait() and work.is_success()
        assert hooked == [operation]
        assert operation.describe().endswith(f"#5 at {__file__}:{line}")
        assert operation.created_ns == operation.started_ns < operation.finished_ns
        assert operation.timeout_s == pg.timeout_s
        assert (operation.is_async, operation.error, operation.source) == (name == "isend", None, -1)
        assert pg.backend is not None and pg.p2p_seq == 5

    run_ranks(2, body, SHM)
    assert events == [("started", State.SCHEDULED, 5), ("finished", State.COMPLETED, 5)]


def test_a_tensor_is_looked_at_anew_at_each_call() -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch.zeros(4)
        for count in (4, 4, 2, 2, 4, 8, 4):
            tensor.resize_(count)
            for _ in range(3):
                if pg.rank() == 0:
                    tensor.copy_(torch.arange(count) + 1.0)
                    pg.send(tensor, 1)
                else:
                    tensor.zero_()
                    pg.recv(tensor, 0)
                    assert tensor.tolist() == [each + 1.0 for each in range(count)]
        other = torch.zeros(4)
        if pg.rank() == 0:
            other.copy_(torch.arange(4))
            tensor.set_(other.untyped_storage(), 0, (4,), (1,))
            pg.send(tensor, 1)
            pg.send(torch.arange(8.0)[::2].contiguous(), 1)
            pg.send(torch.arange(8.0)[::2], 1)  # not as it lies
        else:
            tensor.set_(other.untyped_storage(), 0, (4,), (1,))
            pg.recv(tensor, 0)
            assert other.tolist() == [0.0, 1.0, 2.0, 3.0]
            for _ in range(2):
                pg.recv(tensor, 0)
                assert tensor.tolist() == [0.0, 2.0, 4.0, 6.0]

    run_ranks(2, body, SHM)


def test_tags_peers_and_shapes_are_told_apart_however_many_there_are() -> None:
    shapes = [(4,), (2, 2), (1, 4), (1, 1, 1, 1, 4), (1, 1, 1, 1, 1, 1, 4)]

    def body(pg: ProcessGroup) -> None:
        for round_ in range(3):
            for tag in (0, 1, 2, 300, 70_000, 5, 6, 7, 8, 9, 10):
                for number, shape in enumerate(shapes):
                    sent = torch.full(shape, float(1000 * round_ + number))
                    right, left = (pg.rank() + 1) % pg.size(), (pg.rank() - 1) % pg.size()
                    got = torch.zeros(shape)
                    pg.send(sent, right, tag)
                    pg.recv(got, left, tag)
                    assert torch.equal(got, sent)

    run_ranks(3, body, SHM)


def test_calls_that_a_group_refuses_or_collects_are_not_sent_first() -> None:
    def body(pg: ProcessGroup) -> None:
        warm_up(pg)
        tensor = torch.full((4,), 7.0)
        pg.barrier()
        if pg.rank() == 0:
            with pytest.raises(InvalidUsageError, match="a test"), pg._runner.collecting():
                pg.send(tensor, 1)
                raise InvalidUsageError("a test")
            with pg._runner.collecting() as batch:
                work = pg.send(tensor + 1, 1)
                assert not work.is_completed()
            assert batch.works == [work]
            work.wait()
        else:
            pg.recv(tensor, 0)
            assert tensor.tolist() == [8.0] * 4
        pg.barrier()
        if pg.rank() == 0:
            pg.abort()
            with pytest.raises(GroupAbortedError):
                pg.send(tensor, 1)

    run_ranks(2, body, SHM)


def test_an_instrument_that_raises_is_dropped_and_one_that_is_interrupted_leaves_the_group() -> None:
    def fail(operation: Operation) -> None:
        raise ValueError("a test")

    def interrupt(operation: Operation) -> None:
        raise KeyboardInterrupt

    def body(pg: ProcessGroup) -> None:
        warm_up(pg)
        pg.barrier()
        if pg.rank() == 1:
            for number in range(4):
                expect(pg, number)
            return
        with listening(fail):
            expect(pg, 0)
            expect(pg, 1)
        with listening(finished=interrupt), pytest.raises(KeyboardInterrupt):
            expect(pg, 2)
        expect(pg, 3)
        assert pg._runner.queue.idle
        assert pg.p2p_seq == 8

    run_ranks(2, body, SHM)
