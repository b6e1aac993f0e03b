"""The c10d face of a group: torch's spellings and ``(list, options)`` overloads over the modern methods.

torch's own code (DDP, FSDP, DTensor, functional collectives) calls these. One decoder turns such a
call into the arguments of the modern method:

* an options argument makes it a c10d call: its ``asyncOp`` decides, and a timeout of -1 ms is none;
* a list where the modern method takes a tensor holds exactly one (c10d has one tensor a rank);
* a list in ``send`` and ``recv``, and every name that only c10d has, is asynchronous.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.collectives import Collectives
from dist2.errors import InvalidUsageError
from dist2.ops import ReduceOp
from dist2.point_to_point import PointToPoint
from dist2.work import Work

OPTIONS = (
    c10d.AllreduceOptions,
    c10d.AllreduceCoalescedOptions,
    c10d.BroadcastOptions,
    c10d.ReduceOptions,
    torch._C._distributed_c10d.AllgatherOptions,
    c10d.GatherOptions,
    c10d.ScatterOptions,
    c10d.ReduceScatterOptions,
    c10d.AllToAllOptions,
    c10d.BarrierOptions,
)

_FIELDS = {"reduceOp": "op", "rootRank": "root"}
"""Fields of c10d's options, and the modern argument each stands for."""


def arguments_of(options: object) -> dict[str, Any]:
    """Return the modern keyword arguments that a c10d options object stands for."""
    arguments = {new: getattr(options, old) for old, new in _FIELDS.items() if hasattr(options, old)}
    limit: timedelta = options.timeout  # type: ignore[attr-defined]
    arguments["timeout"] = limit if limit > timedelta(0) else None
    arguments["async_op"] = bool(options.asyncOp)  # type: ignore[attr-defined]
    return arguments


def only(value: object, argument: str) -> Any:
    """Return what a c10d list holds, or the value itself where it is none.

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


def parts(value: object, argument: str) -> Any:
    """Return the inner list of c10d's list of lists; other lists are what they are."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        return only(value, argument)
    return value


