"""Plans: the validated, prepared form of all calls with one signature, and the cache that finds them.

`Plans` is a type in C where torch describes a tensor in one call (torch 2.10 and later). It passes tensors of
other types to `AnyPlans`, which has all plans for an older torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from dist2.compiled import records
from dist2.operation.aliasing import shared_places
from dist2.operation.kinds import OpKind
from dist2.operation.storage import exceeds_storage, has_no_storage
from dist2.runtime.cache import keep
from dist2.runtime.torch_versions import TENSOR_EXCHANGE, dispatch_keys, negated_view

MAX_PLANS = 4096
"""Plans kept a group; programs with ever-changing shapes start over when it is full."""

_TYPES = torch.Tensor, torch.nn.Parameter
"""Types of tensors with plain metadata: shape, dtype and address describe them fully."""

Tensors = Sequence[torch.Tensor]


class AnyPlans:
    """The plans of a group, for tensors of any kind.

    The key is the shape and dtype of each tensor, its strides unless it is contiguous, whether
    it is on the CPU, where tensors share memory with outputs, and the arguments that all ranks must agree on.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Plan] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, kind: OpKind, agreed: Hashable, inputs: Tensors, outputs: Tensors) -> Plan | None:
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
    """Return the key of a call; None (never a key) if an entry is not a tensor."""
    if not (isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple))):
        return None  # iterating would use up a generator, and cut up a tensor
    try:
        if any(map(_lacks_memory, inputs)) or (outputs is not inputs and any(map(_lacks_memory, outputs))):
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


def _lacks_memory(tensor: torch.Tensor) -> bool:
    return has_no_storage(tensor) or exceeds_storage(tensor)


def samples() -> tuple[tuple[torch.Tensor, int, int, bool, int, int, int], ...]:
    """Return tensors and torch's description of each, for `dist2.compiled.records.find_marks`.

    Returns:
        Each with the address of its other half, its marks, and whether it is plain: neither lazily negated
        nor lazily conjugated; the address of its storage, that of its values, and the storage's length. None
        where this torch does not say, or makes other tensors now.
    """
    try:
        with torch.inference_mode(False):
            plain = torch.ones(1, device="cpu"), torch.ones(2, dtype=torch.int64, device="cpu")
            lazy = negated_view(plain[0]), negated_view(plain[1]), _conjugate()
        tensors: tuple[Any, ...] = (*plain, torch.nn.Parameter(plain[0]), *lazy)
        if not {type(each) for each in tensors} <= set(_TYPES):
            return ()
        return tuple(
            [
                (
                    each,
                    each._cdata,
                    dispatch_keys(each),
                    at < len(tensors) - len(lazy),
                    each.untyped_storage()._cdata,
                    each.untyped_storage().data_ptr(),
                    each.untyped_storage().nbytes(),
                )
                for at, each in enumerate(tensors)
            ]
        )
    except (AttributeError, RuntimeError, TypeError):
        return ()


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether the memory of a contiguous tensor does not hold its values, or not all of them."""
    return tensor.is_neg() or exceeds_storage(tensor)


def _conjugate() -> torch.Tensor:
    """Return a tensor that is lazily conjugated."""
    return torch.conj(torch.ones(1, dtype=torch.complex64, device="cpu"))


def _new_plans() -> Callable[[], AnyPlans]:
    """Return the type of a group's cache of plans: in C, unless torch is too old for that."""
    api = TENSOR_EXCHANGE
    if api is None:
        return AnyPlans
    marks = records.find_marks(samples())
    return lambda: records.Plans(AnyPlans(), api, _TYPES, is_odd, marks)


Plan = records.Plan
Plans = _new_plans()
