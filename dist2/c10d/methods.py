"""c10d's names and ``(list, options)`` overloads for the operations of a group, and their usual calls.

torch's own code (DDP, FSDP, DTensor, functional collectives) calls a group in this way. `with_c10d_calls`
gives a class of groups that has the modern methods these calls as well. One decoder turns a c10d call into
the arguments of the modern method, by a table (`Spelling`) of how c10d spells it:

* an options argument makes it a c10d call: its ``asyncOp`` decides, and a timeout of -1 ms is none;
* a list where the modern method takes a tensor holds exactly one (c10d has one tensor a rank), and is a
  c10d call too: asynchronous unless its options say otherwise;
* every name that only c10d has is asynchronous unless its options say otherwise.

A call with positional arguments alone, of plain tensors, whose plan is known goes from its caller to the
group's `OperationRunner` without code in Python (`dist2.c10d.fast_methods`). The peer of a message may be
spelled ``dst=`` or ``src=``, or be followed by a tag. All other calls take the method in Python, which means
the same. Calls in c10d's form may come from C++, so they return a `CppWork` (`whole`).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch

from dist2.c10d import fast_methods  # type: ignore[attr-defined]  # compiled, without a stub
from dist2.c10d.dynamo import as_method
from dist2.errors import ArgumentTypeError, InvalidUsageError
from dist2.operation.cpp_work import whole
from dist2.operation.kinds import SUM, OpKind
from dist2.operation.runner import OperationRunner
from dist2.operation.work import Work
from dist2.runtime.torch_versions import BINDING

_c10d = BINDING

EQUAL_PARTS: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
"""The splits of an `all_to_all_single` that names none."""

OPTIONS = frozenset(
    {
        _c10d.AllreduceOptions,
        _c10d.AllreduceCoalescedOptions,
        _c10d.BroadcastOptions,
        _c10d.ReduceOptions,
        _c10d.AllgatherOptions,
        _c10d.GatherOptions,
        _c10d.ScatterOptions,
        _c10d.ReduceScatterOptions,
        _c10d.AllToAllOptions,
        _c10d.BarrierOptions,
    }
)
"""Types of c10d's options."""

_FIELDS = {"reduceOp": "op", "rootRank": "root"}
"""Fields of c10d's options, and the modern argument each stands for."""


