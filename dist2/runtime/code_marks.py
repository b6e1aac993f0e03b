"""`CodeMarks`: facts about code, found again by the frames that run it.

Some decisions depend on the code that a thread is running: whether Ctrl-C may be raised there, whether
locks may be held, which line is the user's. A frame has its code object, and that has its file; neither
survives a move or a new name of a module. So the code itself carries the mark:

* a class or a function is marked by a decorator, which notes the code objects of its methods and of all
  functions nested in them, by identity (code objects compare equal across files);
* a package is marked by a call in its ``__init__.py`` with its own ``__spec__``, which notes the folders
  that the import system loads it from. A mark of the code itself has precedence over one of a folder,
  and an inner folder over an outer one.

Marks are made at import and read when a signal arrives or a group ends: calls of operations pay nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType
from typing import Any, Generic, TypeVar

Mark = TypeVar("Mark")
Marked = TypeVar("Marked", bound=Callable[..., Any])


class CodeMarks(Generic[Mark]):
    """Marks of one kind; their reader gives them a meaning."""

    def __init__(self) -> None:
        self._by_code: dict[int, tuple[CodeType, Mark]] = {}  # holds the code, so that its id stays its own
        self._by_folder: list[tuple[str, Mark]] = []
        self._folders: tuple[str, ...] = ()

    def add(self, mark: Mark) -> Callable[[Marked], Marked]:
        """Return a decorator that marks a function, or all methods that a class itself defines."""

        def decorate(marked: Marked) -> Marked:
            for code in codes_of(marked):
                self._by_code[id(code)] = code, mark
            return marked

        return decorate

    def add_package(self, spec: ModuleSpec, mark: Mark) -> None:
        """Mark all code of a package, present and future.

        Args:
            spec: The package's ``__spec__``.
            mark: The mark of its code.
        """
        self._by_folder += [(folder, mark) for folder in folders_of(spec)]
        self._by_folder.sort(key=lambda each: -len(each[0]))  # inner folders first
        self._folders = tuple(folder for folder, _ in self._by_folder)

    def of(self, code: CodeType) -> Mark | None:
        """Return the mark of a frame's code; None if it has none."""
        own = self._by_code.get(id(code))
        if own is not None:
            return own[1]
        file = code.co_filename
        if not file.startswith(self._folders):  # as most of a stack: one call in C
            return None
        return next((mark for folder, mark in self._by_folder if file.startswith(folder)), None)


def codes_of(thing: object) -> Iterator[CodeType]:
    """Yield the code of a function, a method of any kind or a class, and of functions nested in these."""
    if isinstance(thing, CodeType):
        yield thing
        for constant in thing.co_consts:
            if isinstance(constant, CodeType):
                yield from codes_of(constant)
    elif isinstance(thing, type):
        for member in vars(thing).values():
            if not isinstance(member, type):
                yield from codes_of(member)
    elif isinstance(thing, property):
        for accessor in (thing.fget, thing.fset, thing.fdel):
            yield from codes_of(accessor)
    elif isinstance(thing, (staticmethod, classmethod)):
        yield from codes_of(thing.__func__)
    elif isinstance(thing, cached_property):
        yield from codes_of(thing.func)
    elif hasattr(thing, "__wrapped__"):  # a decorated function, or one in C
        yield from codes_of(thing.__wrapped__)
    elif isinstance(thing, FunctionType):
        yield from codes_of(thing.__code__)


def folders_of(spec: ModuleSpec) -> tuple[str, ...]:
    """Return the folders of a package, as the names of its files begin.

    Raises:
        ValueError: It is a module and has none.
    """
    if spec.submodule_search_locations is None:
        raise ValueError(f"spec must be that of a package, got that of the module {spec.name!r}")
    return tuple(f"{folder}{os.sep}" for folder in spec.submodule_search_locations)


def library() -> ModuleSpec:
    """Return the spec of the package that contains this module, at any depth."""
    root = sys.modules[__name__.partition(".")[0]]
    if root.__spec__ is None:
        raise RuntimeError(f"package {root.__name__!r} was not imported by the import system: it has no spec")
    return root.__spec__
