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
from dist2.operation.signature import PythonRecord, Signature
from dist2.operation.state import PythonGroupState

_Operation = TypeVar("_Operation", bound=PythonRecord)

class Record(PythonRecord):
    """The counterpart of `dist2.operation.signature.PythonRecord`.

    The garbage collector knows it once it has an error: nothing else in it can lead back to it.

    Attributes:
        places: Where C has written down where the tensors of the call lie: an address, or 0.
    """

    places: int

def tell(
    told: tuple[Callable[[_Operation], object], ...],
    operation: _Operation,
    failed: Callable[[Callable[[_Operation], object], Exception], None],
) -> None:
    """Call each of ``told`` with an operation.

    Args:
        told: What to call, in order.
        operation: Their argument.
        failed: Given what raised, and the exception, if that is an `Exception`; the others are called then.

    Raises:
        BaseException: What is no `Exception` is raised on, and what ``failed`` raises.
    """

def adopt(work_type: type, prepare: Callable[[Any], None], /) -> bool:
    """Have a `OperationRunner` return objects of a type, the only one of the process.

    Those that nobody has any more are used again, unless C++ code has their other half.

    Args:
        work_type: `dist2.operation.work.Work`, which has slots and no dictionary.
        prepare: Called with a new object in place of its constructor.

    Returns:
        Whether they are used again: not where it cannot be seen who has their other half.

    Raises:
        TypeError: It lacks a slot; or another type was adopted before.
    """

def find_marks(samples: tuple[tuple[Tensor, int, int, bool, int, int], ...], /) -> tuple[int, int, int, int]:
    """Find where tensors have their marks: a word of bits by which torch tells what they are.

    Args:
        samples: Tensors, each with the address of its other half, its marks, whether it is plain, the
            address of its storage, and that of its values. Others than plain ones must be among them.

    Returns:
        Where an object has the address of its other half, where that has the marks, and all marks that the
        plain ones have, which is 0 if there is not exactly one place for each, or what is not plain has no
        mark that says so. And where that half has the address of the storage; 0 if it is not known, or the
        address of the values is not where a storage has it.
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
        in_flight: Operations are taken out of it.
        by_signature: What to count in. A signature that is not there gets new `Counters`.
        rare: Called with operations that failed, and with new signatures where there are many already.
        fresh: Gets signatures with their new counters, for whoever gives them labels.
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
        by_signature: What to count them in.
        rare: Called with operations that failed, and with messages that it has no `Tally` for.
    """

    def __init__(
        self,
        kinds: tuple[object, ...],
        by_signature: dict[Signature, Any],
        rare: Callable[[_Operation], None],
    ) -> None: ...
    def __call__(self, operation: _Operation) -> None: ...

class QueueState(PythonQueueState):
    """The counterpart of `dist2.operation.queue.PythonQueueState`: each method is one atomic step."""

class GroupState(PythonGroupState):
    """The counterpart of `dist2.operation.state.PythonGroupState`."""

class Plan(PythonPlan):
    """The counterpart of `dist2.operation.plan_cache.PythonPlan`."""

class Plans(PythonPlans):
    """The counterpart of `dist2.operation.plan_cache.PythonPlans`, for tensors that are plain.

    Args:
        others: Plans of calls with tensors that are not.
        api: The capsule ``__dlpack_c_exchange_api__`` of torch's tensors: DLPack 1.x.
        tensor_types: Types of tensors that say what they are; what is of another goes to ``others``.
        is_negated: Says of a tensor whether it is lazily negated.
        marks: What `find_marks` returned. Of tensors with the marks of plain ones it is not asked.

    Raises:
        ValueError: The capsule has another version, or cannot read tensors.
    """

    def __init__(
        self,
        others: PythonPlans,
        api: object,
        tensor_types: tuple[type[Tensor], ...],
        is_negated: Callable[[Tensor], bool],
        marks: tuple[int, int, int, int] = ...,
    ) -> None: ...

class AsyncCall:
    """An asynchronous collective: what its Work waits on, its helper, and a job of the lane."""

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
        group: Its counterpart in Python, asked to ``_fail_inline``, ``_tell_hooks``, ``release``, ``_work``
            where that is called for.
        otherwise: Called in place of `run` where a call is asynchronous, is in a batch, finds others inside
            or queued, or is refused.
        otherwise_beside: Called in place of `run_beside` where a call is in a batch or is refused.
        state: What the group may do.
        queue: Its queue.
        dispatch: Has the instruments to tell.
        operation_type: What records are.
        seconds: Says how many seconds the limit is that a call names.
        here: Code in files whose names begin so, or with one of them, did not call; None to note nobody.
        plans: Those of the group.
        rank: Of the caller in it.

    Attributes:
        issuing: What it takes to queue asynchronous collectives, which are left to `otherwise` before it is
            set, once: the Works in flight, what to call when the lane was left, what makes a `Completion`.
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
    """A method whose name c10d has too: `dist2.c10d.methods._shared`.

    Args:
        modern: Called with what it is called with, unless that is spelled as c10d does it.
        decoded: Called then.
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
    """A method in C for calls as they are mostly spelled: `dist2.c10d.fast_methods.fast_method`.

    Args:
        otherwise: Called with everything else.
        pattern: See `dist2.c10d.fast_methods.Pattern`.
        kind: By which plans are looked for, with
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
