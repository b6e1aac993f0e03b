"""`HeedingStore`: where ranks meet that build a group, and hear of one that failed or died."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Self

from torch.distributed import Store

from dist2.errors import PeerLostError, StoreConnectionError, StoreTimeoutError
from dist2.store.base import Store as OurStore
from dist2.store.base import wait_timed_out
from dist2.store.deadline import Deadline
from dist2.store.prefix import PrefixStore
from dist2.store.process import Process
from dist2.store.roll import Roll

FAILED = "dist2/failed"
"""The key that says why a group cannot be built."""
_LOOK_S = 0.2
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0003, 0.05
_WORDS = 1000


class HeedingStore(PrefixStore):
    """A part of a store in which one group is built, in a `with` block of each of its ranks.

    What a rank raises in the block is told to the others. While a rank waits for keys it looks now and then
    whether such a thing was told, and whether a process of its host that came has ended, which it tells.
    After the block, this is a part of a store like any other.

    Args:
        prefix: What its keys begin with.
        store: Any store.
        rank: The caller's.
        world_size: How many ranks the group has.
        name: The group's, if it has one.
        roll: Who the ranks are, if they have met before; else each says so here when it comes.
    """

    def __init__(
        self,
        prefix: str,
        store: Store,
        rank: int,
        world_size: int,
        name: str | None = None,
        roll: Roll | None = None,
    ) -> None:
        super().__init__(prefix, store)
        self._rank = rank
        self._name = name
        what = f"the group of {world_size} ranks" if name is None else f"group {name!r}"
        self._cannot = f"{what} cannot be built: "
        self._over = False
        parts = PrefixStore(prefix, store)
        self._roll = roll or Roll(parts, rank, world_size, came)
        self._parts = parts
        parts.set(came(rank), Process.here().text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if isinstance(error, StoreConnectionError):
            raise StoreConnectionError(f"{self._cannot}{error}") from error
        if isinstance(error, PeerLostError) and error.ranks:  # the backend may have seen it first
            self._tell(error.ranks[0], str(error).removeprefix(self._cannot)[:_WORDS])
        elif error is not None:
            words = f"rank {self._rank} gave up ({type(error).__name__}: {error}"
            self._tell(self._rank, words[:_WORDS] + ")")

    def _tell(self, rank: int, words: str) -> None:
        """Tell all that a rank is why the group cannot be built, unless there was a reason before."""
        with suppress(RuntimeError):  # the store may be what failed
            if self._parts.add(f"{FAILED}/count", 1) == 1:
                self._parts.set(FAILED, f"{rank} {words}")

    def _look(self, keys: tuple[bytes, ...]) -> None:
        """Raise if a rank has failed or died, and has not set these keys before that.

        Raises:
            PeerLostError: It has; the message says why.
        """
        found = self._roll.dead()
        if self._parts.check([FAILED]):  # who died may have told why
            said = self._parts.get(FAILED).decode(errors="replace")
            number, _, words = said[: 2 * _WORDS].partition(" ")
            found = (int(number) if number.isdecimal() else -1, words)
        if found is None or self._check(keys):
            return
        rank, words = found
        self._tell(rank, words)
        raise PeerLostError(
            f"{self._cannot}{words}",
            ranks=[rank] if rank >= 0 else [],
            group=self._name or "",
            op="new_group",
            rank=self._rank,
        )

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        while not self._over:
            if self._comes(keys, deadline.soon(_LOOK_S)):
                return
            self._look(keys)
            if deadline.passed:
                raise wait_timed_out(keys, deadline)
        super()._wait(keys, deadline)

    def _comes(self, keys: tuple[bytes, ...], deadline: Deadline) -> bool:
        """Whether keys are set before a deadline.

        torch's TCPStore complains on stderr of each wait that ends without, so that others are asked again
        and again.
        """
        if isinstance(self._underlying_non_prefix_store, OurStore):
            try:
                super()._wait(keys, deadline)
            except StoreTimeoutError:
                return False
            return True
        return any(self._check(keys) for _ in deadline.tries(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        if not self._over:
            self._wait((key,), deadline)
        return super()._get(key, deadline)

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        if not self._over:
            self._wait(keys, deadline)
        return super()._multi_get(keys, deadline)


def came(rank: int) -> str:
    """Return the key where a rank says which process it is."""
    return f"dist2/came/{rank}"
