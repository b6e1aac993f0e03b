"""Collectives that reach into the tensors of other processes: mapped, by the kernel, mixed, or not at all."""

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
from dist2.backends.socket.binding import Bindings
from dist2.backends.socket.single_copy import SingleCopyProgram
from dist2.backends.socket.transport import cross_memory
from dist2.backends.socket.transport.node import Node
from dist2.backends.socket.tuning import CROWDS, DEFAULT_THRESHOLDS, LENT, SWEPT, Tuning
from dist2.operation.kinds import Reduction

SUM = Reduction.of(ReduceOp.SUM)
NUMEL = 200_003  # several blocks of a fold, and no multiple of anything
ALGORITHM = {"algorithm": "single_copy"}

Allocate = Callable[[int, torch.dtype], torch.Tensor]


def shared(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return dist2.shared_empty(numel, dtype=dtype)


def ordinary(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def offset(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return dist2.shared_empty(numel + 7, dtype=dtype)[3 : 3 + numel]


HOW = {"shared": (shared,), "ordinary": (ordinary,), "mixed": (ordinary, offset, shared)}


def check_everything(pg: ProcessGroup, how: str) -> None:
    """Run each operation that lends on this rank's kind of memory."""
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
    check_reductions(pg, ordinary, torch.bfloat16)


def test_several_threads_of_torch_fold_in_place_of_the_part_in_c(tmp_path: Path) -> None:
    run_processes(3, check_folds, tmp_path, threads=2, **ALGORITHM)


def exchange_of_long_and_short(pg: ProcessGroup) -> None:
    """Some ranks would expose their inputs, others not: alternating, and between operations on slots."""
    me, size = pg.rank(), pg.size()
    for turn in range(6):
        lengths = [2_000_000 if (rank + turn) % size == 0 else rank for rank in range(size)]
        lengths = [2_000_000] * size if turn == 3 else lengths
        inputs = [torch.full((lengths[me],), float(100 * me + to + turn)) for to in range(size)]
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
    """Each rank sends few bytes, or as many as the kernel moves, or as many as use slots unless they are
    mapped."""
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
    rows = {"all_to_all_lent_bytes": (10_000,) * 4, "all_to_all_swept_bytes": (500_000,) * 4}
    Tuning(DEFAULT_THRESHOLDS.changed(rows | {"lending_bytes": 100_000})).write(tuning)
    run_processes(3, exchange_of_any_lengths, tmp_path, tuning=str(tuning))


def calls_to_and_fro(pg: ProcessGroup) -> None:
    """Calls on the same tensors alternate in direction; the contents change between them."""
    me, size, part = pg.rank(), pg.size(), 100_003
    mine, whole, root = torch.empty(part), torch.empty(size * part), size - 1
    sent, got = torch.empty(size * part), torch.empty(size * part)
    for turn in range(7):
        everyone = [example((size * part,), torch.float32, 10 * rank + turn) for rank in range(size)]
        parts = [each[me * part : (me + 1) * part] for each in everyone]
        pg.all_gather_single(whole, mine.copy_(parts[me]))
        assert torch.equal(
            whole, torch.cat([each[r * part : (r + 1) * part] for r, each in enumerate(everyone)])
        )
        pg.all_to_all_single(got, sent.copy_(everyone[me]))
        assert torch.equal(got, torch.cat(parts))
        pg.scatter(mine, list(sent.view(size, part)) if me == root else None, root)
        assert torch.equal(mine, parts[root])
        pg.gather(list(got.view(size, part)) if me == root else None, mine, root)
        assert me != root or torch.equal(got, everyone[root])
        pg.broadcast(sent, root)
        assert torch.equal(sent, everyone[root])


def test_calls_go_through_tensors_from_either_end(tmp_path: Path) -> None:
    run_processes(3, calls_to_and_fro, tmp_path, **ALGORITHM)


def calls_on_other_tensors(pg: ProcessGroup) -> None:
    """Bindings to the addresses of one call must not serve another."""
    me, size = pg.rank(), pg.size()
    pool = [torch.empty(NUMEL) for _ in range(80)]  # more than a program remembers
    for turn in range(240):
        mine = pool[(turn * (me + 1)) % len(pool)].fill_(me + turn)
        pg.all_reduce(mine)
        assert mine.eq(sum(rank + turn for rank in range(size))).all()


def test_calls_on_ever_other_tensors(tmp_path: Path) -> None:
    run_processes(2, calls_on_other_tensors, tmp_path, **ALGORITHM)


def bindings_of_new_tensors(pg: ProcessGroup) -> list[int]:
    """Call operations on tensors that no call had; return the number of bindings made in Python."""
    torch.set_num_threads(1)  # with more of them torch folds, by addresses
    me, size = pg.rank(), pg.size()
    worked_out, found = [0], []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            worked_out[0] += 1
            return original(*arguments)

        return count

    bind, find_out = Bindings._bind, SingleCopyProgram._find_out
    Bindings._bind = counting(bind)  # type: ignore[method-assign]  # in place of the method
    SingleCopyProgram._find_out = counting(find_out)  # type: ignore[method-assign]  # likewise
    kept: list[object] = []  # so that nothing lies where something else did
    try:
        for turn in range(24):
            before = worked_out[0]
            for call in range(4):  # each way of a call, after either parity of fences
                allocate = (ordinary, shared)[(turn // 4 if turn < 16 else turn + call) % 2]
                mine = filled(allocate, torch.arange(NUMEL * size, dtype=torch.int32) + 7 * me + turn)
                part, whole = mine[:NUMEL], allocate(NUMEL * size, torch.int32)
                everyone = [
                    torch.arange(NUMEL * size, dtype=torch.int32) + 7 * rank + turn for rank in range(size)
                ]
                kept += [mine, whole]
                pg.all_gather_single(whole, part)
                assert torch.equal(whole, torch.cat([each[:NUMEL] for each in everyone]))
                pg.all_to_all_single(whole, mine)
                slices = [each[me * NUMEL : (me + 1) * NUMEL] for each in everyone]
                assert torch.equal(whole, torch.cat(slices))
                outputs = [allocate(NUMEL, torch.int32) for _ in range(size)] if me == turn % size else None
                kept.append(outputs)
                pg.gather(outputs, part, turn % size)
                assert outputs is None or all(map(torch.equal, outputs, [each[:NUMEL] for each in everyone]))
                pg.all_reduce(mine)
                assert torch.equal(mine, sum(everyone))
                pg.broadcast(whole, turn % size)
                assert torch.equal(whole[:5], everyone[0][(turn % size) * NUMEL :][:5])
            found.append(worked_out[0] - before)
    finally:
        Bindings._bind = bind  # type: ignore[method-assign]  # as it was
        SingleCopyProgram._find_out = find_out  # type: ignore[method-assign]  # likewise
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_what_to_do_is_worked_out_once_for_tensors_anywhere(tmp_path: Path, world_size: int) -> None:
    for found in run_processes(world_size, bindings_of_new_tensors, tmp_path, **ALGORITHM):
        assert found[0]
        assert not any(found[-8:])


def count_calls(pg: ProcessGroup, cross: bool) -> tuple[int, int]:
    """Return how often slots were used instead, for shared and for ordinary tensors."""
    slots = 0
    original = SingleCopyProgram.__init__

    def counting(self: SingleCopyProgram, *arguments: object) -> None:
        original(self, *arguments)
        otherwise = self._otherwise

        def counted(*call: object) -> None:
            nonlocal slots
            slots += 1
            otherwise(*call)

        self._otherwise = counted

    SingleCopyProgram.__init__ = counting  # type: ignore[method-assign, assignment]  # same arguments
    backend: Any = pg.backend
    backend._programs._lending._wanted = cross
    found = []
    for allocate in (shared, ordinary):
        mine = allocate(NUMEL, torch.float32).fill_(pg.rank())
        pg.all_reduce(mine)
        assert mine.eq(sum(range(pg.size()))).all()
        found.append(slots)
    return found[0], found[1]


def test_what_cannot_be_reached_goes_through_slots(tmp_path: Path) -> None:
    node = Node()
    try:
        permitted = cross_memory.can_reach(node._shared._arena.locator)
    finally:
        node.close()
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    assert run_processes(2, count_calls, tmp_path / "without", False, **ALGORITHM) == [(0, 1)] * 2
    found = run_processes(2, count_calls, tmp_path / "with", True, **ALGORITHM)
    assert found == [(0, 0 if permitted else 1)] * 2


def long_tensors_by_default(pg: ProcessGroup) -> None:
    """Without a forced algorithm: from just under the threshold on, for either choice."""
    for numel in (260_000, 270_000, 3_000_000):
        mine = dist2.shared_empty(numel) if pg.rank() else torch.empty(numel)
        for _ in range(3):
            mine.fill_(1.0 + pg.rank())
            work = pg.all_reduce(mine, async_op=pg.rank() == 1)
            work.wait()
            assert mine.eq(3.0).all()


def test_the_default_choice_agrees_on_all_ranks(tmp_path: Path) -> None:
    run_processes(2, long_tensors_by_default, tmp_path)


def fences_of_short_tensors(pg: ProcessGroup) -> tuple[list[int], bool | None]:
    """Return the fences of calls that expose only mapped memory, and whether the kernel moves memory."""
    backend: Any = pg.backend
    board, found = backend.board, []
    for allocate in (ordinary, ordinary, shared):
        mine = allocate(NUMEL, torch.float32).fill_(1.0)
        before = board.phase
        pg.all_reduce(mine)
        assert mine.eq(pg.size()).all()
        found.append(board.phase - before)
    return found, pg.backend._programs._lending.by_kernel  # type: ignore[attr-defined]  # the socket backend's


def test_no_fence_is_spent_on_what_is_known(tmp_path: Path) -> None:
    """The first call finds out that the kernel moves memory; then tensors that are too short go through
    slots."""
    tuning = tmp_path / "tuning.json"
    never = dict.fromkeys((*LENT, *SWEPT, "one_shot_bytes"), (1 << 40,) * len(CROWDS))
    Tuning(DEFAULT_THRESHOLDS.changed(never | {"lending_bytes": 1})).write(tuning)
    for found, by_kernel in run_processes(2, fences_of_short_tensors, tmp_path, tuning=str(tuning)):
        assert found == ([2, 1, 1] if by_kernel else [2, 2, 2])


def calls_on_new_tensors_of_one(pg: ProcessGroup) -> tuple[list[int], bool | None]:
    """Memory is exposed in the first call, which tests whether the kernel moves it, by all ranks or by none.

    Returns:
        The fences of each gather, first of mapped tensors, then of others; whether the kernel moves memory.
    """
    backend: Any = pg.backend
    me, size, board = pg.rank(), pg.size(), backend.board
    found = []
    kept = [dist2.shared_empty(NUMEL) for _ in range(2)]
    for turn in range(12):
        mine = ordinary(NUMEL, torch.float32) if turn > 9 else kept[me == 0 and turn > 4]
        pg.all_reduce(mine.fill_(turn + me))
        assert mine.eq(sum(range(turn, turn + size))).all()
        whole, before = torch.zeros(size * NUMEL), board.phase
        pg.all_gather_single(whole, mine.fill_(turn + me))
        assert torch.equal(whole.view(size, NUMEL)[:, -1], torch.arange(float(turn), turn + size))
        assert torch.equal(whole.view(size, NUMEL)[:, 0], torch.arange(float(turn), turn + size))
        found.append(board.phase - before)
    return found, pg.backend._programs._lending.by_kernel  # type: ignore[attr-defined]  # the socket backend's


@pytest.mark.parametrize("swept", [1, 1 << 40], ids=["swept", "by the kernel never"])
def test_members_with_new_tensors_and_with_old_ones_do_the_same(tmp_path: Path, swept: int) -> None:
    """What goes through slots unless it is mapped: the longest gathers, what is too short for the kernel."""
    tuning = tmp_path / "tuning.json"
    rows = dict.fromkeys(LENT, (1 << 40,) * len(CROWDS)) | {"all_gather_swept_bytes": (swept,) * len(CROWDS)}
    Tuning(DEFAULT_THRESHOLDS.changed(rows | {"lending_bytes": 1})).write(tuning)
    found = run_processes(2, calls_on_new_tensors_of_one, tmp_path, tuning=str(tuning))
    for fences, by_kernel in found:
        asks = swept == 1 or not by_kernel
        assert fences == [2] * 10 + [3 if asks else 2] * 2  # through slots it takes two


def die_while_reached_into(pg: ProcessGroup) -> tuple[int, ...]:
    mine = torch.ones(NUMEL)
    pg.all_reduce(mine)
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, took_s = caught(PeerLostError, lambda: pg.all_reduce(mine))
    in_time(took_s, 5.0)
    return error.ranks


def test_a_death_names_the_dead(tmp_path: Path) -> None:
    found = run_processes(3, die_while_reached_into, tmp_path, **ALGORITHM)
    assert found == [(1,), DIED, (1,)]


def call_different_things(pg: ProcessGroup) -> str:
    op = ReduceOp.MAX if pg.rank() else ReduceOp.SUM
    error, _ = caught(MismatchError, lambda: pg.all_reduce(torch.ones(NUMEL), op))
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
    error, _ = caught(OperationTimeoutError, lambda: pg.all_reduce(torch.ones(NUMEL), timeout=0.2))
    return list(error.missing)
