"""`GroupParts`: the attributes that every part of a `ProcessGroup` may use.

The parts (collectives, messages, objects, subgroups, fault tolerance, torch's interface) are flat mixins:
each knows these attributes and nothing of the class that puts them together or of the other parts.
"""

from __future__ import annotations

from collections.abc import Callable

from dist2.operation.plan_cache import Arguments, Plan, Plans
from dist2.operation.runner import OperationRunner, Timeout
from dist2.operation.signature import GroupInfo
from dist2.operation.work import Work
from dist2.runtime.deadline import seconds

Run = Callable[[Plan, Arguments, Arguments, bool, Timeout], Work]


class GroupParts:
    """Attributes of a group that its parts use; `ProcessGroup.__init__` sets them.

    Attributes:
        info: Identity of the group.
    """

    info: GroupInfo

    # Set directly on the group as well as on its runner: an attribute less to look up in each call.
    _runner: OperationRunner
    _direct_runner: OperationRunner | None
    """The runner, unless calls have to go by `_run` and `_run_p2p`: to hooks, say."""
    _plans: Plans
    _run: Run
    _run_p2p: Run

    @property
    def timeout_s(self) -> float:
        """Timeout of operations that name none, in seconds."""
        return self._runner.timeout_s

    def _identify(self, info: GroupInfo) -> None:
        """Take another name or description."""
        raise NotImplementedError

    @property
    def _taken_types(self) -> tuple[str, ...]:
        """Device types that operations accept."""
        backend = self._runner.backend
        return (*backend.device_types, *backend.staged_types)

    def _limit_s(self, timeout: Timeout) -> float:
        """Return a timeout in seconds; None stands for the group's."""
        return self._runner.timeout_s if timeout is None else seconds(timeout)
