"""`BackendView`: the object that c10d's ``_get_backend(device)`` returns.

torch's own code asks a group for a device's backend, and asks the backend for its abilities. A dist2 group
has one backend, which torch cannot call; the view answers for it and hands operations to the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch

from dist2.errors import InvalidUsageError
from dist2.runtime import torch_versions

_c10d = torch_versions.BINDING

_OF_THE_GROUP = frozenset(
    {
        *("rank", "size", "name", "abort", "shutdown", "set_timeout", "monitored_barrier"),
        *("_get_backend_name", "getBackendName"),
        *("_set_sequence_number_for_group", "_get_sequence_number_for_group"),
        *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
        *("allgather", "allgather_coalesced", "_allgather_base", "reduce_scatter", "_reduce_scatter_base"),
        *("alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
        # Of torch 2.14
        *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
        *("reduce_scatter_single", "reduce_scatter_single_coalesced", "gather_single", "gather_into_tensor"),
        *("_register_on_completion_hook", "_enable_collectives_timing", "_wait_for_pending_works"),
        *("get_error", "new_window", "get_reconfigure_handle", "register_abort_hook"),
    }
)


class ViewedGroup(Protocol):
    """The attributes of a `ProcessGroup` that its view reads."""

    spec: Any
    backend: Any

    @property
    def timeout_s(self) -> float: ...
    @property
    def group_name(self) -> str: ...
    @property
    def global_ranks(self) -> tuple[int, ...]: ...
    def name(self) -> str: ...
    def abort(self) -> None: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def _start_coalescing(self, device_type: torch.device) -> None: ...
    def _end_coalescing(self, device_type: torch.device) -> Any: ...


class BackendView:
    """A group's backend as c10d describes backends.

    Attributes:
        supports_splitting: `ProcessGroup.split` works.
        supports_shrinking: ``torch.distributed.shrink_group`` needs a backend in C++ for the new group.
        supports_coalescing: Operations can be collected and started together.
        supports_time_estimate: How long an operation would take cannot be asked.
        supports_window: There are no one-sided operations.
        supports_reconfigure: `ProcessGroup.reconfigure` returns another group.
        Options: The type of `options`.
    """

    supports_splitting = True
    supports_shrinking = False
    supports_coalescing = True
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False
    supports_reconfigure = False
    Options = _c10d.Backend.Options

    def __init__(self, group: ViewedGroup) -> None:
        self._group = group

    @property  # type: ignore[misc]  # it is meant to be read only
    def __class__(self) -> type:
        """The class that ``isinstance`` sees: torch sets timeouts of its own backends only."""
        return getattr(_c10d, "ProcessGroupGloo", BackendView)

    def __repr__(self) -> str:
        return f"<BackendView of {self._group!r}>"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_GROUP:
            return getattr(self._group, name)
        raise AttributeError(f"a dist2 backend has no {name!r} (asked of {self._group!r})")

    @property
    def options(self) -> Any:
        """A copy of the settings, as c10d's ``Backend.Options``; ``_timeout`` is the group's."""
        options = _c10d.Backend.Options(self._group.name(), timedelta(seconds=self._group.timeout_s))
        if torch_versions.OPTIONS_NAME_THE_GROUP:
            options.group_name = self._group.group_name
            options.global_ranks_in_group = list(self._group.global_ranks)
        return options

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Do `ProcessGroup.set_timeout`: ``torch.distributed`` calls it by this name."""
        self._group.set_timeout(timeout)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether tensors should come from an allocator of the backend: any memory will do."""
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing to do: a group is connected when it is made."""

    def _start_coalescing(self) -> None:
        self._group._start_coalescing(self._group.spec.device)

    def _end_coalescing(self) -> Any:
        return self._group._end_coalescing(self._group.spec.device)


def view_of(group: ViewedGroup, device: torch.device | str) -> BackendView:
    """Return the backend that serves a device.

    Raises:
        InvalidUsageError: It takes no tensors of this device.
    """
    asked = torch.device(device).type
    if asked not in group.backend.device_types:
        raise InvalidUsageError(
            f"device is {asked!r}, but backend {group.name()!r} takes "
            f"{', '.join(group.backend.device_types)} (No backend type associated with device type {asked})"
        )
    return BackendView(group)
