"""Messages that two ranks send each other at once, received by all means: they must come in order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from dist2 import ProcessGroup


def cross(
    pg: ProcessGroup, seed: int, count: int, numels: Sequence[int], shares: tuple[float, float]
) -> None:
    """Have both ranks send the same random sequence of tags and sizes, and receive it by random means.

    Args:
        pg: A group of two.
        seed: Of the sequence.
        count: How many messages each sends.
        numels: Lengths to draw from, in elements.
        shares: Below the first of them a draw receives from the other rank, below the second from any, and
            beyond it asynchronously.
    """
    by_name, by_any = shares
    plan = random.Random(seed)
    own = random.Random(seed * 100 + pg.rank())
    other = 1 - pg.rank()
    messages = [(plan.randrange(3), plan.choice(numels)) for _ in range(count)]
    pending = []
    received: list[tuple[int, torch.Tensor]] = []
    for number, (tag, numel) in enumerate(messages):
        sent = pg.isend(torch.full((numel,), float(number)), other, tag)
        got = torch.empty(numel)
        received.append((number, got))
        by = own.random()
        if by < by_name:
            pg.recv(got, other, tag)
        elif by < by_any:
            assert pg.recv(got, None, tag).source_rank() == other
        else:
            pending.append(pg.irecv(got, other, tag))
        pending.append(sent)
        if number % 11 == 0:
            total = torch.ones(3)
            pg.all_reduce(total)
            assert total[0] == 2
    for work in pending:
        work.wait()
    for number, got in received:
        assert torch.equal(got, torch.full_like(got, float(number)))
