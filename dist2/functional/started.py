"""Operations that overlap: their results are tensors that wait when they are first read.

Theory of operation. Inside `starting`, the operators issue their operations asynchronously and return tensors
without data yet. `started` wraps such a tensor in one of a subclass without storage. torch asks that class
for each operation on it, below autograd; the class waits, and runs the operation on the tensor itself. So
shape, dtype and gradient are known at once, and results of operations are ordinary tensors.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch

from dist2.operation.work import Work
from dist2.runtime.torch_versions import plain_functions, without_storage

P = ParamSpec("P")


class _Starting(threading.local):
    works: list[Work] | None = None


_starting = _Starting()


def run(call: Callable[..., Any], *arguments: Any) -> None:
    """Call a method of a group: complete at the end, or only issued inside `starting`."""
    if _starting.works is None:
        call(*arguments).wait()  # which a coalescing block refuses: the result would be read before it ends
    else:
        _starting.works.append(call(*map(_untracked, arguments), async_op=True))


def _untracked(value: Any) -> Any:
    """Return an argument with aliases of its tensors: autograd refuses tensors that are written later."""
    if isinstance(value, torch.Tensor):
        return value.data
    return list(map(_untracked, value)) if isinstance(value, (list, tuple)) else value


def finish(work: Work) -> None:
    """Wait for an operation that was issued; inside `starting`, leave that to the result."""
    if _starting.works is None:
        work.wait()
    else:
        _starting.works.append(work)


@contextmanager
def starting() -> Iterator[list[Work]]:
    """Have the operators of this thread only issue their operations; yield the list of these."""
    _starting.works = works = list[Work]()
    try:
        yield works
    finally:
        _starting.works = None


@contextmanager
def completing() -> Iterator[None]:
    """Complete what `starting` has issued, and have the operators of this thread complete theirs."""
    works, _starting.works = _starting.works, None
    try:
        for work in works or ():
            work.wait()
        yield
    finally:
        _starting.works = works


def startable(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Decorate a function that calls one operator: handle its argument ``async_op``.

    In a graph the call is complete: an operator cannot return a tensor without its values.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if not kwargs.pop("async_op", False) or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with starting() as works:
            result = function(*args, **kwargs)
        return _applied(_Start, result, works)

    return call


def wait(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its values, as an ordinary tensor with the same gradient.

    For the result of a function that was called with ``async_op=True``, before it is given to code that reads
    memory: a method of a group, or numpy. Other tensors are returned as they are.

    Args:
        x: Any tensor.

    Raises:
        Dist2Error: The operation failed.

    Examples:
        >>> y = dist2.functional.all_reduce(torch.ones(2), pg, async_op=True)
        >>> dist2.functional.wait(y).numpy().tolist()
        [2.0, 2.0]
    """
    if torch.compiler.is_compiling() or not isinstance(x, WaitingTensor):
        return x
    return _applied(_Complete, x)


class WaitingTensor(torch.Tensor):
    """The result of an operation under way. Any operation on it waits, and returns ordinary tensors."""

    _tensor: torch.Tensor
    _works: list[Work]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, works: list[Work]) -> WaitingTensor:
        self: WaitingTensor = without_storage(cls, tensor)
        self._tensor, self._works = tensor, works
        return self

    def __init__(self, tensor: torch.Tensor, works: list[Work]) -> None:
        super().__init__()

    def complete(self) -> torch.Tensor:
        """Wait; return the tensor with the values, without a gradient."""
        for work in self._works:
            work.wait()
        return self._tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_functions():  # the results are not of this class
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = {name: _completed(value) for name, value in (kwargs or {}).items()}
        return func(*_completed(args), **named)

    def __repr__(self) -> str:  # type: ignore[override]  # without torch's private argument
        return repr(wait(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return wait(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(wait(self), memo)

    def numpy(self, *, force: bool = False) -> Any:
        return wait(self).numpy(force=force)

    def tolist(self) -> Any:
        return wait(self).tolist()

    def data_ptr(self) -> int:
        return wait(self).data_ptr()

    def __dlpack__(self, **options: Any) -> Any:
        return wait(self).__dlpack__(**options)


def _completed(value: Any) -> Any:
    """Return an argument of an operator with complete tensors in it."""
    if isinstance(value, WaitingTensor):
        return value.complete()
    return type(value)(map(_completed, value)) if isinstance(value, (list, tuple)) else value


def _applied(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


class _Start(torch.autograd.Function):
    """From a tensor of an operation under way to one that waits."""

    @staticmethod
    def forward(tensor: torch.Tensor, works: list[Work]) -> torch.Tensor:
        return WaitingTensor(tensor.detach(), works)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.works = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for work in ctx.works:  # the backward pass of the operation may read its result
            work.wait()
        return grad, None

    @staticmethod
    def jvp(ctx: Any, grad: torch.Tensor, _: None) -> torch.Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, works: list[Work]) -> Any:
        return _applied(_Start, tensor, works), in_dims[0]


class _Complete(torch.autograd.Function):
    """From a tensor that waits to a complete one."""

    @staticmethod
    def forward(tensor: WaitingTensor) -> torch.Tensor:
        return tensor.complete().detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad

    @staticmethod
    def jvp(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
