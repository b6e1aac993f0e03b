"""Tensors that are not contiguous: which of them are copied, and in which direction."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket import staging

INPROC = Tenant("inproc", "socket", {"transport": "inproc"})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each thread has read a tensor for a copy of it."""
    counted: Counter[int] = Counter()
    really = staging.plain

    def count(tensor: torch.Tensor) -> torch.Tensor:
        counted[threading.get_ident()] += 1
        return really(tensor)

    monkeypatch.setattr(staging, "plain", count)
    return counted


def columns(value: float, rows: int = 50) -> torch.Tensor:
    return torch.full((rows, 6), value)[:, ::2]


def test_a_broadcast_reads_at_the_root_and_writes_elsewhere(reads: Counter[int]) -> None:
    def body(pg: ProcessGroup) -> None:
        tensor, root = columns(float(pg.rank())), 1
        version = tensor._version
        pg.broadcast(tensor, root)
        assert bool((tensor == 1).all())
        is_root = pg.rank() == root
        assert not reads[threading.get_ident()], "only the root's is read, by `on_copies`"
        assert (tensor._version == version) == is_root, "nothing is written at the root"

    run_ranks(3, body, INPROC)


def test_a_tensor_that_is_read_and_written_is_read_once(reads: Counter[int]) -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = columns(float(pg.rank() + 1))
        pg.all_reduce(tensor)
        assert bool((tensor == 6).all())
        assert reads[threading.get_ident()] == 1

    run_ranks(3, body, INPROC)


def test_what_is_only_written_is_not_read(reads: Counter[int]) -> None:
    def body(pg: ProcessGroup) -> None:
        outputs = [columns(-1.0) for _ in range(3)]
        pg.all_gather(outputs, columns(float(pg.rank())))
        assert [bool((each == rank).all()) for rank, each in enumerate(outputs)] == [True] * 3
        assert reads[threading.get_ident()] == 1
        root = pg.rank() == 0
        given = [columns(float(rank)) for rank in range(3)] if root else None
        reads.pop(threading.get_ident())
        into = columns(-1.0)
        pg.scatter(into, given, 0)
        assert bool((into == pg.rank()).all())
        assert reads[threading.get_ident()] == (3 if root else 0)

    run_ranks(3, body, INPROC)


def test_lazily_negated_ones_are_what_they_say() -> None:
    def body(pg: ProcessGroup) -> None:
        tensor = torch._neg_view(columns(float(pg.rank())))
        assert tensor.is_neg()
        pg.broadcast(tensor, 2)
        assert bool((tensor == -2).all())
        outputs = [torch._neg_view(columns(-1.0)) for _ in range(3)]
        pg.all_gather(outputs, tensor)
        assert all(bool((each == -2).all()) for each in outputs)

    run_ranks(3, body, INPROC)
