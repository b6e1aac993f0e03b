"""`ProcessGroup`: the object that users hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

from dist2 import open_groups
from dist2 import validation as check
from dist2.backends.base import Backend, GroupSpec
from dist2.clock import seconds
from dist2.coalescing import Batch
from dist2.errors import GroupAbortedError, InvalidUsageError, PeerLostError
from dist2.funnel import Timeout
from dist2.hooks import dispatch
from dist2.interrupts import aside, in_the_midst
from dist2.monitored_barrier import monitored_barrier
from dist2.operation import Operation
from dist2.subgroups import Opener
from dist2.torch_face import TorchFace


class ProcessGroup(TorchFace):
    """A set of ranks that call collectives together.

    It is a `torch.distributed.ProcessGroup`: DDP, FSDP, DTensor and functional collectives take it.
    May be used from several threads; collectives run in the order issued. Close it with `shutdown`, or
    use it as a context manager that does.

    Every member calls the same collectives in the same order, with tensors of the same dtype and, where
    nothing else is said, the same number of elements. Tensors are dense, on the group's device, and may be
    non-contiguous, 0-d or empty. With ``async_op=True`` a call returns at once, and its tensors must be left
    alone until ``work.wait()``. ``timeout`` is a `timedelta` or seconds, by default the group's.

    Operations raise:
        InvalidUsageError: An argument is wrong; nothing was sent.
        MismatchError: Ranks called different things; `expected` and `actual` say what.
        OperationTimeoutError: The limit passed; `missing` has the ranks that did not arrive.
        PeerLostError: A rank died or left; `ranks` says which.
        GroupAbortedError, GroupRevokedError: The group was closed, aborted or revoked.
    """

    def __init__(self, spec: GroupSpec, backend: Backend, open_group: Opener | None = None) -> None:
        """Args:
        spec: Its members, and where they meet.
        backend: What moves its tensors.
        open_group: Makes the groups that it is merged into.
        """
        super().__init__(spec, backend, open_group)
        self._barriers = 0
        try:
            open_groups.enter(self, self.info.name)
        except InvalidUsageError:
            backend.shutdown()
            raise
        dispatch.group_opened(self)

    # Identity

    def rank(self) -> int:
        """Return the caller's rank in this group."""
        return self.info.rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return len(self.info.global_ranks)

    def name(self) -> str:
        """Return the name of the backend (as c10d has it; the group's own is `group_name`)."""
        return self.info.backend

    @property
    def group_name(self) -> str:
        """What c10d calls the group."""
        return self.info.name

    @property
    def group_desc(self) -> str:
        """Free text from the user."""
        return self.info.desc

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """For each group rank, its rank in the job's first group."""
        return self.info.global_ranks

    def global_rank(self, group_rank: int | None = None) -> int:
        """Return the global rank of a group rank; by default the caller's own."""
        if group_rank is None:
            return self.info.global_ranks[self.info.rank]
        return self.info.global_ranks[check.check_rank(group_rank, "group_rank", self.size())]

    def group_rank(self, global_rank: int) -> int:
        """Return the rank that a global rank has in this group.

        Raises:
            InvalidUsageError: It is not a member.
        """
        found = check.whole(global_rank)
        if found not in self.info.global_ranks:
            raise InvalidUsageError(
                f"global_rank {global_rank!r} is not in group {self.info.name!r}, "
                f"whose global ranks are {list(self.info.global_ranks)}"
            )
        return self.info.global_ranks.index(found)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._fault else "open"
        place = f"rank {self.rank()} of {self.size()}"
        return f"<ProcessGroup {self.info.name!r} {self.info.backend} {place}, {state}>"

    def __copy__(self) -> ProcessGroup:
        return self

    def __deepcopy__(self, memo: object) -> ProcessGroup:
        """Return itself: what holds a group, a module say, can be copied, and a rank's place cannot."""
        return self

    # Settings

    def get_group_store(self) -> Store:
        """Return the store of this group: private to its members."""
        return self.spec.store

    def get_error(self) -> BaseException | None:
        """Return what broke the group, or None while it works."""
        if not self._closed:
            self.backend.look()
        return self._fault

    # Barriers and batches

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called; on rank 0, name those that did not.

        Works through the group's store, so it can tell who is missing even where data links are stuck.

        Args:
            timeout: Limit; the group's by default.
            wait_all_ranks: Name all missing ranks instead of the first.

        Raises:
            OperationTimeoutError: A rank did not come: `missing` has which.
            PeerLostError: A rank died.
        """
        if self._fault is not None:
            raise self._refusal(self._fault)
        limit_s = self.timeout_s if timeout is None else seconds(timeout)
        self._barriers += 1
        monitored_barrier(
            self.info,
            self.spec.store,
            self._barriers,
            limit_s,
            wait_all_ranks,
            self._check_all_live,
            self.backend.last_seen,
        )

    def _check_all_live(self) -> None:
        """Raise if the group was closed here, or ranks are known to have died."""
        self._check_open()
        lost = self.backend.lost()
        if lost:
            error = PeerLostError(
                f"monitored_barrier of group {self.info.name!r}: rank(s) {', '.join(map(str, lost))} died",
                ranks=lost,
                group=self.info.name,
                op="monitored_barrier",
                rank=self.info.rank,
            )
            self._fault = self._fault or error
            raise error

    @contextmanager
    def coalescing(self) -> Iterator[Batch]:
        """Collect this thread's operations and start them together when the block ends.

        They are asynchronous: after the block, wait for each call's Work, or for all with ``batch.wait()``.
        If the block raises, none of them starts, and waiting for one raises `InvalidUsageError`.
        """
        with self._collecting() as batch:
            yield batch

    # The end

    def shutdown(self) -> None:
        """Finish what was issued, then close. Idempotent; later operations raise `GroupAbortedError`.

        Where this very thread is inside an operation (in a signal handler, say), that cannot be waited
        for: then it is an `abort`.
        """
        if self._closed:
            return
        if in_the_midst() or (self._fault is None and not self._drain()):
            self.abort()
        elif self._close("was shut down"):
            try:
                self.backend.shutdown()
            finally:
                self._lane.stop()
                self._ended()

    def abort(self) -> None:
        """Break off what is running: blocked callers raise `GroupAbortedError`.

        Idempotent; from any thread and from signal handlers. Whoever is inside an operation cleans up
        on the way out.
        """
        if self._closed or not self._close("was aborted"):
            return
        self.backend.abort()
        self._standing.aborted = True
        aside(f"dist2-abort-{self.info.name}", self._take_down)

    def _abort_for(self, error: BaseException) -> None:
        """Break off what is running, and tell the others why this rank does: what they raise has it."""
        if not self._closed and self._fault is None:
            self.backend.leaves_for(error)
        self.abort()

    def _take_down(self) -> None:
        self._release()
        self._ended()

    def _break(self, operation: Operation, error: BaseException) -> None:
        super()._break(operation, error)
        if not isinstance(error, Exception):  # Ctrl-C: the others are not to wait for this rank
            self.abort()

    def _close(self, how: str) -> bool:
        """Refuse operations from now on; True for the one who closes it."""
        self._closed = True
        if self._fault is None:
            self._fault = GroupAbortedError(
                f"group {self.info.name!r} {how} in this process", group=self.info.name, rank=self.info.rank
            )
        return open_groups.leave(self)

    def _ended(self) -> None:
        dispatch.group_closed(self)
        self._let_go()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.shutdown()
        else:
            self._abort_for(error)
