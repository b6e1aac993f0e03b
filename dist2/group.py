"""`ProcessGroup`: the object that users hold."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch.distributed import Store

from dist2 import membership, merging
from dist2 import validation as check
from dist2.backend_view import BackendView, view_of
from dist2.backends.base import Backend, GroupSpec
from dist2.c10d_methods import C10dMethods
from dist2.clock import deadline_in, remaining_s, seconds
from dist2.coalescing import Batch
from dist2.errors import GroupAbortedError, InvalidUsageError, OperationTimeoutError
from dist2.funnel import Timeout
from dist2.hooks import dispatch
from dist2.monitored_barrier import monitored_barrier
from dist2.operation import Operation
from dist2.store import PrefixStore
from dist2.work import Work

_c10d: Any = torch._C._distributed_c10d

Opener = Callable[[GroupSpec], "ProcessGroup"]


class ProcessGroup(C10dMethods):
    """A set of ranks that call collectives together.

    It is a `torch.distributed.ProcessGroup`: DDP, FSDP, DTensor and functional collectives take it.
    May be used from several threads; collectives run in the order issued. Close it with `shutdown`, or
    use it as a context manager that does.
    """

    def __init__(self, spec: GroupSpec, backend: Backend, open_group: Opener | None = None) -> None:
        """Args:
        spec: Who is in it, and where they meet.
        backend: What moves its tensors.
        open_group: Makes the groups that it is merged into.
        """
        super().__init__(spec, backend)
        self._open_group = open_group
        self._closed = False
        self._barriers = 0
        self._made: Counter[str] = Counter()
        self._registered = False
        try:
            self._register_name(self.info.name)
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
        if global_rank not in self.info.global_ranks:
            raise InvalidUsageError(
                f"global_rank {global_rank!r} is not in group {self.info.name!r}, "
                f"whose global ranks are {list(self.info.global_ranks)}"
            )
        return self.info.global_ranks.index(global_rank)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._fault else "open"
        place = f"rank {self.rank()} of {self.size()}"
        return f"<ProcessGroup {self.info.name!r} {self.info.backend} {place}, {state}>"

    # Settings

    @property
    def timeout_s(self) -> float:
        """The limit of operations that name none, in seconds."""
        return self._timeout_ns / 1e9

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the limit of operations that name none."""
        self._timeout_ns = int(seconds(timeout) * 1e9)

    def get_group_store(self) -> Store:
        """Return the store of this group: private to its members."""
        return self.spec.store

    def get_error(self) -> BaseException | None:
        """Return what broke the group, or None while it works."""
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
        """
        if self._fault is not None:
            raise self._refusal(self._fault)
        limit_s = self.timeout_s if timeout is None else seconds(timeout)
        self._barriers += 1
        monitored_barrier(self.info, self.spec.store, self._barriers, limit_s, wait_all_ranks)

    @contextmanager
    def coalescing(self) -> Iterator[Batch]:
        """Collect this thread's operations and start them together when the block ends.

        They are asynchronous: wait for each call's Work, or for all with ``batch.wait()``. If the block
        raises, none of them starts, and waiting for one raises `InvalidUsageError`.
        """
        with self._collecting() as batch:
            yield batch

    # Groups made from this one

    def split(
        self,
        ranks: Sequence[int],
        *,
        timeout: Timeout = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> ProcessGroup | None:
        """Return a group of some of these ranks, renumbered in the order given; None on other ranks.

        Only the named ranks need to call, all with the same list; others may, and get None. Nothing
        new is connected.

        Args:
            ranks: Ranks of this group.
            timeout: Limit of the new group's operations; this group's by default.
            name: What c10d calls the new group.
            desc: Free text.

        Raises:
            InvalidUsageError: A rank is out of range or named twice.
        """
        chosen = check.check_ranks(ranks, "ranks", self.size())
        return self._subgroup(chosen, "split", timeout, name, desc)

    def split_by(
        self,
        color: int | None,
        key: int = 0,
        *,
        timeout: Timeout = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> ProcessGroup | None:
        """Split the whole group by color (as MPI_Comm_split): ranks of one color make a group.

        Every rank must call.

        Args:
            color: Any int that fits 62 bits; None joins no group and returns None.
            key: Orders the ranks of the new group; equal keys keep the order of this one.
        """
        for argument, value in (("color", color), ("key", key)):
            if value is not None and (not isinstance(value, int) or abs(value) >= 1 << 62):
                raise InvalidUsageError(f"{argument} must be an int that fits 62 bits, got {value!r}")
        mine = torch.tensor([color is not None, color or 0, key], dtype=torch.int64)
        everyone = torch.empty(self.size(), 3, dtype=torch.int64)
        self.all_gather_single(everyone, mine, timeout)
        rows: list[list[int]] = everyone.tolist()
        if color is None:
            return None
        choices = [(chosen if joins else -(1 << 62), order) for joins, chosen, order in rows]
        ranks = membership.by_color(choices, self.info.rank)
        return self._subgroup(ranks, "split", timeout, name, desc)

    def shrink(
        self,
        exclude: Sequence[int],
        *,
        timeout: Timeout = None,
        name: str | None = None,
        desc: str | None = None,
    ) -> ProcessGroup:
        """Return a group without some ranks. Only those that stay may call.

        Works on a group that a dead rank has broken: the survivors go on in the new one.

        Args:
            exclude: Ranks of this group to leave out.

        Raises:
            InvalidUsageError: It names the caller, everyone, or a rank out of range.
        """
        leaving = check.check_ranks(exclude, "exclude", self.size())
        if self.info.rank in leaving:
            raise InvalidUsageError(f"exclude names the calling rank {self.info.rank}: {list(leaving)}")
        ranks = membership.without(self.size(), leaving)
        shrunk = self._subgroup(ranks, "shrink", timeout, name, desc)
        assert shrunk is not None  # the caller stays, as checked above
        return shrunk

    def _subgroup(
        self, ranks: tuple[int, ...], kind: str, timeout: Timeout, name: str | None, desc: str | None
    ) -> ProcessGroup | None:
        if self._closed:
            raise self._refusal(self._fault) if self._fault else _closed(self)
        if self.info.rank not in ranks:
            return None
        label = f"{kind}{ranks}"
        info = membership.subgroup(self.info, ranks, self._made[label], kind, name, desc)
        self._made[label] += 1
        spec = attrs.evolve(
            self.spec,
            info=info,
            store=PrefixStore(f"{kind}/{info.uid.rsplit('/', 1)[-1]}", self.spec.store),
            timeout_s=self.timeout_s if timeout is None else seconds(timeout),
        )
        return ProcessGroup(spec, self.backend.split(spec), self._open_group)

    # The end

    def shutdown(self) -> None:
        """Finish what was issued, then close. Idempotent; later operations raise `GroupAbortedError`."""
        if self._closed:
            return
        if self._fault is None and not self._drain():
            self.abort()
            return
        self._close("was shut down")
        try:
            self.backend.shutdown()
        finally:
            self._lane.stop()
            self._ended()

    def _drain(self) -> bool:
        """Wait for what was issued, messages as well; False if that took longer than the group's limit."""
        deadline_ns = deadline_in(self.timeout_s)
        if not self._lane.drain(self.timeout_s):
            return False
        with self._in_flight_lock:
            pending = [work._pending for work in self._in_flight if work._pending is not None]
        return not wait(pending, remaining_s(deadline_ns)).not_done

    def abort(self) -> None:
        """Break off what is running: blocked callers raise `GroupAbortedError`.

        Idempotent; from any thread and from signal handlers. Whoever is inside an operation cleans up
        on the way out.
        """
        if self._closed:
            return
        self._close("was aborted")
        self.backend.abort()
        self._aborted = True
        self._release()
        self._ended()

    def _close(self, how: str) -> None:
        self._closed = True
        if self._fault is None:
            self._fault = GroupAbortedError(
                f"group {self.info.name!r} {how} in this process", group=self.info.name, rank=self.info.rank
            )
        with _names_lock:  # at once, so that a name that no open group has is free
            self._unregister_name()
            _open_groups.discard(self)

    def _ended(self) -> None:
        dispatch.group_closed(self)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.shutdown()
        else:
            self.abort()

    # What torch's own code asks for

    def getGroupName(self) -> str:  # noqa: N802 - called by torch's C++
        return self.info.name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - called by torch's C++
        self._set_group_name(name)

    def getGroupDesc(self) -> str:  # noqa: N802 - called by torch's C++
        return self.info.desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - called by torch's C++
        self._set_group_desc(desc)

    def getSize(self) -> int:  # noqa: N802 - called by torch's C++
        return self.size()

    def _set_group_name(self, name: str) -> None:
        """Rename the group: as in c10d, whoever gives a name registers it with torch's C++."""
        self._unregister_name()
        self._rename(attrs.evolve(self.info, name=name))

    def _register_name(self, name: str) -> None:
        """Let torch's C++ find the group by name; it holds it weakly.

        Raises:
            InvalidUsageError: Another group of this process has the name.
        """
        with _names_lock:
            namesakes = [group for group in open_groups() if group.info.name == name and group is not self]
            if any(group.info.uid != self.info.uid for group in namesakes):
                raise InvalidUsageError(f"name {name!r} is taken by another group of this process")
            _open_groups.add(self)
            if not namesakes:  # ranks that are threads: the name can stand for one of them only
                _c10d._register_process_group(name, self)
                self._registered = True

    def _unregister_name(self) -> None:
        if self._registered:
            _c10d._unregister_process_group(self.info.name)
            self._registered = False

    def _set_group_desc(self, desc: str) -> None:
        self._rename(attrs.evolve(self.info, desc=desc))

    def _rename(self, info: Any) -> None:
        self.info = info
        self.spec = attrs.evolve(self.spec, info=info)
        self._plans.clear()  # signatures name the group

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every group counts from 1."""

    def _get_sequence_number_for_group(self) -> int:
        return self._lane.seq

    def _get_backend_name(self) -> str:
        return self.info.backend

    def _has_hooks(self) -> bool:
        return bool(self._hooks)

    def _enable_collectives_timing(self) -> None:
        """Times are always taken."""

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], None]) -> None:
        self.register_completion_hook(lambda operation: hook(WorkInfo.of(operation)))

    def _wait_for_pending_works(self) -> None:
        if not self._drain():
            raise OperationTimeoutError(
                f"operations of group {self.info.name!r} were still running after {self.timeout_s} s",
                group=self.info.name,
                timeout_s=self.timeout_s,
            )

    def _start_coalescing(self, device_type: torch.device | None = None) -> None:
        self._open_batch()

    def _end_coalescing(self, device_type: torch.device | None = None) -> Work:
        batch = self._close_batch()
        batch.issue()
        return self._combined(batch, async_op=True)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.backend.device_types]

    def _get_backend(self, device: torch.device) -> BackendView:
        return view_of(self, device)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ProcessGroup | None:
        """Do `split`, with c10d's arguments."""
        return self.split(ranks, timeout=timeout, name=group_name, desc=group_desc)

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | float = timedelta(minutes=30),
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """Return a group of the members of this group and of others, who all call it with the same store.

        A newcomer brings a group of its own, be it of one rank. This group stays as it is.

        Args:
            store: Where all meet; for one merge only (or a `PrefixStore` each).
            size: How many ranks there are in all groups together.
            timeout: Limit of the meeting, and of the new group's operations.
            group_name: What c10d calls the new group.
            group_desc: Free text.

        Raises:
            InvalidUsageError: ``size`` is less than this group's, or too many came.
            OperationTimeoutError: Too few came in time.
        """
        if self._closed:
            raise self._refusal(self._fault) if self._fault else _closed(self)
        if self._open_group is None:
            raise InvalidUsageError(f"group {self.info.name!r} cannot be merged: `new_group` did not make it")
        limit_s = seconds(timeout)
        info = merging.meet(self.info, store, size, limit_s, group_name, group_desc)
        meeting = PrefixStore("merge/group", store)
        return self._open_group(attrs.evolve(self.spec, info=info, store=meeting, timeout_s=limit_s))


