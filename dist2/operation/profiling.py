"""Operations in the traces of `torch.profiler`: ``dist2:all_reduce`` beside the kernels of the model.

Theory of operation. While a profiler runs, a flag in the module `torch.autograd.profiler` is true, which
torch's own code in Python asks as well. The runner looks at it before each operation, which takes C some
nanoseconds, and only then has `ProfilerRanges` open a range in the thread that calls. A range ends by a
future: so it has the right length in the profile of one thread where another one completes the operation.

Readers of several traces, such as Holistic Trace Analysis, take the rank from the ``distributedInfo`` of a
trace, which torch writes for its own default group only. So a range also describes the job. (The event
``record_param_comms`` has arguments that only C++ can set; torch ends the process if they are missing.)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed
from torch.autograd import profiler
from torch.futures import Future

from dist2.runtime.signals import OnCtrlC, on_ctrl_c
from dist2.runtime.torch_versions import describe_trace

if TYPE_CHECKING:
    from dist2.operation.record import Operation
    from dist2.operation.signature import GroupInfo

NAMES: dict[str, Any] = vars(profiler)
"""Where the flag is. If a version of torch has none, its profiles show no operations."""

RUNS = "_is_profiler_enabled"

MAX_GROUPS = 64
"""Groups that a trace describes."""


def job_of(groups: Iterable[GroupInfo]) -> dict[str, Any]:
    """Return the ``distributedInfo`` of a trace: the fields of torch's own, of the groups given."""
    known = sorted(groups, key=lambda info: -info.world_size)
    return {
        "backend": known[0].backend,
        "rank": known[0].global_ranks[known[0].rank],
        "world_size": known[0].world_size,
        "pg_count": len(known),
        "pg_config": [
            {
                "pg_name": info.name,
                "pg_desc": info.desc or info.name,
                "backend_config": info.backend,
                "pg_size": info.world_size,
                "ranks": list(info.global_ranks),
            }
            for info in known
        ],
    }


@on_ctrl_c(OnCtrlC.DEFER)
class ProfilerRanges:
    """An instrument from the first range that it opens until none is open and no profiler runs.

    Args:
        add: Adds it to the instruments; returns what removes it.

    Attributes:
        failed: Whether it raised: it opens no more ranges.
    """

    def __init__(self, add: Callable[[ProfilerRanges], Callable[[], None]]) -> None:
        self.failed = False
        self._add = add
        self._remove: Callable[[], None] | None = None
        self._open: WeakKeyDictionary[Operation, Future[None]] = WeakKeyDictionary()
        self._lock = threading.RLock()
        self._groups: set[GroupInfo] = set()
        self._job = ""

    def open(self, operation: Operation) -> None:
        """Open a range in the calling thread, unless the operation has one since it was queued."""
        with self._lock:
            if self.failed or operation in self._open:
                return
            ended = self._open[operation] = Future()
            if self._remove is None:
                self._remove = self._add(self)
            self._describe(operation.signature.group)
        opened = profiler.record_function(f"dist2:{operation.signature.kind.value}")
        opened.__enter__()
        opened._call_end_callbacks_on_future(ended)

    def _describe(self, info: GroupInfo) -> None:
        """Describe the job in the trace, again for each range: another trace may have begun meanwhile."""
        if info not in self._groups and len(self._groups) < MAX_GROUPS:
            self._groups.add(info)
            self._job = json.dumps(job_of(self._groups))
        if not torch.distributed.is_initialized():  # else torch describes its default group
            describe_trace("distributedInfo", self._job)

    def operation_finished(self, operation: Operation) -> None:
        """Close the range of an operation."""
        with self._lock:
            ended = self._open.pop(operation, None)
            if self._remove is not None and not self._open and not NAMES.get(RUNS):
                self._remove()
                self._remove = None
                self._groups.clear()
        if ended is not None:
            ended.set_result(None)

    def operation_started(self, operation: Operation) -> None:
        """Take no notice: the range is open since the call."""

    def group_opened(self, group: Any) -> None:
        """Take no notice."""

    def group_closed(self, group: Any) -> None:
        """Take no notice."""
