"""Records of operations in C: made at their begin, told to instruments, counted.

Each has a counterpart in Python that means the same: in `dist2.operation.signature`,
`dist2.operation.instruments` and `observability.metrics`. All of it relies on the interpreter lock, and is
not built without one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from dist2.operation.plan_cache import PythonPlan, PythonPlans
from dist2.operation.queue import PythonQueueState
from dist2.operation.signature import GroupInfo, PythonRecord, Signature
from dist2.operation.state import PythonGroupState

_Operation = TypeVar("_Operation", bound=PythonRecord)

class Record(PythonRecord):
    """The counterpart of `dist2.operation.signature.PythonRecord`.

    The garbage collector knows it once it has an error: nothing else in it can lead back to it.

    Attributes:
        places: The address at which C keeps the addresses of the call's tensors, or 0.
    """

    places: int

def tell(
    told: tuple[Callable[[_Operation], object], ...],
    operation: _Operation,
    failed: Callable[[Callable[[_Operation], object], Exception], None],
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

class Counters:
    """The numbers of one series: a list of 69 integers, all 0 at first."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> int: ...
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
    """The operations begun last: the counterpart of `observability.ring.PythonRing`."""

    def __init__(self, capacity: int, kept: int) -> None: ...
    def __call__(self, operation: _Operation) -> None: ...
    @property
    def is_full(self) -> bool: ...
    def recent(self) -> list[_Operation]: ...
    def displaced(self) -> list[_Operation]: ...
    def watch(self, group: GroupInfo) -> None: ...
    def forget(self, group: GroupInfo) -> None: ...
    def replace(self, old: _Operation, new: _Operation) -> bool: ...
    def clear(self) -> None: ...

class QueueState(PythonQueueState):
    """The counterpart of `dist2.operation.queue.PythonQueueState`: each method is one atomic step."""

class GroupState(PythonGroupState):
    """The counterpart of `dist2.operation.state.PythonGroupState`."""

class Plan(PythonPlan):
    """The counterpart of `dist2.operation.plan_cache.PythonPlan`."""

class Plans(PythonPlans):
    """The counterpart of `dist2.operation.plan_cache.PythonPlans`, for tensors that are plain.

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
        others: PythonPlans,
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
        plans: PythonPlans,
        rank: int,
        natively_async: bool,
    ) -> None: ...
    def run(
        self,
        plan: PythonPlan,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        async_op: bool,
        timeout: object,
        /,
    ) -> Any:
        """Run or issue a collective."""
    def run_beside(
        self,
        plan: PythonPlan,
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
