"""`Controlled`: a backend beside which a socket group watches over the members.

A library such as NCCL or MPI moves the tensors. It does not say which rank is missing, and calls that differ
between ranks may hang in it. So the group has a *control group*: a group of the socket backend with the same
members in the same order, which finds deaths, mismatches and missing ranks, and agrees on survivors. It is
made first; over it the members then meet to set up the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.consensus import Agreement
from dist2.backends.socket.backend import SocketBackend
from dist2.errors import GroupRevokedError, PeerLostError
from dist2.runtime.rank_names import RankNames

CONTROL_OPTIONS = ("transport", "host", "node", "tuning", "algorithm", "deterministic")
"""Options of a controlled group that are for its control group."""


@contextmanager
def shut_down_on_failure(made: Backend) -> Iterator[None]:
    """Shut a control group down if the ``with`` block, which makes the backend beside it, raises."""
    try:
        yield
    except BaseException as error:
        made.leaves_for(error)
        made.shutdown()
        raise


class Controlled(Backend):
    """The membership of a group, as its control group sees it.

    Args:
        spec: The group.
        control: Its control group: the same members in the same order.

    Attributes:
        control: The control group.
    """

    def __init__(self, spec: GroupSpec, control: SocketBackend) -> None:
        super().__init__(spec)
        self.control = control
        control.on_revoked = self._take_revocation
        if control.revoked is not None:
            self._take_revocation(control.revoked)

    def control_of(self, spec: GroupSpec) -> SocketBackend:
        """Return the control group of a subset of the members, who then meet over it.

        Raises:
            PeerLostError: One has left this group or died, and would not come.
        """
        self.look()
        own, members = self.spec.info.global_ranks, spec.info.global_ranks
        ends = {own[rank]: words for rank, words in {**self.departed(), **self.lost()}.items()}
        gone = {rank: ends[each] for rank, each in enumerate(members) if each in ends}
        made = self.control.split(spec)
        if gone:  # the others, which may not have found it yet, learn that this rank does not come
            with shut_down_on_failure(made):
                raise PeerLostError(spec.info.names.departed(gone), ranks=tuple(gone))
        return made

    def revoke(self, by: int) -> None:
        """Tell all members."""
        self.control.revoke(by)

    def _take_revocation(self, error: GroupRevokedError) -> None:
        self.revoked = error
        self.control.outside.wake()
        self.on_revoked(error)

    def last_seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the last operations, as the control links report them."""
        return self.control.last_seen(ranks)

    def broken_by(self, error: BaseException) -> None:
        """Tell the control group."""
        self.control.broken_by(error)

    def leaves_for(self, error: BaseException) -> None:
        """Tell the control group."""
        self.control.leaves_for(error)

    def look(self) -> None:
        """Read the control links."""
        self.control.look()

    def agree(self, flags: int, deadline_ns: int, shrinks: bool = False) -> tuple[int, Agreement]:
        """Agree over the control links, which still work after the library has failed."""
        return self.control.agree(flags, deadline_ns, shrinks)

    @property
    def names(self) -> RankNames:
        """The names of the members, with their processes."""
        return self.control.names

    def lost(self) -> Mapping[int, str]:
        """Return the group ranks that are known to have died."""
        return self.control.lost()

    def departed(self) -> Mapping[int, str]:
        """Return the group ranks that are known to have left or aborted the group."""
        return self.control.departed()

    def handle(self) -> str:
        """Return how the control group is reached."""
        return self.control.handle()
