"""Two exceptions in one call into C: both must be raised, and both must be freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NoReturn


class Raised:
    """Makes exceptions, and knows which of them are still in memory.

    Each is an object that other objects can refer to weakly, so that a reference that C has lost is found.
    """

    def __init__(self) -> None:
        self._made: list[weakref.ref[MarkedError]] = []

    def raising(self, name: str) -> Callable[..., NoReturn]:
        """Return a callable that raises an exception of a name, for any arguments."""

        def raise_it(*_: object, **__: object) -> NoReturn:
            error = MarkedError(name)
            self._made.append(weakref.ref(error))
            raise error

        return raise_it

    def chain_of(self, call: Callable[..., Any], *arguments: Any) -> list[str]:
        """Return the exception that a call raises, by its text, and those in its chain of contexts."""
        try:
            call(*arguments)
        except BaseException as error:  # noqa: BLE001 - the test examines it
            chain: list[str] = []
            each: BaseException | None = error
            while each is not None and len(chain) < 10:
                chain.append(str(each))
                each = each.__context__
            return chain
        return []

    def alive(self) -> list[str]:
        """Return the exceptions that are not freed after a collection of garbage."""
        gc.collect()
        return [str(error) for made in self._made if (error := made()) is not None]


class MarkedError(Exception):
    """An exception of `Raised`."""
