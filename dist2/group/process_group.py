"""`ProcessGroup`: the object that users hold.

Its state is set up here, in `ProcessGroup.__init__`. Operations are spelled in its parts (`Collectives`,
`PointToPoint`, `ObjectCollectives`, and torch's spellings in `c10d`) and run by its
`OperationRunner`; `Subgroups` and `FaultTolerance` make other groups of it. A part knows `GroupParts`, not
this class.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import Store

from dist2.backends.base import Backend, GroupSpec, ignore_revocation
from dist2.c10d.methods import with_c10d_calls
from dist2.c10d.process_group import C10dApi
from dist2.c10d.spellings import with_spellings
from dist2.errors import (
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    PeerLostError,
)
from dist2.group import open_groups
from dist2.group.collectives import Collectives
from dist2.group.hooks import PreHooks, check_nan
from dist2.group.objects import ObjectCollectives
from dist2.group.point_to_point import PointToPoint
from dist2.group.verification import Verifier
from dist2.membership.fault_tolerance import FaultTolerance
from dist2.membership.monitored_barrier import monitored_barrier
from dist2.membership.subgroups import Opener, Subgroups
from dist2.operation.awaiting import in_thread
from dist2.operation.coalescing import Batch
from dist2.operation.instruments import dispatch
from dist2.operation.record import Operation
from dist2.operation.runner import OperationRunner, Timeout
from dist2.operation.signature import GroupInfo
from dist2.runtime.arguments import as_int, check_rank
from dist2.runtime.deadline import seconds
from dist2.runtime.process import cause_of
from dist2.runtime.signals import OnCtrlC, holds_no_lock, inside_library_call, on_ctrl_c, run_outside_locks
from dist2.store import PrefixStore

if TYPE_CHECKING:
    from dist2.operation.cpp_work import CppWork


@with_spellings
@with_c10d_calls
class ProcessGroup(  # type: ignore[misc]  # torch's stubs type one overload a method
    C10dApi,
    ObjectCollectives,
    Collectives,  # before the parts that declare the methods they call: type checkers take the first
    PointToPoint,
    FaultTolerance,
    Subgroups,
    PreHooks,
    TorchProcessGroup,
):
    """A set of ranks that call collectives together.

    It is a `torch.distributed.ProcessGroup`: DDP, FSDP, DTensor and functional collectives take it.
    May be used from several threads; collectives run in the order issued. Close it with `shutdown`, or
    use it as a context manager that does.

    Every member calls the same collectives in the same order, with tensors of the same dtype and, where
    not documented otherwise, as many elements. Tensors are dense, on the group's device, and may be
    non-contiguous, 0-d or empty. With ``async_op=True`` a call returns at once, and its tensors must be left
    alone until ``work.wait()``. ``timeout`` is a `timedelta` or seconds, by default the group's.

    Operations raise:
        InvalidUsageError: An argument is wrong; nothing was sent.
        MismatchError: Ranks called different operations; `expected` and `actual` have both.
        OperationTimeoutError: The limit passed; `missing` has the ranks that did not arrive.
        PeerLostError: A rank died or left; `ranks` says which.
        GroupAbortedError, GroupRevokedError: The group was closed, aborted or revoked.

    The examples of methods run on both ranks of a group ``pg`` of two.

    Examples:
        >>> with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as alone:
        ...     alone.all_reduce(torch.ones(4))
        >>> alone.is_closed
        True
    """

    if TYPE_CHECKING:  # the decorator adds these: c10d's names, with c10d's arguments
        allreduce: Callable[..., CppWork]
        allreduce_coalesced: Callable[..., CppWork]
        allgather: Callable[..., CppWork]
        allgather_coalesced: Callable[..., CppWork]
        allgather_into_tensor_coalesced: Callable[..., CppWork]
        reduce_scatter_tensor_coalesced: Callable[..., CppWork]
        alltoall: Callable[..., CppWork]
        alltoall_base: Callable[..., CppWork]
        gather_single: Callable[..., Any]
        gather_into_tensor: Callable[..., CppWork]
        recv_anysource: Callable[..., CppWork]

    def __init__(self, spec: GroupSpec, backend: Backend, open_group: Opener | None = None) -> None:
        """Args:
        spec: Its members, and the store in which they meet.
        backend: Moves its tensors.
        open_group: Makes the groups that it is merged into.

        Raises:
            InvalidUsageError: The arguments are those of torch's class; or the name is taken; or the backend
                cannot verify.
        """
        if not isinstance(spec, GroupSpec):
            raise InvalidUsageError(
                f"spec must be a GroupSpec, got {type(spec).__name__}: to make a group in a store, call "
                f"dist2.new_group(backend, store=store, rank=rank, world_size=size)"
            )
        TorchProcessGroup.__init__(self, spec.info.rank, spec.info.world_size)  # type: ignore[call-arg]  # stubs lack it
        self.spec = spec
        self.backend = backend
        self.info = spec.info
        self._runner = runner = OperationRunner(spec.info, backend, spec.timeout_s)
        self._plans = runner.plans
        self._bind_runner()
        self._open_group = open_group
        self._subgroup_counts: dict[str, int] = {}
        self._agreeing = threading.Lock()
        self._barriers = 0
        runner.on_failure = self._operation_failed
        backend.on_revoked = runner.take_revocation
        if backend.revoked is not None:  # another member revoked the group while it was set up here
            runner.take_revocation(backend.revoked)
        self._alias = ""
        self._store: Store | None = None
        try:
            if spec.verify and spec.info.world_size > 1:
                self._bind_verifier()
            open_groups.enter(self, self.info.name)
        except BaseException:
            open_groups.leave(self)
            backend.shutdown()
            raise
        if spec.check_nan:
            self.register_pre_hook(check_nan)
        dispatch.group_opened(self)

    # Identity

    def rank(self) -> int:
        """Return the caller's rank in this group.

        Examples:
            >>> pg.rank() in (0, 1)
            True
        """
        return self.info.rank

    def size(self) -> int:
        """Return how many ranks the group has.

        Examples:
            >>> pg.size()
            2
        """
        return len(self.info.global_ranks)

    def name(self) -> str:
        """Return the name of the backend (as c10d has it; the group's own is `group_name`).

        Examples:
            >>> pg.name()
            'socket'
        """
        return self.info.backend

    @property
    def group_name(self) -> str:
        """The group's name in c10d; it differs from `name` while this is torch's default group.

        Examples:
            >>> pg.split([0, 1], name="both").group_name
            'both'
        """
        return self._alias or self.info.name

    @property
    def group_desc(self) -> str:
        """Free text from the user.

        Examples:
            >>> pg.split([0, 1], desc="both ranks").group_desc
            'both ranks'
        """
        return self.info.desc

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """For each group rank, its rank in the job's first group.

        Examples:
            >>> pg.split([1, 0]).global_ranks
            (1, 0)
        """
        return self.info.global_ranks

    def global_rank(self, group_rank: int | None = None) -> int:
        """Return the global rank of a group rank; by default the caller's own.

        Args:
            group_rank: Rank in this group; None means the caller's.

        Examples:
            >>> pg.split([1, 0]).global_rank(0)
            1
        """
        if group_rank is None:
            return self.info.global_ranks[self.info.rank]
        return self.info.global_ranks[check_rank(group_rank, "group_rank", self.size())]

    def group_rank(self, global_rank: int) -> int:
        """Return the rank that a global rank has in this group.

        Args:
            global_rank: Rank in the job's first group.

        Raises:
            InvalidUsageError: It is not a member.

        Examples:
            >>> pg.split([1, 0]).group_rank(1)
            0
        """
        found = as_int(global_rank)
        if found not in self.info.global_ranks:
            raise InvalidUsageError(
                f"global_rank {global_rank!r} is not in group {self.info.name!r}, "
                f"whose global ranks are {list(self.info.global_ranks)}"
            )
        return self.info.global_ranks.index(found)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "broken" if self._runner.fault else "open"
        place = f"rank {self.rank()} of {self.size()}"
        return f"<ProcessGroup {self.info.name!r} {self.info.backend} {place}, {state}>"

    def __copy__(self) -> ProcessGroup:
        return self

    def __deepcopy__(self, memo: object) -> ProcessGroup:
        """Return itself: a module that holds a group can be copied, but a rank cannot join twice."""
        return self

    # Settings

    def get_group_store(self) -> Store:
        """Return a store of this group: private to its members, and to their keys.

        Examples:
            >>> pg.get_group_store().set("best loss", "0.25")
            >>> pg.get_group_store().get("best loss")
            b'0.25'
        """
        if self._store is None:  # made when it is first wanted: most groups never use theirs
            self._store = PrefixStore("user", self.spec.store)  # its keys are the users' alone
        return self._store

    def get_error(self) -> BaseException | None:
        """Return the error that broke the group, or None while it works.

        Examples:
            >>> pg.get_error() is None
            True
        """
        if not self.is_closed:
            self.backend.look()
        return self._runner.fault

    @property
    def is_closed(self) -> bool:
        """Whether the group was shut down or aborted in this process.

        Examples:
            >>> pg.is_closed
            False
        """
        return self._runner.closed

    @property
    def timeout_s(self) -> float:
        """Timeout of operations that name none, in seconds.

        Examples:
            >>> pg.set_timeout(30)
            >>> pg.timeout_s
            30.0
        """
        return self._runner.timeout_s

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the timeout of operations that name none.

        Args:
            timeout: A `timedelta` or seconds; positive.

        Examples:
            >>> pg.set_timeout(timedelta(minutes=1))
            >>> pg.timeout_s
            60.0
        """
        self._runner.timeout_s = seconds(timeout)

    # Progress

    @property
    def p2p_seq(self) -> int:
        """Number of the point-to-point operation issued last; the first is 1.

        Examples:
            >>> pg.p2p_seq
            0
        """
        return self._runner.queue.messages

    def queued(self) -> list[Operation]:
        """Return the operations that were issued and wait for their turn, oldest first.

        Examples:
            >>> pg.queued()
            []
        """
        return self._runner.queued()

    def waited_ns(self) -> int | None:
        """Return for how long the group's operations have waited for other ranks, in nanoseconds.

        None where the backend cannot tell this apart from moving data. The socket backend can: at fences on
        shared memory exactly, in messages as far as nothing arrived for a millisecond or longer.

        Examples:
            >>> pg.waited_ns() is None or pg.waited_ns() >= 0
            True
        """
        return self._runner.backend.waited_ns()

    def register_completion_hook(self, hook: Callable[[Operation], None]) -> Callable[[], None]:
        """Call ``hook(operation)`` after every operation of the group; return a callable that removes it.

        It runs on the thread that completed the operation. A hook that raises is logged and kept.

        Args:
            hook: Called with the finished operation.

        Raises:
            InvalidUsageError: ``hook`` is not callable.

        Examples:
            >>> seen = []
            >>> remove = pg.register_completion_hook(lambda operation: seen.append(operation.seq))
            >>> pg.barrier()
            >>> seen
            [1]
            >>> remove()
        """
        return self._runner.register_completion_hook(hook)

    # Barriers and batches

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called; on rank 0, name those that did not.

        Works through the group's store, so it can name missing ranks even where data links are stuck.

        Args:
            timeout: Limit; the group's by default.
            wait_all_ranks: Name all missing ranks instead of the first.

        Raises:
            OperationTimeoutError: A rank did not arrive: `missing` has its number.
            PeerLostError: A rank died, or left the group.

        Examples:
            >>> pg.monitored_barrier(timeout=5)
        """
        if self._runner.fault is not None:
            raise self._runner.refusal(self._runner.fault)
        limit_s = self._limit_s(timeout)
        if not self.backend.has_peers:
            return
        self._barriers += 1
        monitored_barrier(
            self.info,
            self.spec.store,
            self._barriers,
            limit_s,
            wait_all_ranks,
            self._check_all_live,
            self.backend.last_seen,
            self.backend.names,
        )

    def _check_all_live(self) -> None:
        """Raise if the group was closed here, or ranks are known to have died or left it."""
        self._runner.check_open()
        lost, names = self.backend.lost(), self.backend.names
        gone = lost or self.backend.departed()
        told = names.ended(gone) if lost else names.departed(gone)
        if gone:
            error = PeerLostError(
                f"monitored_barrier of group {self.info.name!r}: {told}",
                ranks=tuple(gone),
                group=self.info.name,
                op="monitored_barrier",
                rank=self.info.rank,
                members=self.info.global_ranks,
            )
            if lost:
                self._runner.fault = self._runner.fault or error
            raise error

    @contextmanager
    def coalescing(self) -> Iterator[Batch]:
        """Collect this thread's operations and start them together when the block ends.

        They are asynchronous: after the block, wait for each call's Work, or for all with ``batch.wait()``.
        If the block raises, none of them starts, and waiting for one raises `InvalidUsageError`.

        Examples:
            >>> tensors = [torch.ones(1), torch.ones(2)]
            >>> with pg.coalescing() as batch:
            ...     for tensor in tensors:
            ...         pg.all_reduce(tensor)
            >>> batch.wait()
            >>> tensors
            [tensor([2.]), tensor([2., 2.])]
        """
        with self._runner.collecting() as batch:
            yield batch

    # The end

    @holds_no_lock
    def shutdown(self) -> None:
        """Finish the operations issued so far, then close. Idempotent; later operations raise
        `GroupAbortedError`.

        Where this very thread is inside an operation (in a signal handler, say), that cannot be waited
        for: then it is an `abort`.

        Examples:
            >>> pg.shutdown()
            >>> pg.is_closed
            True
        """
        if self.is_closed:
            return
        if inside_library_call() or (self._runner.fault is None and not self._runner.drain()):
            self.abort()
        elif self._close("was shut down"):
            try:
                self.backend.shutdown()
            finally:
                self._runner.queue.stop()
                self._ended()

    @holds_no_lock
    def abort(self) -> None:
        """Break off running operations: blocked callers raise `GroupAbortedError`.

        Idempotent; from any thread and from signal handlers. A thread that is inside an operation cleans up
        on its way out.

        Examples:
            >>> pg.abort()
            >>> pg.is_closed
            True
        """
        if self.is_closed or not self._close("was aborted"):
            return
        self.backend.abort()
        self._runner.state.aborted = True
        run_outside_locks(f"dist2-abort-{self.info.name}", self._take_down)

    @holds_no_lock
    def _abort_for(self, error: BaseException) -> None:
        """Abort, and tell the other ranks the reason, which their errors then name."""
        open_groups.restore_cause(error, self)
        if not self.is_closed and self._runner.fault is None:
            self.backend.leaves_for(cause_of(error))
        self.abort()

    @holds_no_lock
    def _leave_for(self, error: BaseException) -> None:
        """Close if that waits for nothing, otherwise abort; ranks that need this one learn the reason."""
        if self.backend.leaves_at_once and self._runner.is_idle():
            self.backend.leaves_for(cause_of(error))
            self.shutdown()
        else:
            self._abort_for(error)

    def _identify(self, info: GroupInfo) -> None:
        if info.name != self.info.name:
            open_groups.rename(self, info.name)
        is_known = not self.is_closed
        if is_known:  # instruments know a group by its info
            dispatch.group_closed(self)
        self.info = self._runner.info = info
        self.spec = attrs.evolve(self.spec, info=info)
        self._plans.clear()  # signatures name the group
        if is_known:
            dispatch.group_opened(self)

    def _new(self, spec: GroupSpec, backend: Backend) -> ProcessGroup:
        return ProcessGroup(spec, backend, self._open_group)

    def _take_down(self) -> None:
        self._runner.release()
        self._ended()

    @on_ctrl_c(OnCtrlC.DEFER)
    def _bind_runner(self) -> None:
        """Let calls go to the runner: not by hooks, nor by a verifier."""
        self._direct_runner = self._runner
        self._run = self._unhooked_run = self._runner.run
        self._run_p2p = self._runner.run_p2p

    @on_ctrl_c(OnCtrlC.DEFER)
    def _bind_verifier(self) -> None:
        """Let collectives go by a verifier."""
        self._run = self._unhooked_run = Verifier(self, self.spec, self._refuse).run
        self._direct_runner = None

    def _operation_failed(self, operation: Operation, error: BaseException) -> None:
        """Tell other threads and other ranks about a failed operation."""
        if isinstance(error, GroupRevokedError) and self.backend.revoked is None:
            # Seen in shared memory: threads of this rank that wait for messages have not heard of it.
            self.backend.revoke(error.by)
        if not isinstance(error, Exception):  # Ctrl-C: the other ranks must not wait for this one
            self.abort()

    def _close(self, how: str) -> bool:
        """Refuse operations from now on; True for the one caller that closes the group."""
        self._runner.closed = True
        if self._runner.fault is None:
            self._runner.fault = GroupAbortedError(
                f"group {self.info.name!r} {how} in this process", group=self.info.name, rank=self.info.rank
            )
        return open_groups.leave(self)

    def _ended(self) -> None:
        dispatch.group_closed(self)
        self.backend.on_revoked = ignore_revocation
        self._runner.let_go()
        self._bind_runner()

    def _forbid(self, fault: Dist2Error) -> None:
        """After a fork, in the child: the group belongs to the parent."""
        self._runner.fault = fault
        self._runner.closed = True

    def __enter__(self) -> ProcessGroup:
        return self

    @holds_no_lock
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.shutdown()
        else:
            self._abort_for(error)

    async def __aenter__(self) -> ProcessGroup:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Do as `__exit__`, in a thread of the event loop's pool: other tasks go on."""
        if error is None:
            await in_thread(self.shutdown)
        else:
            self._abort_for(error)
