"""`FaultTolerance`: recovery of a group after the loss of ranks (MPI's User Level Failure Mitigation)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

from dist2.backends.consensus import Agreement
from dist2.errors import (
    Dist2Error,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
)
from dist2.membership import members
from dist2.membership.subgroups import Subgroups
from dist2.operation.runner import Timeout
from dist2.runtime.arguments import as_int, check_names, check_ranks
from dist2.runtime.deadline import deadline_in, remaining_s

_FLAG_BITS = 63


class FaultTolerance(Subgroups):
    """`revoke`, `agree` and `shrink`: see ``docs/membership.md``."""

    _agreeing: threading.Lock
    """Held by the thread that runs an agreement: there is one at a time."""

    def revoke(self) -> None:
        """Make every pending and later operation raise `GroupRevokedError`, on all live ranks.

        A rank that has detected a failure calls it, so that the others do not hang in operations that it has
        left. Only `agree` and `shrink` still work on a revoked group. One call by one rank is enough;
        idempotent; from any thread.

        Raises:
            GroupAbortedError: The group is closed here.
            InvalidUsageError: The backend cannot notify the others.

        Examples:
            >>> pg.revoke()
            >>> pg.shrink().size()
            2
        """
        self._runner.check_open()
        self.backend.revoke(self.info.rank)

    def agree(self, flags: int = -1, *, timeout: Timeout = None) -> Agreement:
        """Return the same result on all survivors: the bitwise and of their flags, and the lost ranks.

        Every live rank calls it; all ranks call `agree` and `shrink` equally often, in the same order. Works
        on groups that are broken or revoked, and while ranks die. It is not ordered with the operations of
        the group.

        Args:
            flags: Any int that fits 64 bits, signed.
            timeout: Limit; the group's by default. After a timeout the agreement is still under way: the next
                call continues it. If the others have finished by then, the flags of the first call count.

        Raises:
            OperationTimeoutError: Ranks that are not known to be lost did not call; `missing` has them.
            MismatchError: Others called `shrink`. It raises on all survivors, and they may try again.
            PeerLostError: The others consider this rank lost.
            GroupAbortedError: The group is closed, or was aborted during the call.
            InvalidUsageError: The flags do not fit, or the backend has no way to agree.

        Examples:
            >>> agreement = pg.agree(0b01 if pg.rank() == 0 else 0b11)
            >>> agreement.flags, agreement.failed
            (1, ())
        """
        given = as_int(flags)
        if given is None or given >> _FLAG_BITS not in (0, -1):
            raise InvalidUsageError(f"flags must be an int that fits 64 bits, signed, got {flags!r}")
        return self._agree("agree", given, timeout)[1]

    def shrink(
        self,
        exclude: Sequence[int] | None = None,
        *,
        timeout: Timeout = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> Self:
        """Return a group of the remaining ranks: without the lost ones, or without the given ones.

        Works on a group that is broken or revoked: the survivors continue in the new one, which opens no
        connection. This group does not change; `abort` releases its resources.

        Args:
            exclude: Ranks of this group to leave out; only the remaining ranks call, all with the same
                argument, and exchange no message. By default all survivors call and `agree` on the lost
                ranks: those that died, and those that closed the group.
            timeout: Limit of the agreement, and of the new group's operations; this group's by default.
            name: The new group's name in c10d.
            desc: Free text.

        Raises:
            InvalidUsageError: ``exclude`` names the caller, everyone, or a rank out of range.
            OperationTimeoutError, MismatchError, PeerLostError, GroupAbortedError: As `agree`.

        Examples:
            >>> survivors = pg.shrink()
            >>> survivors.size()
            2
        """
        check_names(name, desc)
        if exclude is None:
            number, agreed = self._agree("shrink", -1, timeout)
            ranks = members.without(self.info.world_size, agreed.failed)
            # the agreement's number is the same on all survivors; counts of earlier groups may differ
            made = self._open_subgroup(ranks, "survivors", number, timeout, name, desc)
        else:
            leaving = check_ranks(exclude, "exclude", self.info.world_size)
            if self.info.rank in leaving:
                me = self.info.names([self.info.rank])
                raise InvalidUsageError(f"exclude names the calling {me}: {list(leaving)}")
            ranks = members.without(self.info.world_size, leaving)
            made = self._subgroup(ranks, "shrink", timeout, name, desc)
        assert made is not None  # the caller stays
        return made

    def _agree(self, op: str, flags: int, timeout: Timeout) -> tuple[int, Agreement]:
        """Return the number of the next agreement, and the agreement."""
        limit_s = self._limit_s(timeout)
        deadline_ns = deadline_in(limit_s)
        self._runner.check_open()  # also before the lock, which a forked child may inherit held
        if not self._agreeing.acquire(timeout=remaining_s(deadline_ns)):
            raise OperationTimeoutError(
                f"{op} in group {self.info.name!r}: another thread of this rank has not agreed within "
                f"{limit_s:.3g} s",
                timeout_s=limit_s,
            )
        try:
            self._runner.check_open()
            try:
                return self.backend.agree(flags, deadline_ns, op == "shrink")
            except Dist2Error as error:
                error.locate(self.info.name, op, rank=self.info.rank, members=self.info.global_ranks)
                if isinstance(error, (OperationTimeoutError, MismatchError)):
                    error.prefix(f"{op} in group {self.info.name!r}")
                if isinstance(error, OperationTimeoutError):
                    error.timeout_s = limit_s
                    error.args = (f"{error} (limit {limit_s:.3g} s)",)
                raise
        finally:
            self._agreeing.release()
