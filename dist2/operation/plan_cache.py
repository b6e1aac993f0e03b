"""Plans: what is known about all calls of one signature, and how calls like an earlier one find it.

`Plans` is a type in C where that was built and torch says in one call what a tensor is (from torch 2.10 on);
elsewhere `PythonPlans`, which also takes what the other cannot. They mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from dist2.compiled import records
from dist2.operation.aliasing import shared_places
from dist2.operation.execution import Execute
from dist2.operation.kinds import OpKind
from dist2.operation.signature import Signature
from dist2.operation.storage import lacks_memory
from dist2.runtime.cache import keep

MAX_PLANS = 4096
"""Plans kept a group; programs with ever-changing shapes start over when it is full."""

_TYPES = torch.Tensor, torch.nn.Parameter
"""Types of tensors that say what they are."""

Tensors = Sequence[torch.Tensor]


@attrs.frozen(eq=False)
class PythonPlan:
    """What is known about all calls of one signature.

    Attributes:
        signature: The call.
        execute: Runs it.
    """

    signature: Signature
    execute: Execute


class PythonPlans:
    """The plans of a group.

    Calls are told apart by the shape and dtype of each tensor, its strides unless it is contiguous, whether
    it is on the CPU, by where tensors share memory with outputs, and by what all ranks must agree on.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Plan] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, kind: OpKind, agreed: Hashable, inputs: Tensors, outputs: Tensors) -> Plan | None:
        """Return the plan of a call like one that was kept; None where there is none.

        Args:
            kind: Which operation.
            agreed: What tells calls apart besides the tensors.
            inputs: A list or tuple of tensors that are read. What is none is never found: validation will say
                what is wrong.
            outputs: Likewise of those written; the very same list where they are read as well.
        """
        try:
            return self._by_key.get(_key(kind, agreed, inputs, outputs))
        except TypeError:
            return None

    def keep(self, kind: OpKind, agreed: Hashable, inputs: Tensors, outputs: Tensors, plan: Plan) -> None:
        """Keep a plan for calls like this one, which was found to be valid."""
        key = _key(kind, agreed, inputs, outputs)
        if key is not None:
            keep(self._by_key, key, plan, MAX_PLANS)

    def clear(self) -> None:
        """Let go of all."""
        self._by_key.clear()

    def plain(self, inputs: Tensors, outputs: Tensors) -> bool:
        """Whether a plan that is kept for these tensors is only ever found with plain ones.

        Those are contiguous and neither lazily conjugated nor lazily negated. Here that is not asked.
        """
        return False


def _key(kind: OpKind, agreed: Hashable, inputs: Tensors, outputs: Tensors) -> Hashable:
    """Return what tells calls of one operation apart; None (never a key) if something is no tensor."""
    if not (isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple))):
        return None  # iterating would use up a generator, and cut up a tensor
    try:
        if any(map(lacks_memory, inputs)) or any(map(lacks_memory, outputs)):
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
        return None  # validation will say what is wrong


def samples() -> tuple[tuple[torch.Tensor, int, int, bool, int, int], ...]:
    """Return tensors with what torch says of them, for `dist2.compiled._records.find_marks`.

    Returns:
        Each with the address of its other half, its marks, and whether it is plain: neither lazily negated
        nor lazily conjugated; the address of its storage, and of its values. None where this torch does not
        say, or makes other tensors now.
    """
    try:
        with torch.inference_mode(False):
            plain = torch.ones(1, device="cpu"), torch.ones(2, dtype=torch.int64, device="cpu")
            lazy = torch._neg_view(plain[0]), torch._neg_view(plain[1]), _conjugate()
        tensors: tuple[Any, ...] = (*plain, torch.nn.Parameter(plain[0]), *lazy)
        if not {type(each) for each in tensors} <= set(_TYPES):
            return ()
        return tuple(
            [
                (
                    each,
                    each._cdata,
                    torch._C._dispatch_keys(each).raw_repr(),
                    at < len(tensors) - len(lazy),
                    each.untyped_storage()._cdata,
                    each.untyped_storage().data_ptr(),
                )
                for at, each in enumerate(tensors)
            ]
        )
    except (AttributeError, RuntimeError, TypeError):
        return ()


def _conjugate() -> torch.Tensor:
    """Return a tensor that is lazily conjugated."""
    return torch.conj(torch.ones(1, dtype=torch.complex64, device="cpu"))


def _compiled() -> Callable[[], PythonPlans] | None:
    """Return what makes plans in C; None where that was not built, or torch is too old for it."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if records is None or api is None:
        return None
    plans, marks = records.Plans, records.find_marks(samples())
    return lambda: plans(PythonPlans(), api, _TYPES, torch.Tensor.is_neg, marks)


if TYPE_CHECKING:
    Plan = PythonPlan
    Plans = PythonPlans
else:
    Plan = PythonPlan if records is None else records.Plan
    Plans = _compiled() or PythonPlans
