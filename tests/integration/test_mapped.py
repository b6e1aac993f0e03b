"""Collectives that read tensors of other processes in place, if all are mapped; through slots otherwise."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import example, reduced
from support.processes import DIED, caught, run_processes
from support.time_limits import in_time
from torch.distributed import ReduceOp

import dist2
from dist2 import MismatchError, OperationTimeoutError, PeerLostError, ProcessGroup
from dist2.backends.socket.tuning import DEFAULT_THRESHOLDS, Tuning
from dist2.operation.kinds import Reduction

SUM = Reduction.of(ReduceOp.SUM)
NUMEL = 200_003  # several blocks of a slot, and no multiple of anything
ALGORITHM = {"algorithm": "mapped"}

Allocate = Callable[[int, torch.dtype], torch.Tensor]


def shared(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return dist2.shared_empty(numel, dtype=dtype)


def ordinary(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def offset(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return dist2.shared_empty(numel + 7, dtype=dtype)[3 : 3 + numel]


HOW = {"shared": (shared,), "ordinary": (ordinary,), "mixed": (ordinary, offset, shared)}


def check_everything(pg: ProcessGroup, how: str) -> None:
    """Run each operation on this rank's kind of memory."""
    kinds = HOW[how]
    allocate = kinds[pg.rank() % len(kinds)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        check_reductions(pg, allocate, dtype)
        check_moves(pg, allocate, dtype)


def filled(allocate: Allocate, values: torch.Tensor) -> torch.Tensor:
    return allocate(values.numel(), values.dtype).copy_(values)


def check_reductions(pg: ProcessGroup, allocate: Allocate, dtype: torch.dtype) -> None:
    me, size = pg.rank(), pg.size()
    everyone = [example((NUMEL * size,), dtype, rank) for rank in range(size)]
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, dist2.premul_sum(2.0)):
        mine = filled(allocate, everyone[me])
        pg.all_reduce(mine, op)
        assert torch.equal(mine, reduced(everyone, Reduction.of(op)))
        mine = filled(allocate, everyone[me])
        root = size - 1
        pg.reduce(mine, root, op)
        assert torch.equal(mine, reduced(everyone, Reduction.of(op)) if me == root else everyone[me])
    output = allocate(NUMEL, dtype)
    pg.reduce_scatter_single(output, filled(allocate, everyone[me]))
    parts = [each[me * NUMEL : (me + 1) * NUMEL] for each in everyone]
    assert torch.equal(output, reduced(parts, SUM))
    whole = filled(allocate, everyone[me])
    own = whole[me * NUMEL : (me + 1) * NUMEL]
    pg.reduce_scatter_single(own, whole)  # in place
    assert torch.equal(own, reduced(parts, SUM))


def check_moves(pg: ProcessGroup, allocate: Allocate, dtype: torch.dtype) -> None:
    me, size = pg.rank(), pg.size()
    everyone = [example((NUMEL,), dtype, rank) for rank in range(size)]
    mine, root = filled(allocate, everyone[me]), size - 1
    whole = allocate(NUMEL * size, dtype)
    pg.all_gather_single(whole, mine)
    assert torch.equal(whole, torch.cat(everyone))
    outputs = [allocate(NUMEL, dtype) for _ in everyone]
    pg.all_gather(outputs, mine)
    assert all(map(torch.equal, outputs, everyone))
    for each in outputs:
        each.zero_()
    pg.gather(outputs if me == root else None, mine, root)
    assert me != root or all(map(torch.equal, outputs, everyone))
    inputs = [filled(allocate, each) for each in everyone] if me == root else None
    output = allocate(NUMEL, dtype)
    pg.scatter(output, inputs, root)
    assert torch.equal(output, everyone[me])
    pg.broadcast(mine, root)
    assert torch.equal(mine, everyone[root])
    check_exchanges(pg, allocate, dtype)


