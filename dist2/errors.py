"""Exceptions. Each tells the failure, the ranks at fault, and whether the group is still usable.

`Dist2Error` is the root. Where torch or Python has a matching type, ours is one too, so existing
``except`` clauses keep working. ``docs/errors.md`` has the remedy for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self, TypedDict, Unpack

from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed import QueueEmptyError as TorchQueueEmptyError


class Where(TypedDict, total=False):
    """Where an error belongs: the fields that every `Dist2Error` has, as keyword arguments."""

    group: str | None
    op: str | None
    seq: int | None
    rank: int | None
    members: Sequence[int]


class Dist2Error(RuntimeError):
    """Root of everything dist2 raises on purpose.

    Attributes:
        group: Name of the group, where one was involved.
        op: Modern name of the operation (``"all_reduce"``), where one was running.
        seq: Sequence number of that operation in its group.
        rank: Group rank of the caller.
        members: The job's rank of each group rank: translates every field that has group ranks. Empty where
            no group was involved.
        global_rank: The caller's rank in the job.
        group_usable: Whether later operations on the group can still succeed.

    Examples:
        >>> try:
        ...     pg.broadcast(torch.ones(1), root=7)
        ... except dist2.Dist2Error as error:
        ...     print(error.group_usable)
        True
    """

    group_usable = False

    def __init__(
        self,
        message: str,
        *,
        group: str | None = None,
        op: str | None = None,
        seq: int | None = None,
        rank: int | None = None,
        members: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.group = group
        self.op = op
        self.seq = seq
        self.rank = rank
        self.members = tuple(members)

    @property
    def global_rank(self) -> int | None:
        """The caller's rank in the job."""
        return None if self.rank is None else self._of_job([self.rank])[0]

    def _of_job(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the job's ranks of some group ranks."""
        return tuple([self.members[rank] if 0 <= rank < len(self.members) else rank for rank in ranks])

    def locate(
        self,
        group: str,
        op: str,
        seq: int | None = None,
        rank: int | None = None,
        members: Sequence[int] = (),
    ) -> None:
        """Fill in the fields that are not set yet."""
        self.group = self.group or group
        self.op = self.op or op
        self.seq = seq if self.seq is None else self.seq
        self.rank = rank if self.rank is None else self.rank
        self.members = self.members or tuple(members)

    def prefix(self, where: str) -> None:
        """Put ``where: `` before the message."""
        self.args = (f"{where}: {self}",)

    def again(self, message: str) -> Self:
        """Return a new error of the same type and fields, with another message and this one as cause."""
        error = type(self)(message, **{name: value for name, value in vars(self).items() if name[0] != "_"})
        error.__cause__ = self
        return error


class InvalidUsageError(Dist2Error, ValueError):
    """An argument is wrong; nothing was sent. The message names the argument and its value.

    Examples:
        >>> try:
        ...     pg.all_reduce([1, 2])
        ... except dist2.InvalidUsageError as error:
        ...     print(isinstance(error, ValueError))
        True
    """

    group_usable = True


class ArgumentTypeError(InvalidUsageError, TypeError):
    """An argument has the wrong type, where torch raises a `TypeError`."""


class UnknownBackendError(InvalidUsageError):
    """No backend of that name is registered; the message lists those that are.

    Examples:
        >>> try:
        ...     dist2.new_group("sockets", store=dist2.HashStore(), rank=0, world_size=1)
        ... except dist2.UnknownBackendError as error:
        ...     print("socket" in str(error))
        True
    """


class UnknownOptionError(InvalidUsageError, KeyError):
    """The backend has no such option; the message lists those it has.

    Examples:
        >>> try:
        ...     dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1, color="red")
        ... except dist2.UnknownOptionError as error:
        ...     print("color" in str(error))
        True
    """

    __str__ = Dist2Error.__str__  # KeyError would print the repr of the message


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


class ResourceError(Dist2Error, OSError):
    """The system refused this process descriptors, memory, threads or a call; no rank is lost by that.

    After a message, and where a group is made, the group is usable: nothing was sent, and the call may be
    repeated. After a collective it is not: others wait in it.

    Attributes:
        call: The system call that was refused; empty if it is not known.
        errno: Its error number; None if it is not known.

    Examples:
        >>> try:
        ...     pg.send(torch.ones(1), 1 - pg.rank())
        ... except dist2.ResourceError as error:
        ...     print("close some files:", error)
    """

    def __init__(
        self,
        message: str,
        *,
        group_usable: bool = True,
        call: str = "",
        errno: int | None = None,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.group_usable = group_usable
        self.call = call
        self.errno = errno


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


class NanError(Dist2Error, ArithmeticError):
    """A group with ``check_nan=True`` was given a tensor with a NaN; nothing was sent.

    Attributes:
        tensor: The argument: ``"the input"``, or ``"inputs[2]"`` of a list.
        index: Index of its first NaN.

    Examples:
        >>> with dist2.new_group("fake", rank=0, world_size=2, check_nan=True) as checked:
        ...     try:
        ...         checked.all_reduce(torch.tensor([1.0, float("nan")]))
        ...     except dist2.NanError as error:
        ...         print(error.tensor, error.index)
        the input (1,)
    """

    def __init__(
        self, message: str, *, tensor: str = "", index: tuple[int, ...] = (), **where: Unpack[Where]
    ) -> None:
        super().__init__(message, **where)
        self.tensor = tensor
        self.index = index


class CorruptionError(Dist2Error):
    """The results of an operation of a group with ``verify=`` differ between ranks, and must not.

    Attributes:
        ranks: Group ranks whose result differs from that of most ranks; empty where there is no majority, as
            with two ranks.
        global_ranks: The same as ranks of the job.
        tensor: The result: ``"the output"``, or ``"outputs[2]"`` of a list.
        offset_bytes: Where the first block that differs begins in it.
        nbytes: Length of that block.

    Examples:
        >>> try:
        ...     pg.all_reduce(torch.ones(2))
        ... except dist2.CorruptionError as error:
        ...     print("bad memory on", error.global_ranks, "at", error.offset_bytes)
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        tensor: str = "",
        offset_bytes: int = 0,
        nbytes: int = 0,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.ranks = tuple(ranks)
        self.tensor = tensor
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the job whose result differs."""
        return self._of_job(self.ranks)


class RanksFailedError(Dist2Error):
    """Ranks that `dist2.launch.local` started raised or died; the message has the traceback of each.

    Attributes:
        errors: The exception of each rank that failed, the cause first; also the ``__cause__``. A rank that
            died has a `RuntimeError`, one that had not returned in time a `TimeoutError`.

    Examples:
        >>> try:  # doctest: +SKIP
        ...     dist2.launch.local(divmod, 2, 1, 0)
        ... except dist2.RanksFailedError as error:
        ...     print(sorted(error.errors))
        [0, 1]
    """

    def __init__(
        self, message: str, *, errors: dict[int, BaseException] | None = None, **where: Unpack[Where]
    ) -> None:
        super().__init__(message, **where)
        self.errors = errors or {}


class BackendUnavailableError(Dist2Error, ImportError):
    """The backend cannot run here; the message has the reason and the install line.

    Examples:
        >>> try:
        ...     pg = dist2.new_group("nccl", device="cuda", store=dist2.HashStore(), rank=0, world_size=1)
        ... except dist2.BackendUnavailableError as error:
        ...     print("falling back to CPU:", error)
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
