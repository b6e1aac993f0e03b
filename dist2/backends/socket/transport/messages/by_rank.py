"""`ByRank`: values of a group for each member, made at first use."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

Value = TypeVar("Value")


class ByRank(dict[int, Value]):
    """One value for each member that messages are exchanged with, made when it is first wanted.

    A group that calls nothing but collectives in shared memory has no such values.

    Attributes:
        make: The type of it.
    """

    make: ClassVar[type[Any]]

    def __missing__(self, rank: int) -> Value:
        value: Value = self.make()
        return self.setdefault(rank, value)  # in one step: another thread may be here as well
