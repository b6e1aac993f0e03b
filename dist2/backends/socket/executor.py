"""Runs message schedules on an endpoint.

executor = MessageExecutor(endpoint)
plan = executor.bind(schedule, dtype, reduction, input_numels, output_numels)    # once a signature
executor.run(plan, operation, inputs, outputs)                                   # every call
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.backends.socket.algorithms.schedule import Schedule
from dist2.backends.socket.transport.base import Endpoint
from dist2.operation import Operation
from dist2.ops import Reduction


class Plan:
    """A schedule with everything computed that does not depend on the tensors' addresses."""


class MessageExecutor:
    """Runs schedules of `Exchange`, `Copy` and `Fold` steps for one member of a group."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def bind(
        self,
        schedule: Schedule,
        dtype: torch.dtype,
        reduction: Reduction | None,
        input_numels: Sequence[int],
        output_numels: Sequence[int],
    ) -> Plan:
        """Plan a schedule for lists of tensors with these numbers of elements."""
        raise NotImplementedError

    def run(
        self,
        plan: Plan,
        operation: Operation,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Run a plan on contiguous tensors; `operation` gives seq, fingerprint and deadline."""
        raise NotImplementedError
