"""Code that runs outside of the dispatch modes and transforms of torch that its caller is in.

A ``TorchDispatchMode`` of the caller, such as ``FakeTensorMode``, sees every operation of torch in its
thread, and may return tensors without memory. In a transform of `torch.func`, new tensors are wrappers. The data
plane needs memory with an address, also for what it keeps for later calls. Modes of functions, such as a
default device, stay: objects that users' code decodes are made in them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

from dist2.runtime.torch_versions import (
    in_dispatch_mode,
    in_transform,
    without_dispatch_modes,
    without_transforms,
)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def outside_modes(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a function whose operations of torch are seen by no mode and no transform of its caller."""

    @wraps(function)
    def call(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        if not in_dispatch_mode() and in_transform() is None:
            return function(*args, **keywords)
        with ExitStack() as left:
            left.enter_context(without_transforms())
            left.enter_context(without_dispatch_modes())
            return function(*args, **keywords)

    return call
