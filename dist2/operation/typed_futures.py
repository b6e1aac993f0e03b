"""A torch future with a type that C++ can check: a list of tensors.

A future made in Python holds a Python object of any type. Most of torch's C++ looks inside;
``BuiltinCommHookType.FP16_COMPRESS`` of ``DistributedDataParallel`` asserts that it gets a list of tensors.
Only torch's own code makes typed futures, and code that TorchScript compiles: here, a task that waits for a
future made in Python and returns tensors. It runs in a thread of torch's pool and yields that while it waits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

Tensors = list[torch.Tensor]

_TASK = """
def deliver(done: Future[int], outputs: List[Tensor]) -> List[Tensor]:
    done.wait()
    return outputs

def start(done: Future[int], outputs: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(deliver, done, outputs)
"""


def typed(done: torch.futures.Future[Any], outputs: Sequence[torch.Tensor]) -> torch.futures.Future[Tensors]:
    """Return a future of some tensors that is done, or fails, when another one does."""
    future: torch.futures.Future[Tensors] = _task().start(done, list(outputs))
    return future


@cache
def _task() -> Any:
    return torch.jit.CompilationUnit(_TASK)


def needs_type(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether it may be that hook which calls the ``get_future`` that calls this.

    It does so from C++, of an operation with one output in half precision. Callbacks of the others run where
    they always do: one that waits for another typed future would keep a thread from completing that.

    Args:
        outputs: The tensors that the operation writes.
    """
    if len(outputs) != 1 or outputs[0].dtype != torch.float16:
        return False
    try:
        caller = sys._getframe(2)
    except ValueError:  # a thread of C++'s
        return True
    return "get_future" not in caller.f_code.co_names
