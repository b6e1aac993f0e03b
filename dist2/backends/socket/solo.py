"""Collectives of a group of one: nothing to send, only outputs to fill."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist2.backends.socket.reduction import prepare
from dist2.operation.record import Operation


def run_alone(operation: Operation, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Copy each input to its output: a reduction of one contribution is that contribution."""
    reduction = operation.signature.reduction
    for source, result in zip(inputs, outputs, strict=False):
        target = result.detach()
        contribution = source.detach()
        if reduction is not None:
            contribution = prepare(contribution, reduction)
        if contribution.data_ptr() != target.data_ptr():
            target.copy_(contribution.reshape(target.shape))