@attrs.frozen
class WorkInfo:
    """What c10d's completion hooks are told."""

    op_type: object
    seq: int
    time_started: float
    time_finished: float
    active_duration: timedelta

    @classmethod
    def of(cls, operation: Operation) -> WorkInfo:
        work = Work(operation, ())
        spent_us = (operation.finished_ns - operation.started_ns) / 1e3
        return cls(
            op_type=work._get_op_type(),
            seq=operation.seq,
            time_started=operation.started_ns / 1e9,
            time_finished=operation.finished_ns / 1e9,
            active_duration=timedelta(microseconds=spent_us),
        )


_names_lock = threading.RLock()  # an abort may come in a signal handler whose frame holds it
# Held until closed: torch's C++ may hold the C++ half of a group, or find it by name, after users let go.
_open_groups: set[ProcessGroup] = set()

_inherited: list[ProcessGroup] = []

_EXIT_S = 5.0
"""How long the end of the interpreter waits for groups that nobody closed."""


def open_groups() -> list[ProcessGroup]:
    """Return the groups of this process that were not closed yet."""
    return list(_open_groups)


def _closed(group: ProcessGroup) -> GroupAbortedError:
    return GroupAbortedError(f"group {group.info.name!r} is closed", group=group.info.name)


def _forbid_in_child() -> None:
    """After a fork: a group's links and numbers belong to the parent."""
    for group in list(_open_groups):
        group._fault = GroupAbortedError(
            f"group {group.info.name!r} belongs to the parent process; after a fork, make a new group",
            group=group.info.name,
            rank=group.info.rank,
        )
        group._closed = True
    # Never destroyed here: the destructors of torch's C++ would wait for threads that only the parent has.
    _inherited.extend(_open_groups)
    _open_groups.clear()


def _abort_forgotten() -> None:
    """At exit: take down groups that nobody closed, so that no thread or peer waits for them."""
    forgotten = open_groups()
    for group in forgotten:
        group.abort()
    deadline_ns = deadline_in(_EXIT_S)
    for group in forgotten:
        group.backend.settle(remaining_s(deadline_ns))
    for group in forgotten:
        warnings.warn(
            f"{group!r} was never closed: call shutdown(), or use it as a context manager",
            ResourceWarning,
            stacklevel=1,
        )


atexit.register(_abort_forgotten)
os.register_at_fork(after_in_child=_forbid_in_child)
