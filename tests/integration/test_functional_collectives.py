"""torch's functional collectives on a dist2 group, unmodified: each function, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from support.processes import Crew
from support.training import WORLD, compiling, mesh_of, quiet

from dist2 import ProcessGroup

funcol: Any = functional
Run = Callable[..., list[Any]]
Case = Callable[[int, Any], tuple[Any, Any]]
"""The result of a function for a rank and a group, and the expected result."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a callable that calls ``body(pg, *arguments)`` on two ranks, in processes that are kept."""
    crew = Crew(WORLD, tmp_path_factory.mktemp("crew"))
    yield functools.partial(crew.run, timeout=15.0)
    crew.close()


def mine(rank: int) -> torch.Tensor:
    return torch.full((4,), float(rank + 1))


GATHERED = torch.tensor([1.0] * 4 + [2.0] * 4)
SUMS = torch.full((4,), 3.0)
SWAPPED = {0: torch.full((4,), 2.0), 1: torch.full((4,), 1.0)}
MIXED = torch.tensor([1.0, 1.0, 2.0, 2.0])


def numbered(rank: int) -> torch.Tensor:
    return GATHERED + rank


def part(rank: int) -> torch.Tensor:
    """Return a rank's part of the sum of `numbered` tensors."""
    return torch.full((4,), 2.0 * (rank + 1) + 1)


def exchanged(rank: int, group: Any) -> tuple[Any, Any]:
    return funcol.permute_tensor(mine(rank), [1, 0], group), SWAPPED[rank]


CASES: dict[str, Case] = {
    "broadcast": lambda rank, group: (funcol.broadcast(mine(rank), 1, group), mine(1)),
    "all_reduce": lambda rank, group: (funcol.all_reduce(mine(rank), "sum", group), SUMS),
    "all_reduce, avg": lambda rank, group: (funcol.all_reduce(mine(rank), "avg", group), SUMS / 2),
    "all_gather_tensor": lambda rank, group: (funcol.all_gather_tensor(mine(rank), 0, group), GATHERED),
    "all_gather_tensor_autograd": lambda rank, group: (
        funcol.all_gather_tensor_autograd(mine(rank), 0, group),
        GATHERED,
    ),
    "reduce_scatter_tensor": lambda rank, group: (
        funcol.reduce_scatter_tensor(numbered(rank), "sum", 0, group),
        part(rank),
    ),
    "reduce_scatter_tensor_autograd": lambda rank, group: (
        funcol.reduce_scatter_tensor_autograd(numbered(rank), "sum", 0, group),
        part(rank),
    ),
    "all_reduce_coalesced": lambda rank, group: (
        funcol.all_reduce_coalesced([mine(rank), 2 * mine(rank)], "sum", group),
        [SUMS, 2 * SUMS],
    ),
    "all_gather_into_tensor_coalesced": lambda rank, group: (
        funcol.all_gather_into_tensor_coalesced([mine(rank), 2 * mine(rank)], group),
        [GATHERED, 2 * GATHERED],
    ),
    "reduce_scatter_tensor_coalesced": lambda rank, group: (
        funcol.reduce_scatter_tensor_coalesced([numbered(rank)] * 2, "sum", [0, 0], group),
        [part(rank)] * 2,
    ),
    "all_to_all_single": lambda rank, group: (
        funcol.all_to_all_single(mine(rank), [2, 2], [2, 2], group),
        MIXED,
    ),
    "all_to_all_single, even": lambda rank, group: (
        funcol.all_to_all_single(mine(rank), None, None, group),
        MIXED,
    ),
    "all_to_all_single_autograd": lambda rank, group: (
        funcol.all_to_all_single_autograd(mine(rank), [2, 2], [2, 2], group),
        MIXED,
    ),
    "permute_tensor": exchanged,
}
NEWER: dict[str, Case] = {
    "all_gather_single": lambda rank, group: (funcol.all_gather_single(mine(rank), 0, group), GATHERED),
    "all_gather_single_autograd": lambda rank, group: (
        funcol.all_gather_single_autograd(mine(rank), 0, group),
        GATHERED,
    ),
    "reduce_scatter_single": lambda rank, group: (
        funcol.reduce_scatter_single(numbered(rank), "sum", 0, group),
        part(rank),
    ),
    "reduce_scatter_single_autograd": lambda rank, group: (
        funcol.reduce_scatter_single_autograd(numbered(rank), "sum", 0, group),
        part(rank),
    ),
    "all_gather_single_coalesced": lambda rank, group: (
        funcol.all_gather_single_coalesced([mine(rank)], group),
        [GATHERED],
    ),
    "reduce_scatter_single_coalesced": lambda rank, group: (
        funcol.reduce_scatter_single_coalesced([numbered(rank)], "sum", [0], group),
        [part(rank)],
    ),
}
CASES |= {name: case for name, case in NEWER.items() if hasattr(funcol, name)}


