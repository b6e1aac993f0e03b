# cython: annotation_typing=False
"""Plans: the validated, prepared form of all calls with one signature, and the cache that finds them.

`Plans` finds the plans of plain tensors by keys (`dist2.operation.tensors`); those of other tensors, and all
where torch cannot be read in C (before 2.10), are found by attributes of the tensors, in `AnyPlans`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from cython.cimports.dist2.operation.tensors import KeyedPlans

from dist2.operation.aliasing import shared_places
from dist2.operation.execution import Execute
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.operation.storage import lacks_memory
from dist2.runtime.built import check_built
from dist2.runtime.cache import keep

check_built(__name__, __file__)

MAX_PLANS = 4096
"""Plans kept a group; programs with ever-changing shapes start over when it is full."""

Arguments = Sequence[Any]
"""Arguments of an operation as they were given: tensors, or arrays, for which no plan is found."""


class Lane:
    """An ``execute`` that sends a message before it is recorded: its receiver does not wait for that."""

    def send(self, address: int, now: int) -> int:
        """Send the bytes at an address if nothing prevents it.

        Args:
            address: Where the message lies.
            now: The start of the call.

        Returns:
            1; 2 if the receiver has to be woken; 0, with nothing done.
        """
        return 0

    def sent(self, operation: Operation, sent: int) -> int:
        """After `send`: note the operation of the message, and wake the receiver if ``sent`` is 2."""
        return 0


class Plan:
    """The signature of a set of calls, and the callable that runs them."""

    signature: Signature
    execute: Execute
    lane: Lane | None

    def __init__(self, signature: Signature, execute: Execute) -> None:
        self.signature = signature
        self.execute = execute
        self.lane = execute if isinstance(execute, Lane) else None


class AnyPlans:
    """The plans of a group, for tensors of any kind.

    The key is the shape and dtype of each tensor, its strides unless it is contiguous, whether
    it is on the CPU, where tensors share memory with outputs, and the arguments that all ranks must agree on.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Plan] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, kind: OpKind, agreed: Hashable, inputs: Arguments, outputs: Arguments) -> Plan | None:
        """Return the plan of a call like one that was kept; None where there is none.

        Args:
            kind: Which operation.
            agreed: The rest of the key: arguments on which ranks must agree.
            inputs: A list or tuple of tensors that are read. Other objects are never found, so that
                validation sees the call and reports them.
            outputs: Likewise of those written; the very same list where they are read as well.
        """
        try:
            return self._by_key.get(_key(kind, agreed, inputs, outputs))
        except TypeError:
            return None

    def keep(self, kind: OpKind, agreed: Hashable, inputs: Arguments, outputs: Arguments, plan: Plan) -> None:
        """Keep a plan for calls like this one, which was found to be valid."""
        key = _key(kind, agreed, inputs, outputs)
        if key is not None:
            keep(self._by_key, key, plan, MAX_PLANS)

    def clear(self) -> None:
        """Let go of all."""
        self._by_key.clear()

    def plain(self, inputs: Arguments, outputs: Arguments) -> bool:
        """Return False: here it is not asked whether tensors are plain; see `Plans.plain`."""
        return False


class Plans:
    """The plans of a group: of plain tensors by keys, of others by attributes."""

    def __init__(self) -> None:
        self.keyed = KeyedPlans(MAX_PLANS)
        self._others = AnyPlans()

    def __len__(self) -> int:
        return len(self.keyed.plans) + len(self._others)

    def find(self, kind: OpKind, agreed: Hashable, inputs: Arguments, outputs: Arguments) -> Plan | None:
        """Return the plan of a call like one that was kept; None where there is none: as `AnyPlans.find`."""
        found: Plan | None = self.keyed.find(kind, agreed, inputs, outputs)
        return self._others.find(kind, agreed, inputs, outputs) if found is None else found

    def keep(self, kind: OpKind, agreed: Hashable, inputs: Arguments, outputs: Arguments, plan: Plan) -> None:
        """Keep a plan for calls like this one, which was found to be valid."""
        if not self.keyed.keep(kind, agreed, inputs, outputs, plan):
            self._others.keep(kind, agreed, inputs, outputs, plan)

    def clear(self) -> None:
        """Let go of all."""
        self.keyed.clear()
        self._others.clear()

    def plain(self, inputs: Arguments, outputs: Arguments) -> bool:
        """Whether a plan that is kept for these tensors is only ever found with plain ones.

        Those are contiguous and neither lazily conjugated nor lazily negated. Without keys that is not asked.
        """
        return bool(self.keyed.takes(inputs, outputs))


def _key(kind: OpKind, agreed: Hashable, inputs: Arguments, outputs: Arguments) -> Hashable:
    """Return the key of a call; None (never a key) if an entry is not a tensor."""
    if not (isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple))):
        return None  # iterating would use up a generator, and cut up a tensor
    try:
        if any(map(lacks_memory, inputs)) or (outputs is not inputs and any(map(lacks_memory, outputs))):
            return None  # of these, none is like another
        return (
            kind,
            agreed,
            tuple([(t.shape, t.dtype, t.is_contiguous() or t.stride(), t.is_cpu) for t in inputs]),
            outputs is inputs
            or tuple([(t.shape, t.dtype, t.is_contiguous() or t.stride(), t.is_cpu) for t in outputs]),
            shared_places(inputs, outputs),
        )
    except (AttributeError, TypeError, RuntimeError):
        return None  # validation will report the entry
