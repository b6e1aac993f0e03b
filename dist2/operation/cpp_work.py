"""`CppWork`: an operation as torch's C++ waits for it.

torch's C++ takes no Work without a half in C++, and making one takes longer than the rest of a short call.
So a call returns a `dist2.operation.work.Work`, which has none. One is made for calls in c10d's form, by
which C++ calls a group, and for those that ask a Work for what only torch's class has (`whole`). For Python
each of the two is also the other: ``isinstance`` says so.

A future of torch's that was made in Python holds a Python object of any type. Most of torch's C++ looks
inside; ``BuiltinCommHookType.FP16_COMPRESS`` of ``DistributedDataParallel`` asserts that it gets a list of
tensors. Only torch's own code makes typed futures, and code that TorchScript compiles: in `typed`, a task
that waits for a future made in Python and returns tensors. It runs in a thread of torch's pool and yields
that while it waits.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work as TorchWork

from dist2.runtime.cpp_ownership import Pins, held_by_cpp, layout_is_known
from dist2.runtime.signals import OnCtrlC, on_ctrl_c

if TYPE_CHECKING:
    from dist2.operation.work import Work


def _passed_on(name: str) -> Any:
    """Return a method that calls that of the Work: torch's class has one of this name."""

    def method(self: CppWork, *args: Any, **keywords: Any) -> Any:
        return getattr(self.work, name)(*args, **keywords)

    method.__name__ = name
    return method


@on_ctrl_c(OnCtrlC.DEFER)
class CppWork(TorchWork):
    """A Work with a half in C++.

    Attributes:
        work: Does what is asked.
    """

    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # `ends` is a default: when the interpreter ends, names of modules may be None by now.
        if ends() or not held_by_cpp(self):
            return
        if layout_is_known():
            _pinned.no_longer_held()
            _pinned.pin(self)
        else:
            _presumed_held.append(self)

    @property  # type: ignore[misc]  # the attribute can be set in other objects
    def __class__(self) -> type:
        return type(self.work)

    def __getattr__(self, name: str) -> Any:
        work = object.__getattribute__(self, "work")  # `self.work` would call this again where it is unset
        return object.__getattribute__(work, name)  # not what the Work would ask of a `CppWork`

    def __repr__(self) -> str:
        return repr(self.work)

    def __await__(self) -> Generator[Any, Any, list[torch.Tensor]]:
        return self.work.__await__()

    wait = _passed_on("wait")
    is_completed = _passed_on("is_completed")
    is_success = _passed_on("is_success")
    exception = _passed_on("exception")
    synchronize = _passed_on("synchronize")
    block_current_stream = _passed_on("block_current_stream")
    result = _passed_on("result")
    source_rank = _source_rank = _passed_on("source_rank")
    get_future_result = _passed_on("get_future_result")
    _get_duration = _passed_on("_get_duration")
    _get_op_type = _passed_on("_get_op_type")

    @property
    def timeout(self) -> timedelta:
        """The limit of the operation."""
        return self.work.timeout

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a torch future of the output tensors, which C++ can read."""
        future, outputs = self.work.get_future(), self.work.outputs
        return typed(future, outputs) if needs_type(outputs) else future


_pinned: Pins[CppWork] = Pins()
"""Works that C++ alone holds, as that of ``DistributedDataParallel.join`` is for a while."""

_presumed_held: deque[CppWork] = deque(maxlen=64)
"""Works that C++ may hold, where that is unknown; few, because they keep tensors longer than needed."""


def whole(work: Any) -> Any:
    """Return a Work that torch's C++ takes."""
    return work if type(work) is CppWork else CppWork(work)


# A future of torch with a type

_TASK = """
def deliver(done: Future[int], outputs: List[Tensor]) -> List[Tensor]:
    done.wait()
    return outputs

def start(done: Future[int], outputs: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(deliver, done, outputs)
"""


def typed(
    done: torch.futures.Future[Any], outputs: Sequence[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    """Return a future of some tensors that is done, or fails, when another one does."""
    future: torch.futures.Future[list[torch.Tensor]] = _task().start(done, list(outputs))
    return future


@cache
def _task() -> Any:
    return torch.jit.CompilationUnit(_TASK)


def needs_type(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether it may be that hook which calls the ``get_future`` that calls this.

    It does so from C++, of an operation with one output in half precision, in the host's memory. Callbacks of
    the others run where they always do: one that waits for another typed future would keep a thread from
    completing that.

    Args:
        outputs: The tensors that the operation writes.
    """
    if len(outputs) != 1 or outputs[0].dtype != torch.float16 or outputs[0].is_cuda:
        return False
    try:
        caller = sys._getframe(2)
    except ValueError:  # a thread of C++'s
        return True
    return "get_future" not in caller.f_code.co_names
