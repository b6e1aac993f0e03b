"""Records of operations: made at their begin, told to instruments, counted.

All of it relies on the interpreter lock.
"""

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from dist2.errors import Dist2Error
from dist2.operation.coalescing import Batch
from dist2.operation.execution import Execute
from dist2.operation.plan_cache import AnyPlans
from dist2.operation.signature import GroupInfo, Signature

_Operation = TypeVar("_Operation", bound=Record)
_Told = TypeVar("_Told")

class Record:
    """The fields of a record; `dist2.operation.signature.Operation` documents them.

    The garbage collector knows it once it has an error: nothing else in it can lead back to it.

    Attributes:
        places: The address at which C keeps the addresses of the call's tensors, or 0.
    """

    signature: Any
    seq: int
    deadline_ns: int
    created_ns: int
    started_ns: int
    finished_ns: int
    error: BaseException | None
    code: CodeType | None
    instruction: int
    is_async: bool
    source: int
    places: int
    def __init__(
        self, signature: Any, seq: int, created_ns: int, deadline_ns: int, is_async: bool
    ) -> None: ...
    @classmethod
    def begun(cls, signature: Any, limit_ns: int, is_async: bool, here: str | tuple[str, ...]) -> Self:
        """Return the record of a call that begins now.

        Args:
            signature: Signature of the call.
            limit_ns: Its timeout, in nanoseconds.
            is_async: Whether the caller asked for a Work to wait on.
            here: Directories of the library. Frames of files whose names begin with one of these are skipped
                to find the user's call site; if all are skipped, it is the outermost frame.
        """

def tell(
    told: tuple[Callable[[_Told], object], ...],
    operation: _Told,
    failed: Callable[[Callable[[_Told], object], Exception], None],
) -> None:
    """Call each of ``told`` with an operation.

    Args:
        told: The callables, in order.
        operation: Their argument.
        failed: Called with a callable that raised, and its exception, if that is an `Exception`; the others
            are still called.

    Raises:
        BaseException: Any that is no `Exception`, and exceptions of ``failed``.
    """

def adopt(work_type: type, prepare: Callable[[Any], None], /) -> bool:
    """Set the type of the objects that an `OperationRunner` returns, the only one of the process.

    Objects without references are reused, unless C++ code refers to their C++ half.

    Args:
        work_type: `dist2.operation.work.Work`, which has slots and no dictionary.
        prepare: Called with a new object in place of its constructor.

    Returns:
        Whether they are reused: not if references to their C++ half cannot be counted.

    Raises:
        TypeError: It lacks a slot; or another type was adopted before.
    """

def find_marks(
    samples: tuple[tuple[Tensor, int, int, bool, int, int, int], ...], /
) -> tuple[int, int, int, int, int]:
    """Find the marks of tensors: a bit set in which torch keeps their properties.

    Args:
        samples: Tensors, each with the address of its C++ half, its marks, whether it is plain, the address
            of its storage, that of its values, and the storage's length in bytes. Some must not be plain.

    Returns:
        The offset in an object of the address of its C++ half, the offset of the marks in that half, and all
        marks of plain tensors; these are 0 if there is not exactly one offset for each, or if no mark
        distinguishes a sample that is not plain. And the offset in that half of the storage's address; 0
        if it is not known, or if a storage does not have the address of the values at the known offset. And
        the offset in the storage of its length; 0 if it is not known.
    """

class Counters(Sequence[int]):
    """The numbers of one series: a list of 69 integers, all 0 at first."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> int: ...  # type: ignore[override]
    def __setitem__(self, place: int, value: int) -> None: ...
    def add(self, counters: Counters, /) -> None:
        """Add others' counts, in one step; of the longest durations and the last numbers the larger stay."""

class Counting(Generic[_Operation]):
    """Counts operations that ended: `observability.metrics.Metrics.operation_finished` in C.

    Args:
        in_flight: Operations are removed from it.
        by_signature: The counters. A new signature gets new `Counters`.
        rare: Called with operations that failed, and with operations of new signatures if there are many
            already.
        fresh: Gets signatures with their new counters, which have no labels yet.
    """

    def __init__(
        self,
        in_flight: set[_Operation],
        by_signature: dict[Signature, Any],
        rare: Callable[[_Operation], None],
        fresh: list[tuple[Signature, Any]],
    ) -> None: ...
    def __call__(self, operation: _Operation) -> None: ...

class Tally:
    """A count.

    Attributes:
        count: 0 at first.
    """

    count: int
    def __init__(self) -> None: ...

