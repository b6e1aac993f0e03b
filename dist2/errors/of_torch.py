"""Exceptions that are also of a type of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed import QueueEmptyError as TorchQueueEmptyError

from dist2.errors import Dist2Error, Where

__all__ = [
    "AuthenticationError",
    "BackendError",
    "GroupAbortedError",
    "GroupRevokedError",
    "MismatchError",
    "OperationTimeoutError",
    "PeerLostError",
    "QueueEmptyError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "StoreConnectTimeoutError",
    "StoreConnectionError",
    "StoreError",
    "StoreTimeoutError",
    "StoreUnsupportedError",
    "WireError",
]


class MismatchError(Dist2Error, DistBackendError):
    """Ranks called different operations, or the same one with arguments that must agree.

    Attributes:
        expected: This rank's call, in words.
        actual: The call of each deviating group rank, in words.
        calls: The call of each group rank that is known, this one's included, as `Call` objects.

    Examples:
        >>> try:
        ...     pg.all_reduce(torch.ones(2 + pg.rank()))
        ... except dist2.MismatchError as error:
        ...     print(error.calls[0].op)
        all_reduce
    """

    def __init__(
        self,
        message: str,
        *,
        expected: str | None = None,
        actual: dict[int, str] | None = None,
        calls: dict[int, Any] | None = None,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.expected = expected
        self.actual = actual or {}
        self.calls = calls or {}


class OperationTimeoutError(Dist2Error, DistBackendError, TimeoutError):
    """The deadline passed; the message names the ranks that did not arrive.

    Attributes:
        missing: Group ranks that had not arrived.
        global_missing: The same as ranks of the job.
        timeout_s: The limit that passed, in seconds.
        elapsed_s: Time since the operation began, in seconds.
        last_seen: The last operation known of each missing rank, in words.

    Examples:
        >>> try:
        ...     pg.recv(torch.empty(1), src=1 - pg.rank(), timeout=0.05)
        ... except dist2.OperationTimeoutError as error:
        ...     print(error.timeout_s)
        0.05
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[int] = (),
        timeout_s: float | None = None,
        elapsed_s: float | None = None,
        last_seen: dict[int, str] | None = None,
        **where: Unpack[Where],
    ) -> None:
        words = message if "Timed out" in message else f"{message} (Timed out)"  # programs match on this
        super().__init__(words, **where)
        self.missing = tuple(missing)
        self.timeout_s = timeout_s
        self.elapsed_s = elapsed_s
        self.last_seen = last_seen or {}

    @property
    def global_missing(self) -> tuple[int, ...]:
        """The ranks of the job that had not arrived."""
        return self._of_job(self.missing)


class PeerLostError(Dist2Error, DistBackendError, ConnectionError):
    """A rank died or left; every survivor's pending and next operation raises this.

    Attributes:
        ranks: Group ranks known to be lost.
        global_ranks: The same as ranks of the job.

    Examples:
        >>> try:
        ...     pg.all_reduce(torch.ones(2))
        ... except dist2.PeerLostError as error:
        ...     print("lost", error.global_ranks)
        ...     pg = pg.shrink()
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.ranks = tuple(ranks)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the job known to be lost."""
        return self._of_job(self.ranks)


class BackendError(Dist2Error, DistBackendError):
    """The library under a backend failed in a way that has no type here; the message quotes it."""


class GroupRevokedError(Dist2Error, DistBackendError):
    """A rank revoked the group: continue with the group that `shrink` returns.

    Attributes:
        by: Group rank of the member that revoked it, or that reported the revocation.
        global_by: The same as a rank of the job.

    Examples:
        >>> pg.revoke()
        >>> try:
        ...     pg.barrier()
        ... except dist2.GroupRevokedError as error:
        ...     print(error.by in (0, 1))
        True
    """

    def __init__(
        self,
        message: str,
        *,
        by: int = -1,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.by = by

    @property
    def global_by(self) -> int:
        """The rank of the job that revoked the group."""
        return self._of_job([self.by])[0]


class GroupAbortedError(Dist2Error, DistBackendError):
    """The group was aborted or shut down in this process.

    Examples:
        >>> pg.abort()
        >>> try:
        ...     pg.barrier()
        ... except dist2.GroupAbortedError as error:
        ...     print(error.group_usable)
        False
    """


class StoreError(Dist2Error, DistStoreError):
    """The key-value store refused or failed.

    Examples:
        >>> try:
        ...     dist2.HashStore().set("key", None)
        ... except (dist2.StoreError, dist2.InvalidUsageError) as error:
        ...     print("refused")
        refused
    """

    group_usable = True


class StoreTimeoutError(StoreError, TimeoutError):
    """A store call passed its deadline; the message names the keys or ranks it waited for.

    Examples:
        >>> try:
        ...     dist2.HashStore().wait(["missing"], timeout=0.01)
        ... except dist2.StoreTimeoutError as error:
        ...     print("missing" in str(error))
        True
    """


class StoreConnectionError(StoreError, DistNetworkError, ConnectionError):
    """A store cannot listen or be reached, or its connection ended; the message names host and port."""


class StoreConnectTimeoutError(StoreConnectionError, StoreTimeoutError):
    """No store answered at an address in time; the message names host, port and limit."""


class StoreUnsupportedError(StoreError, NotImplementedError):
    """This kind of store has no such operation, as in torch; the message names both."""


class QueueEmptyError(StoreError, TorchQueueEmptyError):
    """A pop that may not block found its queue empty."""


class RendezvousError(Dist2Error, DistNetworkError, ValueError):
    """Ranks could not find each other; the message names the variable, URL or port at fault.

    Examples:
        >>> try:
        ...     dist2.new_group("socket", init_method="tcp://no-port", rank=0, world_size=1)
        ... except dist2.RendezvousError as error:
        ...     print("no-port" in str(error))
        True
    """


class RendezvousTimeoutError(RendezvousError, OperationTimeoutError):
    """Ranks were missing at a rendezvous when its deadline passed; `missing` has those that are known.

    Examples:
        >>> url = "tcp://127.0.0.1:1"
        >>> try:
        ...     dist2.new_group("socket", 0.2, init_method=url, rank=pg.rank() + 1, world_size=3)
        ... except dist2.OperationTimeoutError as error:
        ...     print(error.missing)
        (0,)
    """


class WireError(Dist2Error, DistNetworkError):
    """A peer sent bytes that are not the protocol, or too many of them; its connection is closed.

    Examples:
        >>> issubclass(dist2.AuthenticationError, dist2.WireError)
        True
    """


class AuthenticationError(WireError):
    """The other side of a connection is not let in, or does not let this process in.

    Attributes:
        reason: The reason, as metrics label it: one of a fixed set.

    Examples:
        >>> try:
        ...     pg.all_reduce(torch.ones(2))
        ... except dist2.AuthenticationError as error:
        ...     print("refused:", error.reason)
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.reason = reason


for _name in __all__:  # as messages and pickles name them
    globals()[_name].__module__ = "dist2.errors"
