"""Features of torch that its older versions lack, looked up in one place.

dist2 supports torch from version 2.8. Each constant holds a feature, or says whether torch has it; code that
can do without a feature asks here. A feature is looked for by its name, never by a version number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch

BINDING: Any = torch._C._distributed_c10d
"""torch's binding of c10d, with types that `torch.distributed` does not have."""

_c10d = BINDING

TENSOR_EXCHANGE: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""The capsule by which C reads tensors without calling Python; None where it has to call Python."""

OPTIONS_NAME_THE_GROUP: bool = hasattr(_c10d.Backend.Options, "global_ranks_in_group")
"""Whether ``Backend.Options`` have the group's name and its global ranks."""


def _handle_by_object(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


current_stream_handle: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _handle_by_object
)
"""Returns the handle of a GPU's current stream in this thread, without an object for it if possible."""

STORES_CLONE: bool = hasattr(_c10d.Store, "clone")
"""Whether stores can be cloned: otherwise a timeout is set for all users of the store."""

try:
    import torch._library.opaque_object as _opaque
except ImportError:
    _opaque = None  # type: ignore[assignment]  # which has been given the type of a module


@attrs.frozen
class OpaqueTypes:
    """How Dynamo is told the attributes of a type: torch calls it opaque.

    Attributes:
        inlined: Says of an attribute that Dynamo looks it up in the object while it traces.
        constant: Says of an attribute that a compiled function holds its value.
        register: ``register(kind, members=, guard_fn=)``: what it says of which attribute, and a function
            whose results for an object must not have changed when a compiled function is used again.
    """

    inlined: object
    constant: object
    register: Callable[..., None]

    @classmethod
    def found(cls) -> OpaqueTypes | None:
        """Return torch's; None where groups are no opaque objects, or where its names have changed again."""
        for meta, register, typ in _OPAQUE_NAMES:
            kind, named = getattr(_opaque, meta, None), getattr(_opaque, register, None)
            if kind is not None and named is not None and isinstance(_c10d.ProcessGroup, kind):
                members: Any = _opaque.MemberType
                return cls(members.INLINED, members.USE_REAL, partial(named, typ=typ))
        return None


_OPAQUE_NAMES = (
    ("CustomClassBaseMeta", "register_custom_class", "symbolic"),  # torch 2.14
    ("OpaqueBaseMeta", "register_opaque_type", "reference"),  # torch 2.12
)
"""The type of opaque types, the function that registers one, and its word for objects with a state."""

OPAQUE_TYPES: OpaqueTypes | None = OpaqueTypes.found()
"""How Dynamo is told the attributes of a group; None where it takes a group as any object."""
