"""Short collectives over sockets: which of them use the short path, and that the others arrive as well."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket.executor import MessageExecutor
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.backends.socket.wire import EAGER_BYTES

TCP = Tenant("tcp", "socket", {"transport": "tcp"})
Seen = list[str]


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The operations that went through the executor."""
    seen: Seen = []
    run: Callable[..., None] = MessageExecutor.run

    def noting(self: MessageExecutor, plan: object, operation: object, *rest: object) -> None:
        seen.append(operation.signature.kind.value)  # type: ignore[attr-defined]  # given as an object
        run(self, plan, operation, *rest)

    monkeypatch.setattr(MessageExecutor, "run", noting)
    return seen


def _round(pg: ProcessGroup, numel: int, dtype: torch.dtype = torch.float32) -> None:
    rank, size = pg.rank(), pg.size()
    summed = torch.full((numel,), rank + 1, dtype=dtype)
    pg.all_reduce(summed)
    assert torch.equal(summed, torch.full_like(summed, size * (size + 1) // 2))
    parts = [torch.empty(numel, dtype=dtype) for _ in range(size)]
    pg.all_gather(parts, torch.full((numel,), rank, dtype=dtype))
    assert [int(part[-1]) for part in parts] == list(range(size))
    sent = torch.arange(size * numel).to(dtype).view(size, numel) % 100 + rank
    got = torch.empty_like(sent)
    pg.all_to_all_single(got, sent)
    expected = [torch.arange(rank * numel, (rank + 1) * numel).to(dtype) % 100 + src for src in range(size)]
    assert torch.equal(got, torch.stack(expected))
    root = torch.full((numel,), rank, dtype=dtype)
    pg.broadcast(root, size - 1)
    assert torch.equal(root, torch.full_like(root, size - 1))
    pg.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_short_ones_need_no_executor(world_size: int, long_ways: Seen) -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(5):
            _round(pg, 7)

    run_ranks(world_size, body, TCP)
    assert not long_ways


def test_long_ones_do(long_ways: Seen) -> None:
    def body(pg: ProcessGroup) -> None:
        _round(pg, EAGER_BYTES)

    run_ranks(2, body, TCP)
    assert {"all_reduce", "all_gather", "all_to_all_single", "broadcast"} <= set(long_ways)


@pytest.mark.parametrize("seed", range(3))
def test_either_way_may_be_refused_at_any_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)

    def sometimes(method: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments: False if dice.random() < 0.4 else method(*arguments)

    monkeypatch.setattr(SocketSend, "send", sometimes(SocketSend.send))
    monkeypatch.setattr(SocketReceive, "wait", sometimes(SocketReceive.wait))

    def body(pg: ProcessGroup) -> None:
        for numel in (1, 900, 5000):
            for dtype in (torch.float32, torch.float16, torch.int64):
                _round(pg, numel, dtype)

    run_ranks(3, body, TCP)


def test_parts_of_a_coalesced_call_are_of_one_operation() -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(3):
            tensors = [torch.ones(3), torch.ones(2, dtype=torch.int32), torch.ones(4)]
            pg.all_reduce_coalesced(tensors)
            assert all(bool((tensor == 2).all()) for tensor in tensors)

    run_ranks(2, body, TCP)