class Tallying(Generic[_Operation]):
    """Counts messages: `observability.flight_recorder.FlightRecorder.operation_finished` in C.

    Args:
        kinds: Values of `signature.kind` that are messages.
        by_signature: The tallies.
        rare: Called with operations that failed, and with messages without a `Tally`.
    """

    def __init__(
        self,
        kinds: tuple[object, ...],
        by_signature: dict[Signature, Any],
        rare: Callable[[_Operation], None],
    ) -> None: ...
    def __call__(self, operation: _Operation) -> None: ...

class Ring(Generic[_Operation]):
    """The operations begun last, and the last ones of each watched group.

    One ring for all groups would hold none of a group that is seldom used, as soon as a busy group has filled
    it. So an operation that a later one displaces goes into a smaller ring of its group. That costs nothing
    until the ring is full, and then a look-up.

    Args:
        capacity: How many of all groups.
        kept: How many displaced ones of each watched group.
    """

    def __init__(self, capacity: int, kept: int) -> None: ...
    def __call__(self, operation: _Operation) -> None:
        """Add an operation."""
    @property
    def is_full(self) -> bool:
        """Whether earlier operations may have been displaced."""
    def recent(self) -> list[_Operation]:
        """Return the operations begun last, in order."""
    def displaced(self) -> list[_Operation]:
        """Return earlier operations of the watched groups, group by group, in order."""
    def watch(self, group: GroupInfo) -> None:
        """Keep displaced operations of a group."""
    def forget(self, group: GroupInfo) -> None:
        """Keep none of them any more."""
    def replace(self, old: _Operation, new: _Operation) -> bool:
        """Put an operation in the place of another; return whether that was there."""
    def clear(self) -> None:
        """Forget all operations and groups."""

class QueueState:
    """One thread has the turn; others queue for it, or are inside an operation that takes no turn.

    Each method is one atomic step.

    Attributes:
        drainers: Number of threads that wait until the queue is empty.
    """

    drainers: int
    @property
    def seq(self) -> int:
        """Number of the collective issued last; the first is 1."""
    @property
    def messages(self) -> int:
        """Number of the message issued last; the first is 1."""
    @property
    def idle(self) -> bool:
        """Whether the turn is free and nothing is queued."""
    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread has the turn."""
    @property
    def empty(self) -> bool:
        """Whether no thread is inside an operation, and nothing is queued."""
    def enter(self) -> int:
        """Take the turn if it is free and nothing is queued. Return the operation's number, or else 0."""
    def left(self) -> bool:
        """Give the turn back. Return whether a thread waits for it, or for the queue to become empty."""
    def lay_down(self) -> bool:
        """Like `left`, where the same thread is likely to take the turn again soon."""
    def pass_on(self) -> bool:
        """Pop the next queued job without releasing the turn. Return False if the queue is empty."""
    def enter_beside(self) -> None:
        """Note that a thread is inside an operation that takes no turn."""
    def leave_beside(self) -> None:
        """Note that it has left."""
    def number_message(self) -> int:
        """Return the number of a message, which takes no turn."""
    def issue(self) -> int:
        """Queue an operation. Return its number."""
    def enter_queued(self) -> bool:
        """Take the turn for the oldest queued job. Return False if there is none, or the turn is taken."""
    def await_job(self, idle_s: float, /) -> bool:
        """Wait until a queued job could run and its caller does not run it.

        Returns:
            Whether there is such a job; False if there was none for ``idle_s`` seconds, or after `end`.
        """
    def hurry(self) -> None:
        """Have `await_job` return at once if something is queued: its caller will not run it."""
    def end(self) -> None:
        """Have `await_job` return once nothing is queued."""
    def close(self) -> bool:
        """Close if no thread is inside and nothing is queued. True once, for the caller that cleans up."""

class GroupState:
    """State on which a group's calls depend, besides their arguments, as plain values.

    Args:
        limit_ns: Limit of operations that name none, in nanoseconds.

    Attributes:
        fault: The error with which the group refuses operations; None while it accepts them.
        aborted: The last thread to leave the group must release its resources.
        hooks: Called after every operation.
    """

    limit_ns: int
    fault: Dist2Error | None
    aborted: bool
    hooks: tuple[Callable[[Any], None], ...]
    @property
    def batches(self) -> dict[int, Batch]:
        """The batch that collects a thread's operations, by thread id."""
    def __init__(self, limit_ns: int) -> None: ...

class Plan:
    """The signature of a set of calls, and the callable that runs them."""

    @property
    def signature(self) -> Signature: ...
    @property
    def execute(self) -> Execute: ...
    def __init__(self, signature: Signature, execute: Execute) -> None: ...