@attrs.frozen
class Spelling:
    """How c10d spells an operation.

    Attributes:
        positional: The modern names of its positional arguments, in c10d's order.
        keywords: c10d's keywords, and the modern argument each stands for.
        lists: Arguments that c10d gives as a list of exactly one.
        nested: Arguments that c10d gives as a list of exactly one list.
        position: Which positional argument's being a list makes it a c10d call; -1: none.
        own: Only c10d has the name.
    """

    positional: tuple[str, ...]
    keywords: Mapping[str, str] = attrs.field(factory=dict)
    lists: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    own: bool = False
    position: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "position", self.positional.index(self.lists[0]) if self.lists else -1)

    def decode(self, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments that the modern method takes for a c10d call.

        Raises:
            ArgumentTypeError: There are too many arguments, or one is given twice.
            InvalidUsageError: A list that must hold one tensor holds more or less.
        """
        given, options = self._bound(name, args, keywords)
        is_list = any(isinstance(given.get(argument), (list, tuple)) for argument in self.lists)
        for argument in self.lists:
            if argument in given:
                given[argument] = only(given[argument], argument)
        for argument in self.nested:
            value = given.get(argument)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
                given[argument] = only(value, argument)
        if options is not None:
            return {**given, **arguments_of(options)}
        if self.own or is_list:
            given.setdefault("async_op", True)
        return given

    def _bound(
        self, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[dict[str, Any], object]:
        """Return the arguments by modern name, and the options or None."""
        options = keywords.get("opts")
        given: dict[str, Any] = {}
        if args and type(args[-1]) in OPTIONS:
            args, options = args[:-1], args[-1]
        if len(args) > len(self.positional):
            raise ArgumentTypeError(
                f"{name} takes {', '.join(self.positional)} and options, got {len(args)} positional arguments"
            )
        if options is not None and type(options) not in OPTIONS:
            raise ArgumentTypeError(f"opts must be c10d options, got {options!r} ({type(options).__name__})")
        given.update(zip(self.positional, args, strict=False))
        for key, value in keywords.items():
            modern = self.keywords.get(key, key)
            if modern in given:
                raise ArgumentTypeError(f"{name} got {modern} twice: {given[modern]!r} and {key}={value!r}")
            if key != "opts":
                given[modern] = value
        return given, options


def arguments_of(options: Any) -> dict[str, Any]:
    """Return the modern keyword arguments that a c10d options object stands for."""
    arguments = {new: getattr(options, old) for old, new in _FIELDS.items() if hasattr(options, old)}
    limit: timedelta = options.timeout
    arguments["timeout"] = limit if limit > timedelta(0) else None
    arguments["async_op"] = bool(options.asyncOp)
    return arguments


def only(value: object, argument: str) -> Any:
    """Return the only element of a c10d list, or the value itself if it is no list.

    Raises:
        InvalidUsageError: The list holds more or less than one.
    """
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise InvalidUsageError(
            f"{argument} must hold exactly one entry, as there is one tensor a rank; got {len(value)}"
        )
    return value[0]


_Method = TypeVar("_Method", bound=Callable[..., Work])
_GroupType = TypeVar("_GroupType", bound=type)


def _shared(method: _Method, spelling: Spelling) -> _Method:
    """Return a method whose name c10d has too: modern calls pass through, c10d's are decoded."""
    name, decode = method.__name__, spelling.decode

    @functools.wraps(method)
    def decoded(self: Any, *args: Any, **keywords: Any) -> Work:
        work: Work = whole(method(self, **decode(name, args, keywords)))
        return work

    spelled = frozenset({"opts", *spelling.keywords})
    shared: _Method = fast_methods.overloaded(method, decoded, OPTIONS, spelled, spelling.position)
    functools.update_wrapper(shared, method)
    return shared


def _old(name: str, method: Callable[..., Work], spelling: Spelling, example: str) -> Callable[..., Work]:
    """Return a method of a name that only c10d has; ``example`` is for its docstring."""
    decode = attrs.evolve(spelling, own=True).decode

    def call(self: Any, *args: Any, **keywords: Any) -> Work:
        work: Work = whole(method(self, **decode(name, args, keywords)))
        return work

    call.__name__ = name
    summary = (method.__doc__ or "").partition("\n")[0]
    call.__doc__ = (
        f"{summary}\n\nWith c10d's arguments; asynchronous unless its options say otherwise."
        f"\n\nExamples:\n    >>> {example}"
    )
    return call


def _all_gather_any(
    self: Any, outputs: Any, input: Any, *, async_op: bool = False, timeout: Any = None
) -> Work:
    """Do `all_gather`, or `all_gather_v` where sizes differ: c10d has one name for both."""
    numels = {tensor.numel() for tensor in outputs if isinstance(tensor, torch.Tensor)}
    gather: Callable[..., Work] = self.all_gather_v if len(numels) > 1 else self.all_gather
    return gather(outputs, input, async_op=async_op, timeout=timeout)


def _all_gather_lists(
    self: Any, outputs: Any, inputs: Any, *, async_op: bool = False, timeout: Any = None
) -> Work:
    """Do `all_gather` for each input, as one operation; ``outputs[r][i]`` receives input i of rank r."""
    runner: OperationRunner = self._runner
    with runner.collecting() as batch:
        for index, source in enumerate(inputs):
            self.all_gather([row[index] for row in outputs], source, timeout=timeout)
    return runner.combined(batch, async_op)


def _gather_single(
    self: Any,
    output: torch.Tensor | None,
    input: torch.Tensor,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: Any = None,
) -> Work:
    """Collect the tensor of every rank, one after the other, in one tensor of the root; others need none."""
    outputs: tuple[torch.Tensor, ...] = ()
    if self.rank() == root:
        wanted = self.size() * input.numel()
        if output is None or output.numel() != wanted or not output.is_contiguous():
            found = "None" if output is None else f"{output.numel()}, strides {output.stride()}"
            raise InvalidUsageError(
                f"output must be contiguous at the root and have {wanted} elements, got {found}"
            )
        outputs = tuple(part.view_as(input) for part in output.view(self.size(), input.numel()))
    gather: Callable[..., Work] = self.gather
    return gather(outputs, input, root, async_op=async_op, timeout=timeout)


_IN_OUT = {
    "output_tensors": "outputs",
    "output_tensor": "output",
    "input_tensors": "inputs",
    "input_tensor": "input",
    "outputTensor": "output",
    "inputTensor": "input",
}
_TENSOR = {"tensors": "tensor"}
_SRC, _DST = {"src": "root"}, {"dst": "root"}  # the global API of torch.distributed calls the root so
_GATHERED = {"output_tensors": "outputs", "input_tensors": "input", "input_tensor": "input"}
_PARTED = {
    "output_tensors": "output",
    "output_tensor": "output",
    "input_tensors": "inputs",
    "input_tensor": "inputs",
    "input": "inputs",
}
_LISTS = {
    "output_tensors": "outputs",
    "output_tensor": "outputs",
    "input_tensors": "inputs",
    "input_tensor": "inputs",
}
_SPLITS = {"output_split_sizes": "output_splits", "input_split_sizes": "input_splits"}

_ALL_REDUCE = Spelling(("tensor", "op", "timeout"), _TENSOR, lists=("tensor",))
_ALL_REDUCE_COALESCED = Spelling(("tensors", "op", "timeout"))
_BROADCAST = Spelling(("tensor", "root", "timeout"), {**_TENSOR, **_SRC}, lists=("tensor",))
_REDUCE = Spelling(("tensor", "root", "op", "timeout"), {**_TENSOR, **_DST}, lists=("tensor",))
_ALL_GATHER = Spelling(("outputs", "input", "timeout"), _GATHERED, lists=("input",), nested=("outputs",))
_ALL_GATHER_LISTS = Spelling(
    ("outputs", "inputs", "timeout"), {"output_lists": "outputs", "input_list": "inputs"}
)
_ALL_GATHER_SINGLE = Spelling(("output", "input", "timeout"), _IN_OUT)
_ALL_GATHER_SINGLE_COALESCED = Spelling(("outputs", "inputs", "timeout"), _IN_OUT)
_REDUCE_SCATTER = Spelling(
    ("output", "inputs", "op", "timeout"), _PARTED, lists=("output",), nested=("inputs",)
)
_REDUCE_SCATTER_SINGLE = Spelling(("output", "input", "op", "timeout"), _IN_OUT)
_REDUCE_SCATTER_SINGLE_COALESCED = Spelling(("outputs", "inputs", "op", "timeout"), _IN_OUT)
_GATHER = Spelling(
    ("outputs", "input", "root", "timeout"), {**_GATHERED, **_DST}, lists=("input",), nested=("outputs",)
)
_SCATTER = Spelling(
    ("output", "inputs", "root", "timeout"), {**_PARTED, **_SRC}, lists=("output",), nested=("inputs",)
)
_GATHER_SINGLE = Spelling(("output", "input", "root", "timeout"), {**_IN_OUT, **_DST})
_ALL_TO_ALL = Spelling(("outputs", "inputs", "timeout"), _LISTS)
_ALL_TO_ALL_SINGLE = Spelling(
    ("output", "input", "output_splits", "input_splits", "timeout"), {**_IN_OUT, **_SPLITS}
)
_BARRIER = Spelling(("timeout",))
_SEND = Spelling(("tensor", "dst", "tag"), {**_TENSOR, "dstRank": "dst"}, lists=("tensor",))
_RECV = Spelling(("tensor", "src", "tag"), {**_TENSOR, "srcRank": "src"}, lists=("tensor",))
_RECV_ANY = Spelling(("tensor", "tag"), _TENSOR, lists=("tensor",))


SHARED = {
    "broadcast": _BROADCAST,
    "reduce": _REDUCE,
    "all_gather_single": _ALL_GATHER_SINGLE,
    "all_gather_single_coalesced": _ALL_GATHER_SINGLE_COALESCED,
    "reduce_scatter": _REDUCE_SCATTER,
    "reduce_scatter_single": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER_SINGLE_COALESCED,
    "gather": _GATHER,
    "scatter": _SCATTER,
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
    "barrier": _BARRIER,
    "send": _SEND,
    "recv": _RECV,
}
"""Names of c10d's that are also names of modern methods, which take both kinds of call."""

C10D_ONLY: Mapping[str, tuple[str | Callable[..., Work], Spelling, str]] = {
    "allreduce": ("all_reduce", _ALL_REDUCE, "work = pg.allreduce([torch.ones(2)])"),
    "allreduce_coalesced": (
        "all_reduce_coalesced",
        _ALL_REDUCE_COALESCED,
        "work = pg.allreduce_coalesced([torch.ones(2), torch.ones(3)])",
    ),
    "allgather": (
        _all_gather_any,
        _ALL_GATHER,
        "work = pg.allgather([[torch.empty(2), torch.empty(2)]], [torch.ones(2)])",
    ),
    "allgather_coalesced": (
        _all_gather_lists,
        _ALL_GATHER_LISTS,
        "work = pg.allgather_coalesced([[torch.empty(2)], [torch.empty(2)]], [torch.ones(2)])",
    ),
    "allgather_into_tensor_coalesced": (
        "all_gather_single_coalesced",
        _ALL_GATHER_SINGLE_COALESCED,
        "work = pg.allgather_into_tensor_coalesced([torch.empty(4)], [torch.ones(2)])",
    ),
    "_allgather_base": (
        "all_gather_single",
        _ALL_GATHER_SINGLE,
        "work = pg._allgather_base(torch.empty(4), torch.ones(2))",
    ),
    "_reduce_scatter_base": (
        "reduce_scatter_single",
        _REDUCE_SCATTER_SINGLE,
        "work = pg._reduce_scatter_base(torch.empty(2), torch.ones(4))",
    ),
    "reduce_scatter_tensor_coalesced": (
        "reduce_scatter_single_coalesced",
        _REDUCE_SCATTER_SINGLE_COALESCED,
        "work = pg.reduce_scatter_tensor_coalesced([torch.empty(2)], [torch.ones(4)])",
    ),
    "alltoall": (
        "all_to_all",
        _ALL_TO_ALL,
        "work = pg.alltoall([torch.empty(1), torch.empty(1)], [torch.ones(1), torch.ones(1)])",
    ),
    "alltoall_base": (
        "all_to_all_single",
        _ALL_TO_ALL_SINGLE,
        "work = pg.alltoall_base(torch.empty(2), torch.ones(2), [], [])",
    ),
    "gather_single": (
        _gather_single,
        _GATHER_SINGLE,
        "work = pg.gather_single(torch.empty(4) if pg.rank() == 0 else None, torch.ones(2))",
    ),
    "gather_into_tensor": (
        _gather_single,
        _GATHER_SINGLE,
        "work = pg.gather_into_tensor(torch.empty(4) if pg.rank() == 0 else None, torch.ones(2))",
    ),
    "recv_anysource": (
        "recv",
        _RECV_ANY,
        "works = pg.isend(torch.ones(2), pg.rank()), pg.recv_anysource([torch.empty(2)], 0)",
    ),
}
"""Names that only c10d has: the modern method or function that each one calls, how c10d spells it, and an
example for its docstring."""

OF_OBJECTS: Mapping[str, Mapping[str, str]] = {
    "broadcast_object": _SRC,
    "gather_object": _DST,
    "scatter_object": _SRC,
}
"""Methods without an overload in c10d, and the keywords of torch.distributed's functions that they take."""


class Pattern(enum.IntEnum):
    """The meaning of a method's positional arguments; ``fast_methods.pyx`` has the same values."""

    NOTHING = 0
    """None."""
    IN_PLACE = 1
    """A tensor, read and written."""
    FROM_ROOT = 2
    """The same, and a root, on which ranks must agree."""
    TO_ROOT = 3
    """A tensor, written at the root alone, and a root, on which ranks agree besides."""
    OUT_AND_IN = 4
    """An output and an input."""
    LIST_AT_ROOT = 5
    """Outputs, an input, and a root, on which ranks agree."""
    LIST_OF_ROOT = 6
    """An output, inputs, and a root, on which ranks agree."""
    TO_PEER = 7
    """A tensor that is read, and a rank."""
    FROM_PEER = 8
    """A tensor that is written, and a rank."""


def fast_method(
    method: _Method, pattern: Pattern, kind: OpKind, agreed: Any = None, async_op: bool = False
) -> _Method:
    """Return a method that runs usual calls compiled, and passes the others to a method in Python.

    Args:
        method: Takes every call.
        pattern: The usual spelling of its calls.
        kind: Which operation they are.
        agreed: Default of the arguments on which ranks must agree: the key by which plans are found.
        async_op: Whether its calls are asynchronous.
    """
    made: _Method = fast_methods.fast_method(method, int(pattern), kind, agreed, async_op)
    functools.update_wrapper(made, method)
    return made


FAST: Mapping[str, tuple[Any, ...]] = {
    "all_reduce": (Pattern.IN_PLACE, OpKind.ALL_REDUCE, SUM),
    "broadcast": (Pattern.FROM_ROOT, OpKind.BROADCAST),
    "reduce": (Pattern.TO_ROOT, OpKind.REDUCE, SUM),
    "all_gather_single": (Pattern.OUT_AND_IN, OpKind.ALL_GATHER_SINGLE),
    "reduce_scatter_single": (Pattern.OUT_AND_IN, OpKind.REDUCE_SCATTER_SINGLE, SUM),
    "gather": (Pattern.LIST_AT_ROOT, OpKind.GATHER),
    "scatter": (Pattern.LIST_OF_ROOT, OpKind.SCATTER),
    "all_to_all_single": (Pattern.OUT_AND_IN, OpKind.ALL_TO_ALL_SINGLE, EQUAL_PARTS),
    "barrier": (Pattern.NOTHING, OpKind.BARRIER),
    "send": (Pattern.TO_PEER, OpKind.SEND),
    "recv": (Pattern.FROM_PEER, OpKind.RECV),
    "isend": (Pattern.TO_PEER, OpKind.SEND, None, True),
    "irecv": (Pattern.FROM_PEER, OpKind.RECV, None, True),
}
"""Methods whose usual call is compiled, with the arguments of `fast_method` for each."""


def _renaming(method: Callable[..., Any], keywords: Mapping[str, str]) -> Callable[..., Any]:
    """Return a method that also takes arguments by other keywords."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        for other, modern in keywords.items():
            if other in given:
                if modern in given:
                    raise ArgumentTypeError(
                        f"{method.__name__} got {modern} twice: "
                        f"{given[modern]!r} and {other}={given[other]!r}"
                    )
                given[modern] = given.pop(other)
        return method(self, *args, **given)

    return call


def with_c10d_calls(group_type: _GroupType) -> _GroupType:
    """Give a class that has the modern methods c10d's names and overloads: a class decorator."""
    modern = {name: getattr(group_type, name) for name in dir(group_type)}
    for name, (method, spelling, example) in C10D_ONLY.items():
        function = modern[method] if isinstance(method, str) else method
        setattr(group_type, name, as_method(_old(name, function, spelling, example)))
    for name in {**SHARED, **FAST}:
        method = _shared(modern[name], SHARED[name]) if name in SHARED else modern[name]
        setattr(group_type, name, as_method(fast_method(method, *FAST[name]) if name in FAST else method))
    for name, keywords in OF_OBJECTS.items():
        setattr(group_type, name, _renaming(modern[name], keywords))
    return group_type
