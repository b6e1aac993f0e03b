"""Sizes of exchanges: notes that add up to zero, and exchanges in shared memory that fit or do not."""

from __future__ import annotations

import random

import pytest
import torch
from support.ranks import Tenant, run_ranks

import dist2
from dist2 import MismatchError, ProcessGroup
from dist2.backends.socket.sizes import BESIDE_NOTE, note_of, notes_agree

SHM = Tenant("shm", "socket", {"transport": "shm"})
Matrix = list[list[int]]
"""Elements by sender and receiver."""


def matrix(size: int, largest: int, choose: random.Random) -> Matrix:
    return [[choose.randrange(largest) for _ in range(size)] for _ in range(size)]


def notes(sent: Matrix, received: Matrix) -> list[int]:
    return [note_of(rank, sent[rank], received[rank]) for rank in range(len(sent))]


def columns(of: Matrix) -> Matrix:
    return [list(column) for column in zip(*of, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_notes_tell_whether_sizes_fit(size: int) -> None:
    choose = random.Random(size)
    for largest in (2, 5, 1 << 20, 1 << 40):
        for _ in range(20):
            sent = matrix(size, largest, choose)
            received = columns(sent)
            assert notes_agree(notes(sent, received))
            rank, peer = choose.randrange(size), choose.randrange(size)
            received[rank][peer] += choose.choice((-1, 1, 3))
            assert not notes_agree(notes(sent, received))


def test_notes_of_equal_sizes_are_equal_and_those_of_others_fit_them() -> None:
    even = [[7] * 3 for _ in range(3)]
    assert len(set(notes(even, even))) == 1
    assert all(note & BESIDE_NOTE == 0 for note in notes(even, even))
    sent = [[7, 7, 7], [7, 2, 7], [7, 7, 7]]  # only rank 1 sends itself another number
    assert notes_agree(notes(sent, columns(sent)))
    assert not notes_agree(notes(even, [[7] * 3, [7] * 3, [8] * 3]))
    assert not notes_agree([note_of(rank, [rank + 1] * 2, [rank + 1] * 2) for rank in range(2)])


@pytest.mark.parametrize("shared", [False, True], ids=["ordinary", "shared_empty"])
@pytest.mark.parametrize("largest", [2, 40, 20_000, 400_000])
@pytest.mark.parametrize("fits", [True, False], ids=["fits", "differs"])
def test_exchanges_in_shared_memory(fits: bool, largest: int, shared: bool) -> None:
    sent = matrix(3, largest, random.Random(largest))
    received = columns(sent)
    if not fits:
        received[2][0] += 1

    def body(pg: ProcessGroup) -> None:
        rank, make = pg.rank(), dist2.shared_empty if shared else torch.empty
        whole = make(sum(sent[rank]))
        whole.copy_(torch.cat([torch.full((n,), 10.0 * rank + peer) for peer, n in enumerate(sent[rank])]))
        result = make(sum(received[rank]))
        splits = {"input_splits": sent[rank], "output_splits": received[rank]}
        for _ in range(3):
            if not fits:
                words = (
                    rf"rank 0 sends {sent[0][2]} elements to rank 2, which receives {received[2][0]} from it"
                )
                with pytest.raises(MismatchError, match=words):
                    pg.all_to_all_single(result, whole, **splits)
                return
            pg.all_to_all_single(result, whole, **splits)
            parts = [torch.full((n,), 10.0 * peer + rank) for peer, n in enumerate(received[rank])]
            assert torch.equal(result, torch.cat(parts))

    run_ranks(3, body, SHM)


def test_each_rank_is_told_who_differs_from_it() -> None:
    """Rank 1 sends rank 2 more than that receives; rank 0 agrees with both."""

    def body(pg: ProcessGroup) -> set[int]:
        sizes = [2, 2, 3 if pg.rank() == 1 else 2]
        with pytest.raises(MismatchError) as caught:
            pg.all_to_all_single(
                torch.empty(6), torch.ones(sum(sizes)), output_splits=[2] * 3, input_splits=sizes
            )
        return set(caught.value.actual)

    assert run_ranks(3, body, SHM) == [{1, 2}, {2}, {1}]
