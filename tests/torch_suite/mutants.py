"""Wrong versions of dist2's functions: for each there is a test of torch's that must fail with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

import dist2.legacy

WRONG = "wrong"


@attrs.frozen
class Mutant:
    """A function that is wrong on rank 0.

    Attributes:
        function: Its name in `dist2.legacy`.
        test: A test of torch's that must fail.
        played: Name of the backend that the test believes to run on.
        output: Name of the argument that gets the wrong element; by default the first that has one.
        world_size: How many ranks the test needs.
    """

    function: str
    test: str
    played: str = "gloo"
    output: str = ""
    world_size: int = 2

    def wrong(self) -> Callable[..., Any]:
        """Return the wrong function: barriers do nothing, the others write one wrong element."""
        right = getattr(dist2.legacy, self.function)
        if "barrier" in self.function:
            return lambda *arguments, **options: None

        def run(*arguments: Any, **options: Any) -> Any:
            result = right(*arguments, **options)
            if dist2.legacy.get_rank() == 0:
                for work in result if isinstance(result, list) else [result]:
                    if isinstance(work, dist2.legacy.Work):
                        work.wait()
                given = inspect.signature(right).bind(*arguments, **options).arguments
                _spoil([given[self.output]] if self.output else list(given.values()))
            return result

        return run


def _spoil(values: Iterable[Any]) -> bool:
    """Change an element of the first tensor, or the first object of the first list; whether there was one."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            value.view(-1)[0] += 1
            return True
        if isinstance(value, dist2.legacy.P2POp):
            if value.op is dist2.legacy.irecv:
                return _spoil([value.tensor])
        elif isinstance(value, list) and value:
            if isinstance(value[0], (torch.Tensor, list, dist2.legacy.P2POp)):
                if _spoil(value):
                    return True
            else:
                value[0] = WRONG
                return True
    return False


MUTANTS = (
    Mutant("all_reduce", "test_all_reduce_sum"),
    Mutant("all_reduce", "test_all_reduce_full_group_max"),
    Mutant("all_reduce_coalesced", "test_all_reduce_coalesced_sum"),
    Mutant("broadcast", "test_broadcast"),
    Mutant("reduce", "test_reduce_sum"),
    Mutant("all_gather", "test_all_gather"),
    Mutant("all_gather_coalesced", "test_all_gather_coalesced_simple"),
    Mutant("gather", "test_gather", output="gather_list"),
    Mutant("scatter", "test_scatter"),
    Mutant("all_to_all", "test_all_to_all", "mpi"),
    Mutant("all_to_all_single", "test_all_to_all_single_equal_split", "mpi"),
    Mutant("recv", "test_send_recv"),
    Mutant("irecv", "test_irecv"),
    Mutant("batch_isend_irecv", "test_batch_isend_irecv_gloo"),
    Mutant("barrier", "test_barrier"),
    Mutant("monitored_barrier", "test_monitored_barrier_gloo"),
    Mutant("all_gather_object", "test_all_gather_object_default_pg"),
    Mutant("gather_object", "test_gather_object", output="object_gather_list", world_size=4),
    Mutant("scatter_object_list", "test_scatter_object_list"),
)
