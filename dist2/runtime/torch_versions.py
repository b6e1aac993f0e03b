"""Names of torch that are private, or that some of its versions lack, looked up in one place.

dist2 supports torch from version 2.8. Each constant holds a feature, or says whether torch has it; code that
can do without a feature asks here. A feature is looked for by its name, never by a version number. Where a
private name is gone, there is something in its place: a public way, or the words of what does not work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from importlib import import_module
from types import CodeType, SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed
from torch.distributed import distributed_c10d

BINDING: Any = getattr(torch._C, "_distributed_c10d", None) or distributed_c10d
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


def _code_is_left_alone() -> Callable[[CodeType], None]:
    """Return a function that has Dynamo compile neither a code nor its callees, or one without effect."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # the frame itself, and its callees
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):
        return lambda code: None
    return lambda code: set_strategy(code, strategy)


leave_code_alone = _code_is_left_alone()
"""Has Dynamo compile neither a code nor its callees."""


def default_tables() -> Any:
    """Return torch's tables of groups: ``default_pg``, ``pg_map``, ``pg_names`` and others.

    Looked up each time, as torch's tests for threads put other ones in their place.

    Raises:
        NotImplementedError: torch keeps them elsewhere.
    """
    tables: Any = getattr(distributed_c10d, "_world", None)
    if tables is None:
        raise NotImplementedError(
            f"torch {torch.__version__} has no table of groups that dist2 knows: use the groups of dist2 as "
            f"objects, and register_with_torch=False in dist2.legacy.init_process_group"
        )
    return tables


def set_default_group(pg: object) -> None:
    """Make a group torch's default group, or none."""
    set_default: Any = getattr(distributed_c10d, "_update_default_pg", None)
    if set_default is not None:
        set_default(pg)
    else:
        default_tables().default_pg = pg


def group_of_name(name: str) -> Any:
    """Return the group that torch's C++ finds by a name.

    Raises:
        RuntimeError: It finds none.
    """
    return BINDING._resolve_process_group(name)


def registered_backends() -> dict[str, Any]:
    """Return the backends that were registered with torch, by their names in upper case."""
    found: dict[str, Any] = getattr(torch.distributed.Backend, "_plugins", {})
    return found


def records_itself(backend: str) -> None:
    """Have torch (2.15) attach no flight recorder to the groups of a backend.

    Its recorder looks up the C++ object of a backend. A group in Python has none, and would be refused.
    """
    recording: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(backend)


def backend_options() -> Any:
    """Return an empty first argument for creators of backends that take ``DistributedBackendOptions``."""
    made: Any = getattr(distributed_c10d, "_DistributedBackendOptions", SimpleNamespace)
    return made()


RENDEZVOUS_HANDLERS: MutableMapping[str, Callable[..., Iterator[Any]]] = getattr(
    import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {}
)
"""torch's handlers of schemes of URLs. The package has a function of the module's name, which hides it."""


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is negated when it is read."""
    return torch._neg_view(tensor)


def without_storage(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a tensor of a class that handles ``__torch_dispatch__``, with the properties of another one."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=like.device,
    )


plain_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A block in which functions of torch ignore ``__torch_function__`` of subclasses."""


def profiling_all_threads() -> dict[str, Any]:
    """Return arguments with which torch's profiler sees all threads; none where it has no such option."""
    try:
        from torch.profiler import _ExperimentalConfig

        return {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
    except (ImportError, TypeError):
        return {}


def describe_trace(name: str, document: str) -> None:
    """Add a document to the trace that torch's profiler makes; do nothing if torch has no such function."""
    add = getattr(torch.autograd, "_add_metadata_json", None)
    if add is not None:
        add(name, document)


def time_estimator(pg: object, device: torch.device) -> Any:
    """Return torch's block in which operations of a group are estimated instead of run.

    Raises:
        NotImplementedError: There is none, or none for this group.
    """
    made: Any = getattr(distributed_c10d, "_time_estimator", None)
    if made is None:
        raise NotImplementedError(f"torch {torch.__version__} does not estimate times")
    return made(pg, device)
