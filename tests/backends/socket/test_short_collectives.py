"""Collectives over sockets: whose messages have the short path, and that the others arrive as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket.traffic import Message, Ways
from dist2.backends.socket.transport.base import Endpoint
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.backends.socket.wire import EAGER_BYTES, PROMPT_BYTES

TCP = Tenant("tcp", "socket", {"transport": "tcp"})
Seen = list[tuple[int, int]]


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """How many of the messages of each prepared plan have a short path, and how many it has."""
    seen: Seen = []
    prepare: Callable[..., None] = Ways.__init__

    def noting(self: Ways, endpoint: Endpoint, messages: Sequence[Message], fingerprint: int) -> None:
        prepare(self, endpoint, messages, fingerprint)
        seen.append((len(self.sends) + len(self.recvs), len(messages)))

    monkeypatch.setattr(Ways, "__init__", noting)
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


@pytest.mark.parametrize("numel", [7, EAGER_BYTES, PROMPT_BYTES // 4])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_messages_up_to_a_length_have_a_short_path(world_size: int, numel: int, shares: Seen) -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(3):
            _round(pg, numel)

    run_ranks(world_size, body, TCP)
    assert shares
    assert all(short == messages for short, messages in shares)


def test_longer_ones_have_none(shares: Seen) -> None:
    run_ranks(2, lambda pg: _round(pg, 2 * PROMPT_BYTES), TCP)
    assert {short for short, messages in shares if messages and short < messages} == {0}


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
