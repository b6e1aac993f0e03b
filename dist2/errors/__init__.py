"""Exceptions. Each tells the failure, the ranks at fault, and whether the group is still usable.

`Dist2Error` is the root. Where torch or Python has a matching type, ours is one too, so existing
``except`` clauses keep working. ``docs/errors.md`` has the remedy for each.

Types without a base of torch are here. The others are in `dist2.errors.of_torch`, which is loaded when the
first of them is used: commands such as ``dist2 ps`` start without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

if TYPE_CHECKING:
    from dist2.errors.of_torch import *  # noqa: F403 - it lists its names


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


def __getattr__(name: str) -> type[Dist2Error]:
    """Return a type with a base of torch."""
    if not name.startswith("_"):
        of_torch = import_module(f"{__name__}.of_torch")
        if name in of_torch.__all__:
            found: type[Dist2Error] = getattr(of_torch, name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