class Plans(AnyPlans):
    """The plans of a group, for tensors that are plain: see `dist2.operation.plan_cache.AnyPlans`.

    Args:
        others: Plans of calls with other tensors.
        api: The capsule ``__dlpack_c_exchange_api__`` of torch's tensors: DLPack 1.x.
        tensor_types: Types of tensors without hidden properties; tensors of other types go to ``others``.
        is_odd: Tells whether a tensor is lazily negated, or reaches beyond its storage.
        marks: The result of `find_marks`. For tensors with the marks of plain ones ``is_odd`` is not called
            if the offset of the storage's length is known.

    Raises:
        ValueError: The capsule has another version, or cannot read tensors.
    """

    def __init__(
        self,
        others: AnyPlans,
        api: object,
        tensor_types: tuple[type[Tensor], ...],
        is_odd: Callable[[Tensor], bool],
        marks: tuple[int, int, int, int, int] = ...,
    ) -> None: ...

class AsyncCall:
    """An asynchronous collective: the completion and helper of its Work, and a job of the queue."""

    def __call__(self, until_ns: int = ..., /) -> BaseException | None: ...
    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def exception(self, timeout: float | None = None, /) -> BaseException | None: ...
    def result(self) -> None: ...
    def add_done_callback(self, callback: Callable[[Any], None], /) -> None: ...

class OperationRunner:
    """The course of a group's operations: `dist2.operation.runner.OperationRunner.run` and `run_p2p`.

    Args:
        group: Its counterpart in Python, for ``_fail_inline``, ``_tell_hooks``, ``release`` and ``_work``.
        otherwise: Called in place of `run` if a call is asynchronous, is in a batch, finds others inside or
            queued, or is refused.
        otherwise_beside: Called in place of `run_beside` if a call is in a batch or is refused.
        state: The group's fault, hooks and timeout.
        queue: Its queue.
        dispatch: Has the instruments.
        operation_type: The type of records.
        seconds: Converts the timeout of a call to seconds.
        here: Code in files with names that begin so, or with one of them, is not the caller; None: callers
            are not recorded.
        plans: The group's plans.
        rank: The caller's rank in it.
        natively_async: The backend returns before the end of an asynchronous operation, so no thread has to
            run it.

    Attributes:
        issuing: Needed to queue asynchronous collectives, which `otherwise` runs until it is set, once: the
            Works in flight, the function to call when the queue was left, the type `Completion`.
    """

    here: str | tuple[str, ...] | None
    issuing: tuple[set[Any], Callable[[], None], Callable[[], Any]] | None
    def __init__(
        self,
        group: object,
        otherwise: Callable[..., object],
        otherwise_beside: Callable[..., object],
        state: GroupState,
        queue: QueueState,
        dispatch: object,
        operation_type: type[Record],
        seconds: Callable[[Any], float],
        here: str | tuple[str, ...] | None,
        plans: AnyPlans,
        rank: int,
        natively_async: bool,
    ) -> None: ...
    def run(
        self,
        plan: Plan,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        async_op: bool,
        timeout: object,
        /,
    ) -> Any:
        """Run or issue a collective."""
    def run_beside(
        self,
        plan: Plan,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        async_op: bool,
        timeout: object,
        /,
    ) -> Any:
        """Run or issue a point-to-point operation."""

class C10dOverload:
    """A method with a name that c10d uses too: `dist2.c10d.methods._shared`.

    Args:
        modern: Called with the same arguments, unless they have c10d's form.
        decoded: Called if they have.
        options: Types of c10d's options: one of these among the positional arguments makes it c10d's.
        keywords: So does one of these keywords,
        list_at: and a list or tuple as this positional argument; -1: none.
    """

    def __init__(
        self,
        modern: Callable[..., object],
        decoded: Callable[..., object],
        options: frozenset[type],
        keywords: frozenset[str],
        list_at: int,
    ) -> None: ...
    def __call__(self, *args: Any, **keywords: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any: ...

class FastMethod:
    """A method in C for calls as they are mostly spelled: `dist2.c10d.methods.fast_method`.

    Args:
        otherwise: Called for all other calls.
        pattern: See `dist2.c10d.methods.Pattern`.
        kind: Part of the keys of plans, with
        agreed: this, unless the pattern says otherwise.
        async_op: Whether calls are asynchronous.
    """

    def __init__(
        self,
        otherwise: Callable[..., object],
        pattern: int,
        kind: object,
        agreed: object = None,
        async_op: bool = False,
    ) -> None: ...
    def __call__(self, *args: Any, **keywords: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any: ...
