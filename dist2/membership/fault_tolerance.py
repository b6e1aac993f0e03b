"""`FaultTolerance`: how a group goes on after ranks were lost (MPI's User Level Failure Mitigation)."""

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
from dist2.membership import naming as membership
from dist2.membership.subgroups import Subgroups
from dist2.operation.runner import Timeout
from dist2.runtime.arguments import as_int, check_names, check_ranks
from dist2.runtime.deadline import deadline_in

_FLAG_BITS = 63


class FaultTolerance(Subgroups):
    """`revoke`, `agree` and `shrink`: see ``docs/membership.md``."""

    _agreeing: threading.Lock
    """Held by the thread that takes part in an agreement: there is one at a time."""

    def revoke(self) -> None:
        """Make every pending and later operation raise `GroupRevokedError`, on all ranks that live.

        A rank that has noticed a failure calls it so that no other waits for ever for one that has gone
        on. Only `agree` and `shrink` still work on a revoked group. One call by one rank is enough;
        idempotent; from any thread.

        Raises:
            GroupAbortedError: The group is closed here.
            InvalidUsageError: The backend cannot tell the others.
        """
        self._runner.check_open()
        self.backend.revoke(self.info.rank)

    def agree(self, flags: int = -1, *, timeout: Timeout = None) -> Agreement:
        """Return the same answer on all survivors: the bitwise and of their flags, and who is gone.

        Every rank that lives calls it, as often and in the same order as the others' `agree` and
        `shrink`. Works on groups that are broken or revoked, and though ranks die meanwhile. It takes no
        turn among the operations of the group.

        Args:
            flags: Any int that fits 64 bits, signed.
            timeout: Limit; the group's by default. After it the agreement is still under way: the next
                call goes on with it. Where the others have come to an end by then, the flags given first
                have counted.

        Raises:
            OperationTimeoutError: Ranks that are not known to be gone did not call: `missing` has which.
            MismatchError: Others called `shrink`. All survivors are told, and may try again.
            PeerLostError: The others hold this rank for gone.
            GroupAbortedError: The group is closed, or was aborted meanwhile.
            InvalidUsageError: The flags do not fit, or the backend has no way to agree.
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
        """Return a group of those that are left: without the dead, or without some named ranks.

        Works on a group that is broken or revoked: the survivors go on in the new one, which opens no
        connection. This group stays as it is; `abort` gives back what it holds.

        Args:
            exclude: Ranks of this group to leave out; only those that stay call, all with the same
                ranks, and without a message. By default all survivors call and `agree` on who is gone:
                ranks that died, and ranks that closed the group.
            timeout: Limit of the agreement, and of the new group's operations; this group's by default.
            name: What c10d calls the new group.
            desc: Free text.

        Raises:
            InvalidUsageError: ``exclude`` names the caller, everyone, or a rank out of range.
            OperationTimeoutError, MismatchError, PeerLostError, GroupAbortedError: As `agree`.
        """
        check_names(name, desc)
        if exclude is None:
            number, agreed = self._agree("shrink", -1, timeout)
            ranks = membership.without(self.info.world_size, agreed.failed)
            # The number is the same on all survivors, whatever each has made of this group before.
            made = self._open_subgroup(ranks, "survivors", number, timeout, name, desc)
        else:
            leaving = check_ranks(exclude, "exclude", self.info.world_size)
            if self.info.rank in leaving:
                raise InvalidUsageError(f"exclude names the calling rank {self.info.rank}: {list(leaving)}")
            ranks = membership.without(self.info.world_size, leaving)
            made = self._subgroup(ranks, "shrink", timeout, name, desc)
        assert made is not None  # the caller stays
        return made

    def _agree(self, op: str, flags: int, timeout: Timeout) -> tuple[int, Agreement]:
        """Return the number of the next agreement, and the agreement."""
        limit_s = self._limit_s(timeout)
        deadline_ns = deadline_in(limit_s)
        self._runner.check_open()  # also before the lock, which a forked child may inherit held
        with self._agreeing:
            self._runner.check_open()
            try:
                return self.backend.agree(flags, deadline_ns, op == "shrink")
            except Dist2Error as error:
                error.locate(self.info.name, op, rank=self.info.rank)
                if isinstance(error, (OperationTimeoutError, MismatchError)):
                    error.prefix(f"{op} in group {self.info.name!r}")
                if isinstance(error, OperationTimeoutError):
                    error.timeout_s = limit_s
                    error.args = (f"{error} (limit {limit_s:.3g} s)",)
                raise
