"""Features of torch that its older versions lack, looked up in one place.

dist2 supports torch from version 2.8. Each constant holds a feature, or says whether torch has it; code that
can do without a feature asks here. A feature is looked for by its name, never by a version number.
"""

from __future__ import annotations

from typing import Any

import torch

_c10d: Any = torch._C._distributed_c10d

TENSOR_EXCHANGE: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""The capsule by which C reads tensors without calling Python; None where it has to call Python."""

OPTIONS_NAME_THE_GROUP: bool = hasattr(_c10d.Backend.Options, "global_ranks_in_group")
"""Whether ``Backend.Options`` have the group's name and its global ranks."""

STORES_CLONE: bool = hasattr(_c10d.Store, "clone")
"""Whether stores can be cloned: otherwise a timeout is set for all users of the store."""

try:
    import torch._library.opaque_object as _opaque
except ImportError:
    _opaque = None  # type: ignore[assignment]  # which has been given the type of a module

_is_opaque: bool = isinstance(_c10d.ProcessGroup, getattr(_opaque, "OpaqueBaseMeta", ()))

OPAQUE_TYPES: Any = _opaque if _is_opaque else None
"""The module that tells Dynamo the attributes of a group; None where it takes a group as any object."""
