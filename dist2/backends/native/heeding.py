"""`HeedingStore`: where a library's ranks meet, and hear of one that could not connect."""

from __future__ import annotations

from contextlib import suppress

from dist2.backends.base import GroupSpec
from dist2.errors import PeerLostError, StoreTimeoutError
from dist2.store import PrefixStore
from dist2.store.deadline import Deadline

_FAILED = "failed"
_LOOK_S = 0.2
_WORDS = 1000


class HeedingStore(PrefixStore):
    """A group's store, whose waits end when a rank says that it has failed.

    Args:
        spec: The group that is connected.
    """

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__("library", spec.store)
        self._spec = spec

    def tell(self, error: BaseException) -> None:
        """Tell the others that this rank has failed."""
        words = f"rank {self._spec.info.rank} gave up ({type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store may be what failed
            if self._spec.store.add(f"{_FAILED}/count", 1) == 1:
                self._spec.store.set(_FAILED, f"{self._spec.info.rank} {words[:_WORDS]})")

    def look(self) -> None:
        """Raise if a rank has failed.

        Raises:
            PeerLostError: It has; the message has its error.
        """
        info = self._spec.info
        if self._spec.store.check([_FAILED]):
            number, _, words = self._spec.store.get(_FAILED).decode(errors="replace").partition(" ")
            raise PeerLostError(
                f"group {info.name!r} cannot be built: {words[: 2 * _WORDS]}",
                ranks=[int(number)] if number.isdecimal() else [],
                group=info.name,
                op="new_group",
                rank=info.rank,
            )

    def _wait(self, keys: tuple[bytes, ...], deadline: Deadline) -> None:
        while True:
            try:
                return super()._wait(keys, deadline.soon(_LOOK_S))
            except RuntimeError as error:  # torch's stores have no type of their own for a timeout
                self.look()
                if deadline.passed or not _is_timeout(error):
                    raise

    def _get(self, key: bytes, deadline: Deadline) -> bytes:
        self._wait((key,), deadline)
        return super()._get(key, deadline)

    def _multi_get(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        self._wait(keys, deadline)
        return super()._multi_get(keys, deadline)


def _is_timeout(error: RuntimeError) -> bool:
    return isinstance(error, StoreTimeoutError) or "timeout" in str(error).lower()
