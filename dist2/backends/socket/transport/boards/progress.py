"""`Progress`: the work that must continue while members of a host wait for each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol


class Progress(Protocol):
    """The messages of a group: failures that they report end waits in shared memory as well."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `attend` has something to do."""

    def attend(self) -> None:
        """Do it, without waiting; raise if the group has failed."""

    def seek(self, ranks: Iterable[int]) -> None:
        """Ask members that are not there, after a while, which groups they have made."""

    def last_seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the operation that each of some members was last seen at, in words."""

    def hear_out(self, ranks: Collection[int], left: Collection[int]) -> None:
        """Take in why members are gone: see `Inquiry.hear_out`; raise if the group has failed."""

    def why(self, ranks: Iterable[int]) -> str:
        """Return the reported causes of members for a broken group, as a suffix of a message."""
