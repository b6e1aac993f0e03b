"""Long data go through slots or pieces in blocks: any lengths and kinds of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import run_processes

import dist2
from dist2 import ProcessGroup
from dist2.backends.socket.tuning import CROWDS, DEFAULT_THRESHOLDS, Tuning

KIB = 1 << 10
LONG = 13 << 20
"""Bytes: many blocks, and more than stays in the caches."""


def numbered(numel: int, rank: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return values that no other rank has, and that differ at each position."""
    return (torch.arange(numel, dtype=torch.int64) * 7 + 1_000_003 * rank).to(dtype)


def slots_alone(folder: Path) -> Path:
    """Return a tuning by which all data go through slots, and roots fold by themselves."""
    never = (1 << 40,) * len(CROWDS)
    limits = DEFAULT_THRESHOLDS.mapped_from(1 << 40).changed({"one_shot_reduce_bytes": never})
    path = folder / "tuning.json"
    Tuning(limits).write(path)
    return path


def gather_all(pg: ProcessGroup) -> None:
    """Gather into one tensor: apart, in place and off any boundary, in ordinary memory and mapped."""
    me, size = pg.rank(), pg.size()
    numel = LONG // 4 // size + 1021  # the last block is a short one
    expected = torch.cat([numbered(numel, rank) for rank in range(size)])
    mapped = dist2.shared_empty(numel * size, dtype=torch.int32)
    for output in (torch.empty(numel * size, dtype=torch.int32), mapped, mapped if me else mapped.clone()):
        for _ in range(2):  # the halves of the slots have turns
            pg.all_gather_single(output.zero_(), numbered(numel, me))
            assert torch.equal(output, expected)
        own = output.zero_()[me * numel : (me + 1) * numel].copy_(numbered(numel, me))
        pg.all_gather_single(output, own)
        assert torch.equal(output, expected)
    odd = torch.zeros(numel * size + 3, dtype=torch.int32)[3:]
    pg.all_gather_single(odd, torch.cat([numbered(1, 9), numbered(numel, me)])[1:])
    assert torch.equal(odd, expected)


def gather_lists(pg: ProcessGroup) -> None:
    """Gather into tensors: of one length, and of differing ones, of which one is short and one empty."""
    me, size = pg.rank(), pg.size()
    for numels in (
        [LONG // size] * size,
        [LONG, *[999 * rank for rank in range(1, size)]],
        [LONG, *[0] * (size - 1)],
    ):
        outputs = [torch.empty(numel, dtype=torch.uint8) for numel in numels]
        gather = pg.all_gather if len(set(numels)) == 1 else pg.all_gather_v
        gather(outputs, numbered(numels[me], me, torch.uint8))
        for rank, output in enumerate(outputs):
            assert torch.equal(output, numbered(numels[rank], rank, torch.uint8))


def exchange(pg: ProcessGroup) -> None:
    """Exchange parts of many blocks and empty ones: ranks differ in how many blocks they have."""
    me, size = pg.rank(), pg.size()
    lengths = [1021, 4 * 256 * KIB + 77, 0, 3 * 256 * KIB]

    def sent(rank: int) -> list[int]:
        return [lengths[(rank + peer) % len(lengths)] for peer in range(size)]

    def given(rank: int) -> tuple[torch.Tensor, ...]:
        return numbered(sum(sent(rank)), rank).split(sent(rank))

    received = [sent(rank)[me] for rank in range(size)]
    output = torch.empty(sum(received), dtype=torch.int32)
    for _ in range(2):
        pg.all_to_all_single(output.zero_(), torch.cat(given(me)), received, sent(me))
        assert torch.equal(output, torch.cat([given(rank)[me] for rank in range(size)]))


def stream(pg: ProcessGroup) -> None:
    """Move and reduce data of many pieces, and short data, from and to each root."""
    me, size = pg.rank(), pg.size()
    numel = LONG // 4 + 1021
    part = numel // size
    for root in range(size):
        whole = numbered(numel, 10 + root)
        vector = whole.clone() if me == root else torch.zeros(numel, dtype=torch.int32)
        pg.broadcast(vector, root)
        assert torch.equal(vector, whole)
        pieces = list(whole[: size * part].view(size, part))
        mine = torch.zeros(part, dtype=torch.int32)
        pg.scatter(mine, pieces if me == root else None, root)
        assert torch.equal(mine, pieces[me])
        parts = list(torch.zeros(size, part, dtype=torch.int32)) if me == root else None
        pg.gather(parts, numbered(part, me), root)
        assert parts is None or all(
            torch.equal(each, numbered(part, rank)) for rank, each in enumerate(parts)
        )
        total = numbered(numel, me)
        pg.reduce(total, root)
        assert me != root or torch.equal(total, sum(numbered(numel, rank) for rank in range(size)))


def broadcast_any_memory(pg: ProcessGroup) -> None:
    """Broadcast ordinary memory, mapped memory, and memory mapped on some ranks only; twice on each."""
    me, size, numel = pg.rank(), pg.size(), LONG // 4 + 1021
    ordinary, mapped = torch.empty(numel, dtype=torch.int32), dist2.shared_empty(numel, dtype=torch.int32)
    for tensor in (ordinary, mapped, mapped if me else ordinary):
        for turn in range(2):
            root = turn % size
            tensor.copy_(numbered(numel, turn) if me == root else torch.zeros_like(tensor))
            pg.broadcast(tensor, root)
            assert torch.equal(tensor, numbered(numel, turn))


each_way = pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
"""Two ranks are a simple case of three."""


@each_way
def test_long_operations_with_a_root_through_pieces(tmp_path: Path, world_size: int) -> None:
    run_processes(world_size, stream, tmp_path, tuning=str(slots_alone(tmp_path)))


def test_long_broadcasts_go_through_pieces_unless_they_are_mapped(tmp_path: Path) -> None:
    run_processes(3, broadcast_any_memory, tmp_path)


@each_way
def test_long_gathers(tmp_path: Path, world_size: int) -> None:
    for name, body in (("single", gather_all), ("lists", gather_lists)):
        (tmp_path / name).mkdir()
        run_processes(world_size, body, tmp_path / name)


@each_way
def test_long_exchanges_through_slots(tmp_path: Path, world_size: int) -> None:
    run_processes(world_size, exchange, tmp_path, algorithm="flat")
