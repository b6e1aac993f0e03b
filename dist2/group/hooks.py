"""Hooks before operations: they see the call and its tensors, and may refuse it.

A group with hooks replaces `_run` and `_run_p2p`, by which every operation leaves its method, with functions
that ask the hooks first. A group without hooks pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident

import torch

from dist2.backends.base import Backend, GroupSpec
from dist2.errors import ArgumentTypeError, InvalidUsageError, NanError
from dist2.operation.contract import GroupParts, Run
from dist2.operation.execution import Tensors
from dist2.operation.kinds import OpKind
from dist2.operation.plan_cache import Plan
from dist2.operation.record import Operation
from dist2.operation.runner import Timeout
from dist2.operation.work import Work
from dist2.runtime.signals import OnCtrlC, on_ctrl_c

PreHook = Callable[[Operation, Tensors, Tensors], object]
"""Called as ``hook(operation, inputs, outputs)``."""


@on_ctrl_c(OnCtrlC.DEFER_IN_CALLS)
class PreHooks(GroupParts):
    """Registration of hooks that run before each operation."""

    backend: Backend
    spec: GroupSpec
    _pre_hooks: tuple[PreHook, ...] = ()
    _unhooked_run: Run
    """`OperationRunner.run`, or that of the group's `Verifier`."""

    def register_pre_hook(self, hook: PreHook) -> Callable[[], None]:
        """Call ``hook(operation, inputs, outputs)`` before each operation; return a callable that removes it.

        It runs in the thread that calls the operation, before anything is sent. If it raises, the operation
        does not run: its caller gets the exception, and the group is revoked, because the other ranks wait in
        the operation. They raise `GroupRevokedError`, which names this rank and has the text of the
        exception; `shrink` continues. Of asynchronous and coalesced operations, hooks see the call.

        Args:
            hook: ``operation.signature`` has the kind and the reduction, ``operation.code`` and ``line`` the
                user's line, and ``operation.describe()`` or its repr is all in words; inputs and outputs are
                the tensors.
                It must not call operations of the group.

        Raises:
            InvalidUsageError: ``hook`` is not callable.

        Examples:
            >>> seen = []
            >>> remove = pg.register_pre_hook(lambda operation, inputs, outputs: seen.append(len(inputs)))
            >>> pg.all_reduce(torch.ones(2))
            >>> seen
            [1]
            >>> remove()
        """
        if not callable(hook):
            raise ArgumentTypeError(f"hook must be callable, got {hook!r} ({type(hook).__name__})")
        self._set_pre_hooks((*self._pre_hooks, hook))

        def remove() -> None:
            self._set_pre_hooks(tuple(each for each in self._pre_hooks if each is not hook))

        return remove

    def _set_pre_hooks(self, hooks: tuple[PreHook, ...]) -> None:
        self._pre_hooks = hooks
        run, run_p2p = self._unhooked_run, self._runner.run_p2p
        self._run = self._asking(run) if hooks else run
        self._run_p2p = self._asking(run_p2p) if hooks else run_p2p
        self._direct_runner = None if hooks or self.spec.verify else self._runner

    def _asking(self, run: Run) -> Run:
        """Return a function that asks the hooks, then runs the operation."""
        asking: set[int] = set()  # threads

        def ask_and_run(
            plan: Plan, inputs: Tensors, outputs: Tensors, async_op: bool, timeout: Timeout
        ) -> Work:
            if get_ident() in asking:
                raise InvalidUsageError(
                    f"a hook of group {self.info.name!r} called {plan.signature}: "
                    f"hooks must not call operations"
                )
            operation = self._runner._begin(plan.signature, async_op, timeout)
            asking.add(get_ident())
            try:
                for hook in self._pre_hooks:
                    hook(operation, inputs, outputs)
            except BaseException as error:
                self._refuse(error)
                raise
            finally:
                asking.discard(get_ident())
            return run(plan, inputs, outputs, async_op, timeout)

        return ask_and_run

    def _refuse(self, error: BaseException) -> None:
        """Revoke the group because of an error that the other ranks cannot see."""
        try:
            self.backend.broken_by(error)  # tells the text of the error, which may raise
        finally:
            with suppress(InvalidUsageError):  # no control messages: others wait for their limit
                self.backend.revoke(self.info.rank)


def check_nan(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
    """Raise if an input has a NaN: a hook of groups with ``check_nan=True``.

    Raises:
        NanError: Names the rank, the call and its line, the tensor and the index.
    """
    signature, group = operation.signature, operation.signature.group
    if signature.kind is OpKind.BROADCAST and signature.root != group.rank:
        return  # its tensor is only written
    for name, index in _nans(inputs):
        code = operation.code
        where = f" at {code.co_filename}:{operation.line}" if code is not None else ""
        raise NanError(
            f"{group.names([group.rank])} passes NaN to {operation.signature}{where}: {name} has it at index "
            f"{index}; nothing was sent",
            tensor=name,
            index=index,
            group=group.name,
            op=operation.signature.kind.value,
            rank=group.rank,
            members=group.global_ranks,
        )


def _nans(tensors: Tensors) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each tensor that has a NaN, by its name, with the index of the first one."""
    for number, tensor in enumerate(tensors):
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta:
            found = torch.isnan(tensor)
            if found.any():
                name = "the input" if len(tensors) == 1 else f"inputs[{number}]"
                yield name, tuple(found.nonzero()[0].tolist())
