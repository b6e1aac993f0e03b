"""`C10dApi`: names, settings and hooks of a group as torch's own code asks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Self, cast

import attrs
import torch

from dist2.c10d.backend import BackendView, ViewedGroup, view_of
from dist2.errors import InvalidUsageError, OperationTimeoutError
from dist2.operation.contract import GroupParts
from dist2.operation.cpp_work import whole
from dist2.operation.record import Operation
from dist2.operation.runner import Timeout
from dist2.operation.work import Work
from dist2.runtime import torch_versions
from dist2.runtime.cpp_ownership import Pins, held_by_cpp


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a call of torch 2.14 which the binding would take without an effect."""

    def refuse(self: C10dApi, *args: Any, **options: Any) -> NoReturn:
        raise InvalidUsageError(
            f"Backend {self.info.backend} does not support {name}: {reason}", group=self.info.name
        )

    refuse.__name__ = name
    refuse.__doc__ = (
        f"Refuse what torch 2.14 has under this name: {reason}.\n\nExamples:\n    >>> try:\n"
        f"    ...     pg.{name}(1)\n    ... except dist2.InvalidUsageError as error:\n"
        f"    ...     print('refused')\n    refused"
    )
    return refuse


class C10dApi(GroupParts):
    """Names, hooks and settings by the names that torch's Python and C++ call them."""

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Of one that is closed: `open_groups` holds the others. `ends` is a default, as names of modules may
        # be None when the interpreter ends.
        if ends():
            return
        _pinned.no_longer_held()
        if held_by_cpp(self):
            _pinned.pin(self)

    def getGroupName(self) -> str:  # noqa: N802 - called by torch's C++
        """Return `group_name`.

        Examples:
            >>> pg.getGroupName() == pg.group_name
            True
        """
        name: str = cast("Any", self).group_name
        return name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - called by torch's C++
        """Rename the group.

        Args:
            name: The new name.

        Examples:
            >>> half = pg.split([pg.rank()])
            >>> half.setGroupName(f"half {pg.rank()}")
            >>> half.group_name == f"half {pg.rank()}"
            True
        """
        self._set_group_name(name)

    def getGroupDesc(self) -> str:  # noqa: N802 - called by torch's C++
        """Return `group_desc`.

        Examples:
            >>> pg.getGroupDesc() == pg.group_desc
            True
        """
        return self.info.desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - called by torch's C++
        """Change `group_desc`.

        Args:
            desc: The new description.

        Examples:
            >>> pg.setGroupDesc("data parallel")
            >>> pg.group_desc
            'data parallel'
        """
        self._set_group_desc(desc)

    def getSize(self) -> int:  # noqa: N802 - called by torch's C++
        """Return how many ranks the group has, as `size`.

        Examples:
            >>> pg.getSize()
            2
        """
        return self.info.world_size

    def _set_group_name(self, name: str) -> None:
        """Rename the group; as in c10d, its caller registers the new name with torch's C++."""
        self._identify(attrs.evolve(self.info, name=name))

    def _set_group_desc(self, desc: str) -> None:
        self._identify(attrs.evolve(self.info, desc=desc))

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every group counts from 1."""

    def _get_sequence_number_for_group(self) -> int:
        return self._runner.queue.seq

    def _get_backend_name(self) -> str:
        """Return ``"gloo"`` where only CPU tensors are taken, otherwise the name of the backend.

        torch's Python code compares the result with ``"gloo"`` alone. Any other name puts sharded tensors on
        the current CUDA device; SyncBatchNorm gathers a list for ``"gloo"`` and one tensor otherwise.
        """
        return "gloo" if self._runner.backend.device_types == ("cpu",) else self.info.backend

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ has this name
        """Return the name of the backend, for torch's C++.

        Behind the name ``gloo`` torch's DDP expects a ``ProcessGroupGloo`` in the group: that backend has
        another name here.

        Examples:
            >>> pg.getBackendName()
            'socket'
        """
        return "dist2_gloo" if self.info.backend == "gloo" else self.info.backend

    def _has_hooks(self) -> bool:
        return bool(self._runner.state.hooks)

    def _enable_collectives_timing(self) -> None:
        """Times are always taken."""

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], None]) -> None:
        self._runner.register_completion_hook(lambda operation: hook(WorkInfo.of(operation)))

    def _wait_for_pending_works(self) -> None:
        if not self._runner.drain():
            raise OperationTimeoutError(
                f"operations of group {self.info.name!r} were still running after {self.timeout_s} s",
                group=self.info.name,
                timeout_s=self.timeout_s,
            )

    def _start_coalescing(self, device_type: torch.device | None = None) -> None:
        self._runner.open_batch()

    def _end_coalescing(self, device_type: torch.device | None = None) -> Work:
        batch = self._runner.close_batch()
        self._runner.issue(batch)
        work: Work = whole(self._runner.combined(batch, async_op=True))
        return work

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._runner.backend.device_types]

    def _get_backend(self, device: torch.device) -> BackendView:
        return view_of(cast("ViewedGroup", self), device)

    def get_backend(self, device: torch.device | str) -> BackendView:
        """Return the object that answers for the group's backend, as c10d describes backends (torch 2.14).

        Args:
            device: Of the tensors that it takes.

        Raises:
            InvalidUsageError: It takes no tensors of this device.

        Examples:
            >>> pg.get_backend("cpu").rank() == pg.rank()
            True
        """
        return view_of(cast("ViewedGroup", self), device)

    @property
    def supports_window(self) -> bool:
        """Whether there are one-sided operations: there are none.

        Examples:
            >>> pg.supports_window
            False
        """
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group changes its members in place, as torch 2.14 asks: `reconfigure` returns another.

        Examples:
            >>> pg.supports_reconfigure
            False
        """
        return False

    def get_reconfigure_handle(self) -> str:
        """Do `handle`, by its name in torch 2.14.

        Examples:
            >>> pg.get_reconfigure_handle() == pg.handle()
            True
        """
        handle: str = cast("Any", self).handle()
        return handle

    new_window = _refusing(
        "new_window",
        "no backend of dist2 has one-sided operations; of torch's, nccl2 does (torch 2.14, CUDA)",
    )
    register_post_hook = _refusing("register_post_hook", "call register_completion_hook")
    register_abort_hook = _refusing("register_abort_hook", "operations raise the error, and get_error has it")

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> Self | None:
        """Do `split`, with c10d's arguments.

        Args:
            ranks: Group ranks of the new group, in its order.
            timeout: Limit of the new group's operations; by default this group's.
            opts: Ignored.
            group_name: Name of the new group.
            group_desc: Its description.
            device_types: Ignored.

        Examples:
            >>> pg.split_group([0, 1], group_name="both").group_name
            'both'
        """
        made: Self | None = cast("Any", self).split(ranks, timeout=timeout, name=group_name, desc=group_desc)
        return made


_pinned: Pins[C10dApi] = Pins()
"""Closed groups to which only C++ has references: its calls must still find that they are closed."""


@attrs.frozen
class WorkInfo:
    """The argument of c10d's completion hooks.

    Attributes:
        op_type: An ``OpType`` of torch.
        seq: The operation's number in its group.
        time_started: When it began, by the clock of `time.monotonic`.
        time_finished: When it ended, by that clock.
        active_duration: The difference.
    """

    op_type: object
    seq: int
    time_started: timedelta
    time_finished: timedelta
    active_duration: timedelta

    @classmethod
    def of(cls, operation: Operation) -> WorkInfo:
        began = timedelta(microseconds=operation.started_ns / 1e3)
        ended = timedelta(microseconds=operation.finished_ns / 1e3)
        return cls(
            op_type=torch_versions.BINDING.OpType(Work(operation, ())._get_op_type()),
            seq=operation.seq,
            time_started=began,
            time_finished=ended,
            active_duration=ended - began,
        )