def check_exchanges(pg: ProcessGroup, allocate: Allocate, dtype: torch.dtype) -> None:
    me, size = pg.rank(), pg.size()
    for lengths in ([NUMEL] * size, [NUMEL + 11 * rank for rank in range(size)], [0] * size):
        # Rank r sends lengths[r] elements to each.
        sent = [example((lengths[rank] * size,), dtype, rank) for rank in range(size)]
        expected = [each[me * length : (me + 1) * length] for each, length in zip(sent, lengths, strict=True)]
        output = allocate(sum(lengths), dtype)
        source = filled(allocate, sent[me])
        pg.all_to_all_single(output, source, lengths, [lengths[me]] * size)
        assert torch.equal(output, torch.cat(expected))
        outputs = [allocate(length, dtype) for length in lengths]
        pg.all_to_all(outputs, list(source.view(size, lengths[me])))
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize(
    "how", [each if each == "mixed" else pytest.param(each, marks=pytest.mark.exhaustive) for each in HOW]
)
def test_the_results_are_those_of_the_oracle(how: str, tmp_path: Path) -> None:
    run_processes(3, check_everything, tmp_path, how, **ALGORITHM)


def check_folds(pg: ProcessGroup) -> None:
    check_reductions(pg, shared, torch.float32)


def test_several_threads_of_torch_fold_in_place_of_the_core(tmp_path: Path) -> None:
    run_processes(3, check_folds, tmp_path, threads=2, **ALGORITHM)


def exchange_of_long_and_short(pg: ProcessGroup) -> None:
    """Some ranks have mapped inputs, others not: alternating, and between operations on slots."""
    me, size = pg.rank(), pg.size()
    for turn in range(6):
        lengths = [2_000_000 if (rank + turn) % size == 0 else rank for rank in range(size)]
        lengths = [2_000_000] * size if turn == 3 else lengths
        allocate = shared if turn == 3 or lengths[me] > size else ordinary
        inputs = [
            filled(allocate, torch.full((lengths[me],), float(100 * me + to + turn))) for to in range(size)
        ]
        outputs = [torch.full((length,), -1.0) for length in lengths]
        pg.all_to_all(outputs, inputs)
        for peer, output in enumerate(outputs):
            assert output.eq(100 * peer + me + turn).all()
        total = torch.full((5,), float(me + turn))
        pg.all_reduce(total)
        assert total.eq(sum(rank + turn for rank in range(size))).all()


def test_ranks_that_exchange_much_and_little_go_the_same_way(tmp_path: Path) -> None:
    run_processes(3, exchange_of_long_and_short, tmp_path)


def exchange_of_any_lengths(pg: ProcessGroup) -> None:
    """Each rank sends few bytes, or those of one block, or of several; ranks differ in how many blocks they
    have."""
    torch.set_num_threads(1)  # or torch takes most of the time
    me, size = pg.rank(), pg.size()
    sizes = (3, 2_000, 100_001)
    for turn, lengths in enumerate(itertools.product(sizes, repeat=size)):
        for allocate in (ordinary, shared, shared if me else ordinary):
            # Lengths of the parts for each rank, which lie in one tensor.
            source = filled(allocate, torch.arange(float(lengths[me] * size)).add_(me + turn))
            outputs = [allocate(length, torch.float32) for length in lengths]
            for _ in range(3):
                pg.all_to_all(outputs, list(source.view(size, lengths[me])))
                for peer, output in enumerate(outputs):
                    start = float(me * lengths[peer] + peer + turn)
                    assert torch.equal(output, torch.arange(start, start + lengths[peer]))
                    output.zero_()


def test_ranks_that_exchange_any_lengths_go_the_same_way(tmp_path: Path) -> None:
    tuning = tmp_path / "tuning.json"
    Tuning(DEFAULT_THRESHOLDS.changed({"all_to_all_mapped_bytes": (10_000,) * 4})).write(tuning)
    run_processes(3, exchange_of_any_lengths, tmp_path, tuning=str(tuning))


