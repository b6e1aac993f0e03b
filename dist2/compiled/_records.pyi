"""Records of operations in C: made at their begin, told to instruments, counted.

Each has a counterpart in Python that means the same: `dist2.record`, `dist2.hooks` and
`observability.metrics`. All of it relies on the interpreter lock, and is not built without one.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dist2.operation import Signature
from dist2.record import PythonRecord

_Operation = TypeVar("_Operation", bound=PythonRecord)

class Record(PythonRecord):
    """The counterpart of `dist2.record.PythonRecord`.

    The garbage collector knows it once it has an error: nothing else in it can lead back to it.
    """

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

class Counters:
    """The numbers of one series: a list of 69 integers of 64 bits, all 0 at first."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> int: ...
    def __setitem__(self, place: int, value: int) -> None: ...

class Counting(Generic[_Operation]):
    """Counts operations that ended: `observability.metrics.Metrics.operation_finished` in C.

    Args:
        in_flight: Operations are taken out of it.
        by_signature: What to count in. Where there are no `Counters`, the operation is a rare one.
        rare: Called with those, and with operations that failed.
    """

    def __init__(
        self,
        in_flight: set[_Operation],
        by_signature: dict[Signature, Any],
        rare: Callable[[_Operation], None],
    ) -> None: ...
    def __call__(self, operation: _Operation) -> None: ...

class Unless(Generic[_Operation]):
    """Passes on operations that failed or are of some kinds, and does nothing with others.

    Args:
        kinds: Values of `signature.kind`.
        rare: Called with what is passed on.
    """

    def __init__(self, kinds: tuple[object, ...], rare: Callable[[_Operation], None]) -> None: ...
    def __call__(self, operation: _Operation) -> None: ...