def decode(
    extra: tuple[object, ...], keywords: dict[str, Any], names: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """Return the modern keyword arguments of a c10d call, or None where there are no options in it.

    Args:
        extra: The positional arguments after the tensors.
        keywords: The keyword arguments.
        names: What those positional arguments are called, where some go beside options.
    """
    options = keywords.get("opts")
    beside: dict[str, Any] = {}
    for index, value in enumerate(extra):
        if isinstance(value, OPTIONS):
            options = value
        elif index < len(names):
            beside[names[index]] = value
    return None if options is None else {**beside, **arguments_of(options)}


class C10dMethods(Collectives, PointToPoint):
    """Decodes c10d calls; see the module's docstring."""

    # Names that both have: a modern call passes through

    def broadcast(self, tensor: Any, root: Any = 0, timeout: Any = None, **keywords: Any) -> Work:
        found = decode((root, timeout), keywords)
        if found is None and not isinstance(tensor, (list, tuple)):
            return super().broadcast(tensor, root, timeout, **keywords)
        return super().broadcast(only(tensor, "tensors"), **(found or _later(root=root, timeout=timeout)))

    def reduce(
        self, tensor: Any, root: Any = 0, op: Any = ReduceOp.SUM, timeout: Any = None, **keywords: Any
    ) -> Work:
        found = decode((root, op, timeout), keywords)
        if found is None and not isinstance(tensor, (list, tuple)):
            return super().reduce(tensor, root, op, timeout, **keywords)
        return super().reduce(only(tensor, "tensors"), **(found or _later(root=root, op=op, timeout=timeout)))

    def all_gather_single(self, output: Any, input: Any, timeout: Any = None, **keywords: Any) -> Work:
        found = decode((timeout,), keywords)
        if found is None:
            return super().all_gather_single(output, input, timeout, **keywords)
        return super().all_gather_single(output, input, **found)

    def reduce_scatter_single(
        self,
        output: Any = None,
        input: Any = None,
        op: Any = ReduceOp.SUM,
        timeout: Any = None,
        **keywords: Any,
    ) -> Work:
        output = keywords.pop("outputTensor", output)
        source = keywords.pop("inputTensor", input)
        found = decode((op, timeout), keywords)
        if found is None:
            return super().reduce_scatter_single(output, source, op, timeout, **keywords)
        return super().reduce_scatter_single(output, source, **found)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, timeout: Any = None, **keywords: Any
    ) -> Work:
        found = decode((timeout,), keywords)
        if found is None:
            return super().all_gather_single_coalesced(outputs, inputs, timeout, **keywords)
        return super().all_gather_single_coalesced(outputs, inputs, **found)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, op: Any = ReduceOp.SUM, timeout: Any = None, **keywords: Any
    ) -> Work:
        found = decode((op, timeout), keywords)
        if found is None:
            return super().reduce_scatter_single_coalesced(outputs, inputs, op, timeout, **keywords)
        return super().reduce_scatter_single_coalesced(outputs, inputs, **found)

    def reduce_scatter(
        self, output: Any, inputs: Any, op: Any = ReduceOp.SUM, timeout: Any = None, **keywords: Any
    ) -> Work:
        found = decode((op, timeout), keywords)
        if found is None and not isinstance(output, (list, tuple)):
            return super().reduce_scatter(output, inputs, op, timeout, **keywords)
        arguments = found or _later(op=op, timeout=timeout)
        return super().reduce_scatter(
            only(output, "output_tensors"), parts(inputs, "input_tensors"), **arguments
        )

    def gather(
        self,
        outputs: Any,
        input: Any,
        root: Any = 0,
        timeout: Any = None,
        **keywords: Any,
    ) -> Work:
        found = decode((root, timeout), keywords)
        if found is None and not isinstance(input, (list, tuple)):
            return super().gather(outputs, input, root, timeout, **keywords)
        arguments = found or _later(root=root, timeout=timeout)
        return super().gather(parts(outputs, "output_tensors"), only(input, "input_tensors"), **arguments)

    def scatter(
        self, output: Any, inputs: Any = None, root: Any = 0, timeout: Any = None, **keywords: Any
    ) -> Work:
        found = decode((root, timeout), keywords)
        if found is None and not isinstance(output, (list, tuple)):
            return super().scatter(output, inputs, root, timeout, **keywords)
        arguments = found or _later(root=root, timeout=timeout)
        return super().scatter(only(output, "output_tensors"), parts(inputs, "input_tensors"), **arguments)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_splits: Any = None,
        input_splits: Any = None,
        timeout: Any = None,
        **keywords: Any,
    ) -> Work:
        received = keywords.pop("output_split_sizes", output_splits)
        sent = keywords.pop("input_split_sizes", input_splits)
        found = decode((received, sent, timeout), keywords)
        if found is None:
            return super().all_to_all_single(output, input, received, sent, timeout, **keywords)
        received, sent = (None if isinstance(each, OPTIONS) else each for each in (received, sent))
        return super().all_to_all_single(output, input, received, sent, **found)

    def barrier(self, timeout: Any = None, **keywords: Any) -> Work:
        found = decode((timeout,), keywords)
        if found is None:
            return super().barrier(timeout, **keywords)
        return super().barrier(**found)

    def send(self, tensor: Any, dst: Any = None, tag: int = 0, **keywords: Any) -> Work:
        dst = keywords.pop("dstRank", dst)
        if isinstance(tensor, (list, tuple)):
            keywords["async_op"] = True
        return super().send(only(tensor, "tensors"), dst, tag, **keywords)

    def recv(self, tensor: Any, src: Any = None, tag: int = 0, **keywords: Any) -> Work:
        src = keywords.pop("srcRank", src)
        if isinstance(tensor, (list, tuple)):
            keywords["async_op"] = True
        return super().recv(only(tensor, "tensors"), src, tag, **keywords)

    # Names that only c10d has

    def allreduce(self, tensor: Any, *extra: Any, **keywords: Any) -> Work:
        return self.all_reduce(only(tensor, "tensors"), **_old(extra, keywords, ("op", "timeout")))

    def allreduce_coalesced(self, tensors: Any, *extra: Any, **keywords: Any) -> Work:
        return self.all_reduce_coalesced(tensors, **_old(extra, keywords, ("op", "timeout")))

    def allgather(self, output_tensors: Any, input_tensor: Any, *extra: Any, **keywords: Any) -> Work:
        outputs, source = parts(output_tensors, "output_tensors"), only(input_tensor, "input_tensors")
        arguments = _old(extra, keywords, ("timeout",))
        if len({tensor.numel() for tensor in outputs if isinstance(tensor, torch.Tensor)}) > 1:
            return self.all_gather_v(outputs, source, **arguments)
        return self.all_gather(outputs, source, **arguments)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, *extra: Any, **keywords: Any) -> Work:
        """c10d's layout: ``output_lists[r][i]`` receives tensor i of rank r."""
        arguments = _old(extra, keywords, ("timeout",))
        batch = self._open_batch()
        for index, source in enumerate(input_list):
            self.all_gather([row[index] for row in output_lists], source, timeout=arguments["timeout"])
        return self._close_batch(batch, arguments["async_op"])

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, *extra: Any, **keywords: Any
    ) -> Work:
        return self.all_gather_single_coalesced(outputs, inputs, **_old(extra, keywords, ("timeout",)))

    def _allgather_base(self, output: Any, input: Any, *extra: Any, **keywords: Any) -> Work:
        return self.all_gather_single(output, input, **_old(extra, keywords, ("timeout",)))

    def _reduce_scatter_base(self, *tensors: Any, **keywords: Any) -> Work:
        output, source, *extra = (
            *(keywords.pop(name) for name in ("outputTensor", "inputTensor") if name in keywords),
            *tensors,
        )
        arguments = _old(tuple(extra), keywords, ("op", "timeout"))
        return self.reduce_scatter_single(output, source, **arguments)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, *extra: Any, **keywords: Any
    ) -> Work:
        arguments = _old(extra, keywords, ("op", "timeout"))
        return self.reduce_scatter_single_coalesced(outputs, inputs, **arguments)

    def alltoall(self, output_tensors: Any, input_tensors: Any, *extra: Any, **keywords: Any) -> Work:
        return self.all_to_all(output_tensors, input_tensors, **_old(extra, keywords, ("timeout",)))

    def alltoall_base(self, output: Any, input: Any, *extra: Any, **keywords: Any) -> Work:
        names = ("output_split_sizes", "input_split_sizes", "timeout")
        return self.all_to_all_single(output, input, **_old(extra, keywords, names))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)


def _later(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of a c10d call without options: asynchronous, as c10d is."""
    return {**arguments, "async_op": True}


def _old(extra: tuple[Any, ...], keywords: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the modern keyword arguments of a call by a name that only c10d has."""
    found = decode(extra, keywords, names)
    if found is not None:
        return found
    given = dict(zip(names, extra, strict=False))
    return {"timeout": None, "async_op": True, **given, **keywords}
