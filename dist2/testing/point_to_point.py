"""Sends and receives, over every backend."""

from __future__ import annotations

import pytest
import torch

from dist2 import OperationTimeoutError, ProcessGroup
from dist2.testing.oracle import example
from dist2.testing.ranks import BackendCase

__all__ = [
    "test_a_batch_whose_messages_wait_for_each_other_in_a_circle",
    "test_a_receive_from_anybody_that_nothing_comes_for_names_nobody",
    "test_coalesced_batch",
    "test_messages_beside_collectives",
    "test_messages_to_oneself",
    "test_receive_from_any",
    "test_ring",
    "test_strided_and_many",
    "test_tags_keep_messages_apart",
]


SIZES = (0, 1, 1000, 100_000, 1_500_000)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring(tenant: BackendCase, world_size: int) -> None:
    def body(pg: ProcessGroup) -> None:
        right, left = (pg.rank() + 1) % world_size, (pg.rank() - 1) % world_size
        for numel in SIZES:
            mine = example((numel,), torch.float32, pg.rank())
            got = torch.empty(numel)
            sending = pg.isend(mine, right)
            work = pg.recv(got, left)
            sending.wait()
            assert torch.equal(got, example((numel,), torch.float32, left))
            assert work.source_rank() == left

    tenant.run(world_size, body)


def test_tags_keep_messages_apart(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        values = {tag: torch.full((4,), float(tag)) for tag in range(5)}
        if pg.rank() == 0:
            works = [pg.isend(value, 1, tag) for tag, value in values.items()]
            for work in works:
                work.wait()
        else:
            for tag in reversed(range(5)):
                got = torch.empty(4)
                pg.recv(got, 0, tag)
                assert torch.equal(got, values[tag])

    tenant.run(2, body)


def test_receive_from_any(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            sources = set()
            for _ in range(4):
                got = torch.empty(3)
                work = pg.recv(got, None, 7)
                assert torch.equal(got, torch.full((3,), float(work.source_rank())))
                sources.add(work.source_rank())
            assert sources == {1, 2}
        else:
            for _ in range(2):
                pg.send(torch.full((3,), float(pg.rank())), 0, 7)

    tenant.run(3, body)


def test_messages_to_oneself(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        for numel in (3, 200_000):
            mine, got = example((numel,), torch.float32, 1), torch.empty(numel)
            sending = pg.isend(mine, pg.rank())
            pg.recv(got, pg.rank())
            sending.wait()
            assert torch.equal(got, mine)

    tenant.run(2, body)


def test_messages_beside_collectives(tenant: BackendCase) -> None:
    """A message whose receive arrives late does not hold up collectives issued after it."""

    def body(pg: ProcessGroup) -> None:
        other = 1 - pg.rank()
        mine, got = example((500_000,), torch.float32, pg.rank()), torch.empty(500_000)
        sending = pg.isend(mine, other)
        for _ in range(3):
            total = torch.ones(5)
            pg.all_reduce(total)
            assert torch.equal(total, torch.full((5,), 2.0))
        pg.recv(got, other)
        sending.wait()
        assert torch.equal(got, example((500_000,), torch.float32, other))

    tenant.run(2, body)


def test_strided_and_many(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        whole = torch.arange(24.0).view(4, 6)
        if pg.rank() == 0:
            pg.send(whole[:, ::2], 1)
            for work in [pg.isend(torch.tensor([float(n)]), 1, 3) for n in range(200)]:
                work.wait()
        else:
            got = torch.zeros(3, 4).t()
            pg.recv(got, 0)
            assert torch.equal(got, whole[:, ::2])
            for n in range(200):
                one = torch.empty(1)
                pg.recv(one, 0, 3)
                assert one.item() == n

    tenant.run(2, body)


def test_a_receive_from_anybody_that_nothing_comes_for_names_nobody(tenant: BackendCase) -> None:
    if tenant.backend != "socket":
        pytest.skip("the words of dist2's own transports")

    def body(pg: ProcessGroup) -> None:
        with pytest.raises(OperationTimeoutError, match=r"peer=any.* nothing arrived in time") as caught:
            pg.recv(torch.empty(1), timeout=0.05)
        assert caught.value.missing == ()

    tenant.run(1, body)


def test_coalesced_batch(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        other = 1 - pg.rank()
        got = torch.empty(300_000)
        with pg.coalescing() as batch:
            pg.send(torch.full((300_000,), float(pg.rank())), other)
            pg.recv(got, other)
        batch.wait()
        assert torch.equal(got, torch.full((300_000,), float(other)))

    tenant.run(2, body)


def test_a_batch_whose_messages_wait_for_each_other_in_a_circle(tenant: BackendCase) -> None:
    """One after the other, each of these would wait for one that is behind it on another rank."""

    def body(pg: ProcessGroup) -> None:
        sent = [torch.full((200_000,), 10.0 * pg.rank() + peer) for peer in range(3)]
        got = [torch.empty(200_000) for _ in range(3)]
        with pg.coalescing() as batch:
            if pg.rank() == 0:
                pg.send(sent[2], 2)
                pg.send(sent[1], 1)
            elif pg.rank() == 1:
                pg.recv(got[0], 0)
                pg.send(sent[2], 2)
            else:
                pg.recv(got[1], 1)
                pg.recv(got[0], 0)
        batch.wait()
        for source, target in ((0, 1), (0, 2), (1, 2)):
            if pg.rank() == target:
                assert torch.equal(got[source], torch.full((200_000,), 10.0 * source + target))

    tenant.run(3, body)
