"""Conversion of tensors for libraries that lack some dtypes and require contiguous memory: Gloo, MPI. Pure.

Tensors that are only moved travel as bytes, exactly. Tensors that are reduced travel in a dtype that these
libraries have and whose arithmetic gives the same result: 16-bit integers in 32-bit ones (sums wrap in the
same way after truncation), unsigned 64-bit in signed (two's complement), booleans as bytes 0 and 1, complex
numbers as pairs. Half precision is reduced in float32 and rounded once, at the price of twice the bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from dist2.errors import InvalidUsageError
from dist2.operation.kinds import ReduceKind, Reduction
from dist2.operation.signature import Signature
from dist2.operation.storage import flattened

Tensor = torch.Tensor


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in row-major order, contiguous: a view where memory allows, else a copy."""
    return flattened(tensor.detach().resolve_conj().resolve_neg().contiguous())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in row-major order as flat bytes: a view where memory allows."""
    return plain(tensor).view(torch.uint8)


class Landing:
    """Flat contiguous memory in place of a tensor to be written, which may have any strides.

    Attributes:
        flat: The tensor's own memory where it is contiguous, else scratch that `land` copies out.
    """

    def __init__(self, tensor: Tensor, *, loaded: bool = False) -> None:
        """Args:
        tensor: Where the result goes.
        loaded: The operation also reads the tensor: scratch starts with its elements.
        """
        self._target = tensor.detach()
        direct = self._target.is_contiguous() and not (self._target.is_conj() or self._target.is_neg())
        self._staged = not direct
        if direct:
            self.flat = flattened(self._target)
        elif loaded:
            self.flat = plain(self._target).clone()
        else:
            self.flat = torch.empty(self._target.numel(), dtype=tensor.dtype, device=tensor.device)

    @property
    def bytes(self) -> Tensor:
        """The same memory as bytes."""
        return self.flat.view(torch.uint8)

    def land(self) -> None:
        """Copy the written elements to the tensor."""
        if self._staged:
            self._target.detach().copy_(self.flat.view(self._target.shape))


@attrs.frozen(eq=False)
class Carrier:
    """How one reduction of one dtype is done.

    Attributes:
        kind: The library's reduction of the carried elements.
        load: Returns the elements of a flat tensor in a dtype that the library has: a view, or a copy.
        unload: Writes the carried result to the flat tensor; None where `load` gave a view of it.
    """

    kind: ReduceKind
    load: Callable[[Tensor], Tensor]
    unload: Callable[[Tensor, Tensor], object] | None = None


_SUM, _PRODUCT = ReduceKind.SUM, ReduceKind.PRODUCT
_MIN, _MAX = ReduceKind.MIN, ReduceKind.MAX
_BITWISE = (ReduceKind.BAND, ReduceKind.BOR, ReduceKind.BXOR)
_SCALED = (ReduceKind.AVG, ReduceKind.PREMUL_SUM)

_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
_COMPLEX = (torch.complex64, torch.complex128)
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_SIGN = -(1 << 63)
_BOOLEAN = {
    _SUM: _MAX,
    _MAX: _MAX,
    ReduceKind.BOR: _MAX,
    _PRODUCT: _MIN,
    _MIN: _MIN,
    ReduceKind.BAND: _MIN,
    ReduceKind.BXOR: ReduceKind.BXOR,
}


def _same(flat: Tensor) -> Tensor:
    return flat


def _in_wider(kind: ReduceKind, wider: torch.dtype) -> Carrier:
    return Carrier(kind, lambda flat: flat.to(wider), lambda carried, flat: flat.copy_(carried))


def _by_view(kind: ReduceKind, dtype: torch.dtype) -> Carrier:
    return Carrier(kind, lambda flat: flat.view(dtype))


def _in_signed_order(kind: ReduceKind) -> Carrier:
    """Compare unsigned 64-bit numbers as signed ones: flipping the top bit keeps their order."""
    return Carrier(
        kind,
        lambda flat: flat.view(torch.int64) ^ _SIGN,
        lambda carried, flat: flat.view(torch.int64).copy_(carried ^ _SIGN),
    )


def _table() -> dict[tuple[torch.dtype, ReduceKind], Carrier]:
    table: dict[tuple[torch.dtype, ReduceKind], Carrier] = {}
    plain_kinds = (_SUM, _PRODUCT, _MIN, _MAX)
    for kind in (*plain_kinds, *_BITWISE):
        table.update({(dtype, kind): Carrier(kind, _same) for dtype in _INTEGERS})
        table.update({(dtype, kind): _in_wider(kind, wider) for dtype, wider in _WIDER.items()})
        ordered = kind in (_MIN, _MAX)
        table[torch.uint64, kind] = _in_signed_order(kind) if ordered else _by_view(kind, torch.int64)
        table[torch.bool, kind] = _by_view(_BOOLEAN[kind], torch.uint8)
    for kind in plain_kinds:
        table.update({(dtype, kind): Carrier(kind, _same) for dtype in _FLOATS})
    for kind in (*plain_kinds, *_SCALED):
        carried = _SUM if kind in _SCALED else kind
        table.update({(dtype, kind): _in_wider(carried, torch.float32) for dtype in _HALVES})
    for kind in (_SUM, *_SCALED):
        table.update({(dtype, kind): Carrier(_SUM, _pairs) for dtype in _COMPLEX})
    for kind in _SCALED:
        table.update({(dtype, kind): Carrier(_SUM, _same) for dtype in _FLOATS})
    for dtype in (*_INTEGERS, torch.int16):
        table[dtype, ReduceKind.AVG] = table[dtype, _SUM]
    return table


def _pairs(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1)


CARRIERS = _table()
"""For libraries that compute in `_FLOATS` and `_INTEGERS`."""


def carrier_of(dtype: torch.dtype, reduction: Reduction, op: str, backend: str) -> Carrier:
    """Return how a reduction is done.

    Args:
        dtype: The tensors' dtype.
        reduction: The reduction that the caller asked for.
        op: The operation, and
        backend: the backend, for the error.

    Raises:
        InvalidUsageError: There is no exact way.
    """
    found = CARRIERS.get((dtype, reduction.kind))
    if found is None:
        raise InvalidUsageError(
            f"{op} with op={reduction} is not possible on {dtype} with backend {backend!r}"
        )
    return found


def check_carried(signature: Signature) -> None:
    """Check that the reduction of a call is possible, if it has one.

    Raises:
        InvalidUsageError: There is no exact way for a dtype.
    """
    if signature.reduction is not None:
        for meta in signature.inputs:
            carrier_of(meta.dtype, signature.reduction, signature.kind.value, signature.group.backend)


def scale_before(flat: Tensor, reduction: Reduction) -> None:
    """Multiply by the factor of PREMUL_SUM, in place."""
    if reduction.factor is not None:
        flat.mul_(reduction.factor)


def finish(carrier: Carrier, carried: Tensor, flat: Tensor, reduction: Reduction, world_size: int) -> None:
    """Write the carried result to the flat tensor; AVG divides it first, integers rounding towards zero.

    Integers are divided after truncation to their dtype, so that an overflow wraps as it would there.
    """
    average = reduction.kind is ReduceKind.AVG
    if average and carried.is_floating_point():
        carried.div_(world_size)
    if carrier.unload is not None:
        carrier.unload(carried, flat)
    if average and not carried.is_floating_point():
        flat.div_(world_size, rounding_mode="trunc")
