"""What becomes of a group's operations: told to instruments and hooks, and marked where they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import NoReturn

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup

from dist2.backends.base import Backend, GroupSpec
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    InvalidUsageError,
    OperationTimeoutError,
    PeerLostError,
)
from dist2.hooks import dispatch
from dist2.lane import Lane
from dist2.logs import Logger
from dist2.operation import GroupInfo, Operation
from dist2.spoiling import spoil
from dist2.standing import Standing

Tensors = Sequence[torch.Tensor]

log = Logger("dist2.group")


class Outcomes(TorchProcessGroup):
    """A group's identity and standing, and how its operations end.

    Attributes:
        info: Who the group is.
        backend: What moves its tensors.
    """

    def __init__(self, spec: GroupSpec, backend: Backend) -> None:
        super().__init__(spec.info.rank, spec.info.world_size)  # type: ignore[call-arg]  # stubs lack it
        self.spec = spec
        self.backend = backend
        self.info: GroupInfo = spec.info
        self._standing = Standing(int(spec.timeout_s * 1e9))
        self._lane = Lane(spec.info.name, spec.info)
        self._closed = False

    @property
    def _fault(self) -> Dist2Error | None:
        """What makes the group refuse operations; None while it takes them."""
        return self._standing.fault

    @_fault.setter
    def _fault(self, fault: Dist2Error | None) -> None:
        self._standing.fault = fault

    # Of an operation

    def _finished(self, operation: Operation) -> None:
        """Tell that an operation succeeded."""
        operation.finished_ns = monotonic_ns()
        dispatch.finished(operation)
        if self._standing.hooks:
            self._tell_hooks(operation)

    def _stumbled(
        self, operation: Operation, error: BaseException, inputs: Tensors, outputs: Tensors
    ) -> NoReturn:
        """Tell that an operation failed in its caller's thread, and raise what it failed with."""
        self._spoil(operation, error, inputs, outputs)
        raise self._failed(operation, error) from error.__cause__

    def _failed(self, operation: Operation, error: BaseException) -> BaseException:
        """Record a failure, with the operation's name filled in where the error lacks it."""
        if isinstance(error, Dist2Error):
            signature = operation.signature
            error.group = error.group or signature.group.name
            error.op = error.op or signature.kind.value
            error.seq = operation.seq if error.seq is None else error.seq
            error.rank = signature.group.rank if error.rank is None else error.rank
            _name_operation(error, operation)
        operation.error = error
        operation.finished_ns = monotonic_ns()
        self._break(operation, error)
        dispatch.finished(operation)
        self._tell_hooks(operation)
        return error

    def _spoil(self, operation: Operation, error: BaseException, inputs: Tensors, outputs: Tensors) -> None:
        """Mark what a failed operation was to write, unless it was refused with nothing done."""
        refused = isinstance(error, Dist2Error) and error.group_usable
        if self.backend.frees_tensors and not refused:
            spoil(operation.signature, inputs, outputs)

    # Of the group

    def _break(self, operation: Operation, error: BaseException) -> None:
        """Refuse later operations if the group cannot go on after this error."""
        if self._standing.fault is not None:
            return
        if not isinstance(error, Dist2Error) or not error.group_usable:
            self.backend.broken_by(error)
        if isinstance(error, Dist2Error):
            if not error.group_usable:
                self._standing.fault = error
        else:  # KeyboardInterrupt, SystemExit, no memory: the others are mid-way
            self._standing.fault = GroupAbortedError(
                f"{operation.describe()} was interrupted by {type(error).__name__} in this process",
                group=self.info.name,
                rank=self.info.rank,
            )

    def _release(self) -> None:
        """After an abort, called by whoever leaves the group: the last one takes down what they used."""
        if self._lane.retire():
            self.backend.shutdown()

    def _refusal(self, fault: Dist2Error) -> Dist2Error:
        """Return what an operation on a broken group raises: the kind of error that broke it.

        Where ranks died, it names those as well that died since.
        """
        if isinstance(fault, PeerLostError):
            fault.ranks = tuple(sorted({*fault.ranks, *self.backend.lost()}))
            names = ", ".join(map(str, fault.ranks))
            return fault.again(
                f"group {self.info.name!r} cannot be used any more, rank(s) {names} are lost: {fault}"
            )
        return fault.again(f"group {self.info.name!r} cannot be used any more: {fault}")

    # Hooks

    def register_completion_hook(self, hook: Callable[[Operation], None]) -> Callable[[], None]:
        """Call ``hook(operation)`` after every operation of the group; return what removes it.

        It runs on the thread that completed the operation. One that raises is logged and kept.
        """
        if not callable(hook):
            raise InvalidUsageError(f"hook must be callable, got {hook!r} ({type(hook).__name__})")
        self._standing.hooks = (*self._standing.hooks, hook)

        def remove() -> None:
            self._standing.hooks = tuple(each for each in self._standing.hooks if each is not hook)

        return remove

    def _tell_hooks(self, operation: Operation) -> None:
        for hook in self._standing.hooks:
            try:
                hook(operation)
            except Exception as error:  # noqa: BLE001 - a hook must never break a collective
                log.error("completion_hook_failed", group=self.info.name, hook=repr(hook), error=repr(error))


def _name_operation(error: Dist2Error, operation: Operation) -> None:
    """Say in the message which operation failed, where what raised it could not know."""
    if isinstance(error, (OperationTimeoutError, PeerLostError)) and operation.describe() not in str(error):
        where = f"{operation.describe()} in group {operation.signature.group.name!r}"
        error.args = (f"{where}: {error}",)
        if isinstance(error, OperationTimeoutError) and error.timeout_s is None:
            error.timeout_s = operation.timeout_s
            error.elapsed_s = (monotonic_ns() - operation.created_ns) / 1e9
            limit = f"after {error.elapsed_s:.3g} s, limit {operation.timeout_s:.3g} s"
            error.args = (f"{error} ({limit})",)