def calls_on_other_tensors(pg: ProcessGroup) -> None:
    """The addresses of one call must not serve another."""
    me, size = pg.rank(), pg.size()
    pool = [shared(NUMEL, torch.float32) for _ in range(5)]
    for turn in range(100):
        mine = pool[(turn * (me + 1)) % len(pool)].fill_(me + turn)
        pg.all_reduce(mine)
        assert mine.eq(sum(rank + turn for rank in range(size))).all()


def test_calls_on_ever_other_tensors(tmp_path: Path) -> None:
    run_processes(2, calls_on_other_tensors, tmp_path, **ALGORITHM)


def fences_of_calls(pg: ProcessGroup) -> list[int]:
    """Return the fences of calls on shared tensors, on ordinary ones, and on both, in turn."""
    backend: Any = pg.backend
    board, found = backend.board, []
    for turn in range(6):
        allocate = (shared, ordinary, shared if pg.rank() else ordinary)[turn % 3]
        mine = filled(allocate, torch.arange(float(NUMEL)) + pg.rank())
        before = board.phase
        pg.all_reduce(mine)
        assert torch.equal(mine, pg.size() * torch.arange(float(NUMEL)) + sum(range(pg.size())))
        found.append(board.phase - before)
    return found


def test_what_is_not_mapped_everywhere_goes_through_slots(tmp_path: Path) -> None:
    """One fence tells whether all tensors are mapped; then it takes two more, or all those of the slots."""
    by_slots = tmp_path / "slots"
    by_slots.mkdir()
    (alone, *_), _ = run_processes(2, fences_of_calls, by_slots, algorithm="two_shot")
    for found in run_processes(2, fences_of_calls, tmp_path, **ALGORITHM):
        assert found == [3, 1 + alone, 1 + alone] * 2


def long_tensors_by_default(pg: ProcessGroup) -> None:
    """Without a forced algorithm: from just under the threshold on, for either choice."""
    numel_at = DEFAULT_THRESHOLDS.all_reduce_mapped_bytes[0] // 4
    for numel in (numel_at - 1, numel_at, 3_000_000):
        for is_shared in (True, pg.rank() == 1):
            mine = dist2.shared_empty(numel) if is_shared else torch.empty(numel)
            for _ in range(3):
                mine.fill_(1.0 + pg.rank())
                work = pg.all_reduce(mine, async_op=pg.rank() == 1)
                work.wait()
                assert mine.eq(3.0).all()


def test_the_default_choice_agrees_on_all_ranks(tmp_path: Path) -> None:
    run_processes(2, long_tensors_by_default, tmp_path)


def die_beside_mapped_tensors(pg: ProcessGroup) -> tuple[int, ...]:
    mine = shared(NUMEL, torch.float32).fill_(1)
    pg.all_reduce(mine)
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, took_s = caught(PeerLostError, lambda: pg.all_reduce(mine))
    in_time(took_s, 5.0)
    return error.ranks


def test_a_death_names_the_dead(tmp_path: Path) -> None:
    found = run_processes(3, die_beside_mapped_tensors, tmp_path, **ALGORITHM)
    assert found == [(1,), DIED, (1,)]


def call_different_things(pg: ProcessGroup) -> str:
    op = ReduceOp.MAX if pg.rank() else ReduceOp.SUM
    error, _ = caught(MismatchError, lambda: pg.all_reduce(shared(NUMEL, torch.float32).fill_(1), op))
    return str(error)


def test_a_mismatch_is_named_before_memory_is_touched(tmp_path: Path) -> None:
    for text in run_processes(2, call_different_things, tmp_path, **ALGORITHM):
        assert "op=sum" in text
        assert "op=max" in text


def test_a_timeout_names_who_did_not_come(tmp_path: Path) -> None:
    found = run_processes(2, timeout_only, tmp_path, **ALGORITHM)
    assert found[0] == [1]


def timeout_only(pg: ProcessGroup) -> list[int]:
    """Rank 1 never calls."""
    if pg.rank() == 1:
        return []
    error, _ = caught(OperationTimeoutError, lambda: pg.all_reduce(shared(NUMEL, torch.float32), timeout=0.2))
    return list(error.missing)
