# cython: annotation_typing=False
"""`StreamWork`: an operation on a stream of a device.

Waiting for it does not block: work that the caller enqueues later on the current stream runs after the
operation. Waiting with a limit blocks, as does waiting for an operation that is still queued in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch

from dist2.operation.execution import StreamOrdered
from dist2.operation.record import Operation
from dist2.operation.work import Work
from dist2.runtime.built import check_built
from dist2.runtime.completion import Completion

check_built(__name__, __file__)


class StreamWork(Work):
    """Like `Work`, for groups whose operations run on streams.

    Attributes:
        ordered: The operation on its stream, once it was started there.
    """

    ordered: StreamOrdered | None

    def __init__(
        self,
        operation: Operation,
        outputs: Sequence[torch.Tensor],
        pending: Future[None] | Completion | None = None,
    ) -> None:
        super().__init__(operation, outputs, pending)
        self.ordered = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Have the caller's current stream wait; with a ``timeout``, block until the operation is complete.

        Raises:
            OperationTimeoutError: The wait or the operation passed its limit.
            Dist2Error: The operation's failure.
        """
        if timeout or self.ordered is None:
            return super().wait(timeout)
        self.ordered.order()
        return super().wait() if self.ordered.over else True  # then it takes a moment at most

    def is_completed(self) -> bool:
        """Whether it ended, well or badly: the device is asked."""
        ordered = self.ordered
        if ordered is not None:
            ordered.poll()
            if ordered.over:  # another thread that found this may not have completed the Work yet
                return True
        return super().is_completed()

    def exception(self) -> BaseException | None:
        """Return the exception that it failed with; None if it succeeded or is not done."""
        ordered = self.ordered
        if ordered is not None and ordered.over and not super().is_completed():
            return ordered.exception()
        return super().exception()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a torch future of the output tensors; its callbacks run in the order of the stream."""
        future = None if self.ordered is None else self.ordered.future(self.outputs)
        return super().get_future() if future is None else future

    def _get_duration(self) -> float:
        """Return how long it ran on the device in milliseconds, if that was measured, else on the host."""
        measured = None if self.ordered is None else self.ordered.duration_ms()
        return super()._get_duration() if measured is None else measured
