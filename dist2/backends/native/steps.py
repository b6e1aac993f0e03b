"""What an operation of a native backend waits for, and how its generator becomes a method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from dist2.backends.base import Tensors
from dist2.backends.native.turns import Done, QueueState, Steps
from dist2.backends.native.waiters import Waiters
from dist2.operation import Operation


class Started:
    """A native operation that completes a torch future."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def when_done(self, done: Done, waiters: Waiters) -> None:
        def tell(future: torch.futures.Future[object]) -> None:
            try:
                future.value()
            except BaseException as error:  # noqa: BLE001 - handed on
                done(error)
            else:
                done(None)

        self._work.get_future().add_done_callback(tell)


class Blocking:
    """Something that can only be waited for."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def when_done(self, done: Done, waiters: Waiters) -> None:
        def job() -> None:
            try:
                self._wait()
            except BaseException as error:  # noqa: BLE001 - handed on
                done(error)
            else:
                done(None)

        waiters.put(job)


class HasTurns(Protocol):
    """Whose operations the decorators make."""

    @property
    def turns(self) -> QueueState: ...


Method = Callable[[Any, Operation, Tensors, Tensors], Steps]
Issue = Callable[[Any, Operation, Tensors, Tensors], "Future[None] | None"]


def in_order(method: Method) -> Issue:
    """Make a collective of a generator: it runs when those before it are done."""

    @functools.wraps(method)
    def issue(self: HasTurns, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        return self.turns.in_order(operation, method(self, operation, inputs, outputs))

    return issue


def at_once(method: Method) -> Issue:
    """Make a point-to-point operation of a generator: it runs beside everything else."""

    @functools.wraps(method)
    def issue(self: HasTurns, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        return self.turns.beside(operation, method(self, operation, inputs, outputs))

    return issue