def compare(answer: Any, expected: Any) -> None:
    if isinstance(expected, list):
        for one, other in zip(answer, expected, strict=True):
            compare(one, other)
    else:
        torch.testing.assert_close(funcol.wait_tensor(answer) + 0, expected)


def _eager(pg: ProcessGroup, name: str) -> None:
    case = CASES[name]
    rank = pg.rank()
    with quiet(pg):
        mesh = mesh_of(pg)
        groups: list[Any] = [pg, mesh, (mesh, 0), list(range(WORLD))]
        if name != "permute_tensor":  # it takes no name
            groups.append(pg.group_name)
        for group in groups:
            compare(*case(rank, group))
    if name != "permute_tensor":  # it asks torch's tables
        with quiet():
            compare(*case(rank, pg))
            compare(*case(rank, pg.group_name))


@pytest.mark.parametrize("name", CASES)
def test_a_functional_collective(run: Run, name: str) -> None:
    run(_eager, name)


def _compiled(pg: ProcessGroup, name: str) -> None:
    case = CASES[name]
    rank = pg.rank()
    with quiet(pg), compiling():
        group: Any = mesh_of(pg) if name == "permute_tensor" else pg.group_name
        expected = case(rank, group)[1]
        step = torch.compile(lambda: case(rank, group)[0], backend="aot_eager")
        for _ in range(2):
            compare(step(), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_functional_collective(run: Run, name: str) -> None:
    run(_compiled, name)


def _whole_graph(pg: ProcessGroup) -> None:
    with quiet(pg), compiling():
        step = torch.compile(
            lambda x: funcol.all_reduce(x, "sum", pg) + 1, backend="aot_eager", fullgraph=True
        )
        for _ in range(2):
            compare(step(mine(pg.rank())), SUMS + 1)
    torch._dynamo.reset()


def test_a_graph_without_breaks_takes_the_group_itself(run: Run) -> None:
    run(_whole_graph)


def _in_place(pg: ProcessGroup) -> None:
    rank = pg.rank()
    with quiet(pg):
        gathered = torch.zeros(2 * 4)
        funcol.all_gather_tensor_inplace(gathered, mine(rank), pg)
        compare(gathered, GATHERED)
        reduced = torch.zeros(4)
        funcol.reduce_scatter_tensor_inplace(reduced, numbered(rank), "sum", pg)
        compare(reduced, part(rank))
        total = mine(rank)
        funcol.all_reduce_inplace(total, "sum", pg)
        compare(total, SUMS)
        output = torch.zeros(4)
        funcol.all_to_all_inplace(output, mine(rank), None, None, pg)
        compare(output, MIXED)
        rows = [torch.zeros(4) for _ in range(WORLD)]
        funcol.all_gather_inplace(rows, mine(rank), pg)
        compare(torch.cat(rows), GATHERED)
        if hasattr(functional, "reduce_scatter_inplace"):  # since torch 2.14
            functional.reduce_scatter_inplace(reduced.zero_(), list(numbered(rank).chunk(WORLD)), "sum", pg)
            compare(reduced, part(rank))


def test_functional_collectives_in_place(run: Run) -> None:
    run(_in_place)


def _messages(pg: ProcessGroup) -> None:
    rank, other = pg.rank(), 1 - pg.rank()
    with quiet(pg):
        got = torch.zeros(4)
        if rank == 0:
            funcol.wait_tensor(funcol.isend_inplace(mine(rank), other, group=pg))
        else:
            compare(funcol.irecv_inplace(got, other, group=pg), mine(other))


@pytest.mark.skipif(not hasattr(functional, "isend_inplace"), reason="newer torch has it")
def test_functional_messages(run: Run) -> None:
    run(_messages)


def test_every_function_is_tried() -> None:
    """New functions must be entered above."""
    found = {
        name
        for name, each in vars(functional).items()
        if not name.startswith("_")
        and getattr(each, "__module__", "") == functional.__name__
        and {"group", "group_name"} & set(getattr(each, "__annotations__", {}))
    }
    tried = {name.partition(",")[0] for name in CASES}
    apart = {  # the last asks for a backend in C++, which groups in Python cannot have
        "all_gather_tensor_inplace",
        "reduce_scatter_inplace",
        "reduce_scatter_tensor_inplace",
        "all_reduce_inplace",
        "all_to_all_inplace",
        "all_gather_inplace",
        "isend_inplace",
        "irecv_inplace",
        "batch_p2p_ops_inplace",
    }
    assert found - tried - apart == set()
