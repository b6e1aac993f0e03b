"""Keeping `torch.compile` out of dist2: it compiles the callers of a group, never the group's own code.

Dynamo compiles each frame that Python enters while a compiled function runs, also where torch's C++ calls a
method of a group, and it traces into callees of a compiled function. Both are wrong here: a collective has
side effects that a graph cannot hold, and the group's state changes with each call. So all code of dist2, and
all code that it calls, is marked as not to be compiled: a compiled function is interrupted at such a call (a
*graph break*).

torch also refuses to look up unknown attributes of a group. So it gets a group's methods and properties;
some properties are constants of a compiled function, which checks them before each call. Where torch cannot
be told that (before 2.12), Dynamo binds methods by the types that it knows, and methods written in C are put
into one of them.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from dist2.runtime.torch_versions import OPAQUE_TYPES, leave_code_alone

_CONSTANTS = ("group_name", "group_desc", "global_ranks", "timeout_s", "_device_types")
"""Properties that a compiled function may look at."""

_TRACED = ("group_name", "rank", "size") if OPAQUE_TYPES is None else ()
"""What functional collectives ask of a group inside of a graph: there Dynamo has to trace it."""

_CONSTANT_METHODS = ("rank", "size", "_get_backend_name", "__eq__", "__ne__")
"""Methods that torch itself takes for constants."""


_REASON = (
    "dist2 runs outside of graphs: "
    "with fullgraph=True call dist2.functional or torch's functional collectives"
)


def keep_out(package: str) -> None:
    """Have Dynamo leave alone all functions of a package that have been defined so far."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for function in _functions(vars(module), name):
                if function.__name__ in _TRACED:
                    continue
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch's decorator
                function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]  # shown with fullgraph=True
                for code in _codes(function.__code__):
                    leave_code_alone(code)


def _functions(namespace: dict[str, Any], module: str) -> Iterator[FunctionType]:
    """Yield the functions that a module defines, at its top and in its classes."""
    for value in list(namespace.values()):
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _functions(dict(vars(value)), module)
            continue  # of some, a metaclass would look for an attribute far and wide
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            found: object = inspect.unwrap(getattr(part, "__func__", part))  # type: ignore[arg-type]  # any object
            if isinstance(found, FunctionType) and found.__module__ == module:
                yield found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def describe(kind: type) -> None:
    """Tell torch the attributes of groups of a kind."""
    if OPAQUE_TYPES is None:
        return
    ours = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == __name__.partition(".")[0]]
    names = {name for each in ours for name in vars(each) if not name.startswith("__")}
    methods = [name for name in names if callable(inspect.getattr_static(kind, name))]
    members = dict.fromkeys(methods, OPAQUE_TYPES.inlined)
    members |= dict.fromkeys(_CONSTANTS + _CONSTANT_METHODS, OPAQUE_TYPES.constant)
    OPAQUE_TYPES.register(kind, members=members, guard_fn=_guarded)


def as_method(made: Callable[..., Any]) -> Any:
    """Return a method, in C or in Python, as Dynamo binds it to a group."""
    if OPAQUE_TYPES is not None or isinstance(made, FunctionType):
        return made
    return _new_instance_method(made)


_new_instance_method = ctypes.pythonapi.PyInstanceMethod_New
_new_instance_method.argtypes, _new_instance_method.restype = (ctypes.py_object,), ctypes.py_object


def _guarded(group: Any) -> list[object]:
    return [getattr(group, name) for name in _CONSTANTS]
