# cython: annotation_typing=False
"""`Arriving`: a message that an operation began, for a later wait."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.transfer import Transfer
from dist2.operation.execution import Helped
from dist2.operation.record import Operation
from dist2.runtime.built import check_built

check_built(__name__, __file__)


class Arriving(Helped):
    """Completes with a message; waiting for it makes progress.

    Args:
        endpoint: Where it was posted.
        operation: The operation that it belongs to.
        transfer: The message.
        tensor: Holds the message: kept alive until it is done.
        target: Where a received tensor is copied then, if not there already.
    """

    def __init__(
        self,
        endpoint: FabricEndpoint,
        operation: Operation,
        transfer: Transfer,
        tensor: torch.Tensor,
        target: torch.Tensor | None,
    ) -> None:
        self._endpoint = endpoint
        self._operation = operation
        self._transfer = transfer
        self._tensor = tensor
        self._target = target

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        self._callback = callback
        self._transfer.add_done_callback(self._done)

    def _done(self, transfer: Transfer) -> None:
        if transfer.error is None:
            note_arrival(self._operation, transfer, self._tensor, self._target)
        self._callback(self)

    def exception(self) -> BaseException | None:
        return self._transfer.error

    def help(self, deadline_ns: int) -> None:
        """Make progress until the message is done or the deadline passes."""
        self._endpoint.help(self._transfer, deadline_ns)


def note_arrival(
    operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
) -> None:
    """Set the source rank of an operation, and copy a received tensor to its target."""
    operation.source = transfer.source
    if target is not None:
        target.detach().copy_(tensor)  # it may be the first time outside of the caller's inference mode
