"""`PluginBackend`: a group's operations as calls of c10d's methods on an object of another package.

Each operation has one method of c10d, or two names of it: torch 2.13 renamed ``_allgather_base`` to
``all_gather_single``. A method is tried once for each dtype and reduction. If the object says that it does
not support the call, the backend remembers that and builds the operation from others, as `Backend` does for
every backend. All ranks have the same objects, so all of them take the same way.

Waiting is as for Gloo (`GlooCore`): the caller waits for a future of ours, so that `abort` frees it. The
torch future of the object's Work completes it, or a thread that calls ``work.wait()`` where a Work has no
future. A collective of a Python object may block in the call itself, so such a call runs on that thread as a
whole; a group runs one collective at a time, so their order is kept. After the operation's deadline the
caller gets an error although the object goes on.

Outputs that are not contiguous are written through a contiguous copy. Messages of a rank to itself stay in
the process, as few backends of c10d have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dist2.backends.base import Backend, GroupSpec, Tensors
from dist2.backends.gloo.core import left, translate
from dist2.backends.gloo.messages import Messages, Waiters
from dist2.errors import InvalidUsageError, OperationTimeoutError
from dist2.operation.execution import Execute
from dist2.operation.kinds import SUM, ReduceKind, Reduction
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.operation.storage import flattened
from dist2.runtime.torch_versions import BINDING

_REFUSALS = ("does not support", "not supported", "unsupported", "not implemented", "no backend type")
_REFUSED_TYPES = ("scalar type", "dtype", "data type", "cannot use reduceop", "can't be cast")
"""Key words by which c10d's classes say that they lack a method, or lack it for a dtype or reduction."""


class Unsupported(Exception):  # noqa: N818 - no error: the operation is built in another way
    """The object does not support a call."""


class PluginBackend(Messages):
    """Runs operations on an object with c10d's methods.

    Args:
        spec: Description of the group.
        native: The object; this backend keeps the only reference.
        devices: Types of devices whose tensors it takes.
        make: Makes the backend of a subgroup.
    """

    def __init__(
        self, spec: GroupSpec, native: Any, devices: tuple[str, ...], make: Callable[[GroupSpec], Any]
    ) -> None:
        super().__init__(spec, native)
        self.device_types = devices
        self._make = make
        self._lacking: set[tuple[str, Reduction | None, torch.dtype | None]] = set()
        self._is_compiled = isinstance(native, BINDING.Backend) or "cpu" not in self.device_types
        self._waiters = Waiters(f"dist2-{spec.info.backend}-{spec.info.name}")

    def plan(self, signature: Signature) -> Execute:
        """Return the method of the operation: the object checks dtypes and reductions."""
        return Backend.plan(self, signature)

    def split(self, spec: GroupSpec) -> Backend:
        """Return a backend for a subset of this one's members."""
        made: Backend = self._make(spec)
        return made

    # Collectives

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        with Written(outputs, loaded=True) as written:
            _scale(written, operation)
            self._need(operation, ("allreduce",), written, _reducing(c10d.AllreduceOptions, operation))

    def all_reduce_coalesced(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        if not _multiplies(operation) and len({each.dtype for each in outputs}) == 1:
            with Written(outputs, loaded=True) as written:
                options = _reducing(c10d.AllreduceCoalescedOptions, operation)
                if self._call(operation, ("allreduce_coalesced",), written, options):
                    return
        super().all_reduce_coalesced(operation, inputs, outputs)

    def broadcast(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        with Moved(outputs, loaded=True) as written:
            self._need(operation, ("broadcast",), written, _rooted(c10d.BroadcastOptions, operation))

    def reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        options = _reducing(c10d.ReduceOptions, operation)
        options.rootRank = operation.signature.root
        if _multiplies(operation):
            done = False
        elif outputs:
            with Written(outputs, loaded=True) as written:
                done = self._call(operation, ("reduce",), written, options)
        else:  # c10d allows an object to write partial results on other ranks: give it a copy
            done = self._call(operation, ("reduce",), [_read(inputs[0]).clone()], options)
        if not done:
            super().reduce(operation, inputs, outputs)

    def all_gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        with Moved(outputs) as written:
            options = _options(c10d.AllgatherOptions, operation)
            self._need(operation, ("allgather",), [written], [_moved(inputs[0])], options)

    def all_gather_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        names = ("_allgather_base", "all_gather_single")
        with Moved(outputs) as (written,):
            options = _options(c10d.AllgatherOptions, operation)
            if self._call(operation, names, written, _moved(inputs[0]), options):
                return
        super().all_gather_single(operation, inputs, outputs)

    def reduce_scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        if not _multiplies(operation):
            read = [[_read(tensor).view(-1) for tensor in inputs]]
            with Written(outputs) as (written,):
                options = _reducing(c10d.ReduceScatterOptions, operation)
                if self._call(operation, ("reduce_scatter",), [written.view(-1)], read, options):
                    return
        super().reduce_scatter(operation, inputs, outputs)

    def reduce_scatter_v(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        Backend.reduce_scatter(self, operation, inputs, outputs)  # c10d's takes equal sizes only

    def reduce_scatter_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        names = ("_reduce_scatter_base", "reduce_scatter_single")
        if not _multiplies(operation):
            with Written(outputs) as (written,):
                options = _reducing(c10d.ReduceScatterOptions, operation)
                if self._call(operation, names, written.view(-1), _read(inputs[0]).view(-1), options):
                    return
        super().reduce_scatter_single(operation, inputs, outputs)

    def gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        with Moved(outputs) as written:
            options = _rooted(c10d.GatherOptions, operation)
            parts = [written] if written else []
            if self._call(operation, ("gather",), parts, [_moved(inputs[0])], options):
                return
        super().gather(operation, inputs, outputs)

    def scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        parts = [[_moved(tensor) for tensor in inputs]] if inputs else []
        with Moved(outputs) as written:
            options = _rooted(c10d.ScatterOptions, operation)
            if self._call(operation, ("scatter",), written, parts, options):
                return
        super().scatter(operation, inputs, outputs)

    def all_to_all(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        read = [_moved(tensor) for tensor in inputs]
        with Moved(outputs) as written:
            received, sent = torch.cat(written), torch.cat(read)
            sizes = [each.numel() for each in written], [each.numel() for each in read]
            options = _options(c10d.AllToAllOptions, operation)
            names = ("alltoall_base", "all_to_all_single")  # which take uneven sizes
            if self._call(operation, names, received, sent, *sizes, options):
                for target, part in zip(written, received.split(sizes[0]), strict=True):
                    target.copy_(part)
            else:
                self._need(operation, ("alltoall",), written, read, options)

    def all_to_all_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        signature, names = operation.signature, ("alltoall_base", "all_to_all_single")
        sizes = list(signature.output_splits or ()), list(signature.input_splits or ())
        if inputs[0].dtype in _COMMON:  # bytes of other dtypes would be other rows
            with Written(outputs) as (written,):
                options = _options(c10d.AllToAllOptions, operation)
                if self._call(operation, names, written, _read(inputs[0]), *sizes, options):
                    return
        super().all_to_all_single(operation, inputs, outputs)

    def barrier(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        if not self._call(operation, ("barrier",), _options(c10d.BarrierOptions, operation)):
            super().barrier(operation, inputs, outputs)

    # Messages

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Any:
        signature, content = operation.signature, [_moved(inputs[0])]
        if signature.peer == self.rank:
            return super().send(operation, inputs, outputs)
        return self._start(operation, lambda native: native.send(content, signature.peer, signature.tag))

    def receive(self, operation: Operation, outputs: Tensors, source: int | None) -> Any:
        if source == self.rank:
            return super().receive(operation, outputs, source)
        written, landing, tag = Moved(outputs), ExitStack(), operation.signature.tag
        targets = landing.enter_context(written)

        def start(native: Any) -> Any:
            if source is None:
                return native.recv_anysource(targets, tag)
            return native.recv(targets, source, tag)

        def land(work: Any) -> None:
            landing.close()
            operation.source = _source(work) if source is None else source

        return self._start(operation, start, land)

    # Calls of the object

    def _need(self, operation: Operation, names: Sequence[str], *arguments: Any) -> None:
        """Run an operation that others are built from.

        Raises:
            InvalidUsageError: The object does not support it.
        """
        if not self._call(operation, names, *arguments):
            signature = operation.signature
            backend = signature.group.backend
            dtypes = ", ".join(sorted({str(meta.dtype) for meta in (*signature.inputs, *signature.outputs)}))
            raise InvalidUsageError(
                f"{signature} on {dtypes} is not possible with backend {backend!r}: its object does not "
                f"support {' or '.join(names)}"
            )

    def _call(self, operation: Operation, names: Sequence[str], *arguments: Any) -> bool:
        """Run an operation by the first of these methods that supports it; False if none does."""
        signature = operation.signature
        dtype = next((meta.dtype for meta in (*signature.inputs, *signature.outputs)), None)
        for name in names:
            key = (name, signature.reduction, dtype)
            if key in self._lacking:
                continue
            try:
                self._run_named(operation, name, arguments)
            except Unsupported:
                self._lacking.add(key)
            else:
                return True
        return False

    def _run_named(self, operation: Operation, name: str, arguments: Sequence[Any]) -> None:
        def start(native: Any) -> Any:
            method = getattr(native, name, None)
            if method is None:
                raise Unsupported(name)
            return method(*arguments)

        call = self._start(operation, start) if self._is_compiled else self._start_beside(operation, start)
        self.finish(call, operation)

    def _start(
        self, operation: Operation, start: Callable[[Any], Any], land: Callable[[Any], object] | None = None
    ) -> Any:
        """Start a call of the object; return a future that completes once it has ended.

        Args:
            operation: The operation, for errors.
            start: Given the object, returns its Work, or None if the call is complete.
            land: Called with the Work once it has succeeded.
        """
        call = self.calls.begin()
        try:
            work = start(self.native)
        except BaseException as error:
            self.calls.end(call, None)
            raise _meaning(error, operation) from error

        def end(wait: Callable[[], object]) -> None:
            failure: BaseException | None = None
            try:
                wait()
                if land is not None and not call.done():
                    land(work)
            except BaseException as error:  # noqa: BLE001 - delivered to the caller
                failure = _meaning(error, operation)
            self.calls.end(call, failure)

        future = None if operation.signature.kind.is_p2p else _future_of(work)
        if work is None:
            end(lambda: None)
        elif future is not None:
            future.add_done_callback(lambda done: end(done.value))
        else:
            self._waiters.put(lambda: end(lambda: _wait(work, operation)))
        return call

    def _start_beside(self, operation: Operation, start: Callable[[Any], Any]) -> Any:
        """Run a call of the object on another thread, to its end; return a future for that."""
        call, native = self.calls.begin(), self.native

        def job() -> None:
            failure: BaseException | None = None
            try:
                work = start(native)
                if work is not None:
                    _wait(work, operation)
            except BaseException as error:  # noqa: BLE001 - delivered to the caller
                failure = _meaning(error, operation)
            self.calls.end(call, failure)

        self._waiters.put(job)
        return call

    # The end

    def shutdown(self) -> None:
        """Wait for all calls, then shut the object down. Calls that did not end in time are broken off."""
        native = self._box[0] if self._box and not (self._closed or self._is_stuck) else None
        if native is not None:
            self.calls.wait_quiet(self.spec.timeout_s)
            _end(native, "shutdown")
            del native
        super().shutdown()

    def _break_off(self, how: str, patience_s: float) -> None:
        if how == "was aborted" and self._box:
            _end(self._box[0], "abort")
        super()._break_off(how, patience_s)
        self._waiters.stop()


class Written(ExitStack):
    """Contiguous tensors in place of outputs; the outputs get their elements when the block has succeeded.

    Args:
        outputs: Tensors to be written.
        loaded: The operation also reads them.
    """

    def __init__(self, outputs: Tensors, *, loaded: bool = False) -> None:
        super().__init__()
        self._outputs, self._loaded = outputs, loaded

    def __enter__(self) -> list[torch.Tensor]:  # type: ignore[override]  # the tensors are the context
        super().__enter__()
        return [self._target(output.detach()) for output in self._outputs]

    def _target(self, output: torch.Tensor) -> torch.Tensor:
        if output.is_contiguous() and not (output.is_conj() or output.is_neg()):
            return output
        copy = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        if self._loaded:
            copy.copy_(output)

        def land(kind: object, error: object, traceback: object) -> None:
            if kind is None:
                output.copy_(copy)

        self.push(land)
        return copy


class Moved(Written):
    """As `Written`, for tensors that are only moved: flat, and bytes if objects often lack their dtype."""

    def _target(self, output: torch.Tensor) -> torch.Tensor:
        return _bytes_of(super()._target(output))


_COMMON = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
"""Dtypes that every backend of c10d moves."""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = flattened(tensor)  # the tensors of a call may have other shapes, and some objects refuse that
    return flat if flat.dtype in _COMMON else flat.view(torch.uint8)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    return _bytes_of(_read(tensor))


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _options(kind: type[Any], operation: Operation) -> Any:
    options = kind()
    options.timeout = left(operation)
    return options


def _rooted(kind: type[Any], operation: Operation) -> Any:
    options = _options(kind, operation)
    options.rootRank = operation.signature.root
    return options


def _reducing(kind: type[Any], operation: Operation) -> Any:
    options = _options(kind, operation)
    options.reduceOp = _reduce_op(operation.signature.reduction or SUM)  # a barrier may be a sum
    return options


def _reduce_op(reduction: Reduction) -> Any:
    kind = ReduceKind.SUM if reduction.factor is not None else reduction.kind
    return getattr(c10d.ReduceOp, kind.name)


def _multiplies(operation: Operation) -> bool:
    """Whether each contribution is multiplied first: c10d does so for NCCL alone."""
    reduction = operation.signature.reduction
    return reduction is not None and reduction.factor is not None


def _scale(tensors: Tensors, operation: Operation) -> None:
    reduction = operation.signature.reduction
    if reduction is not None and reduction.factor is not None:
        for tensor in tensors:
            tensor.mul_(reduction.factor)


def _meaning(error: BaseException, operation: Operation) -> BaseException:
    """Return the error of an operation for an exception that a call of the object has raised."""
    signature = operation.signature
    if isinstance(error, TimeoutError) and not isinstance(error, OperationTimeoutError):
        late = OperationTimeoutError(
            f"{operation.describe()} on {signature.group.backend} failed: {error}",
            timeout_s=operation.timeout_s,
        )
        late.__cause__ = error  # of a Python object, perhaps one that waits at a store
        return late
    refused = _is_refusal(error, signature.reduction is not None)
    if not refused and not isinstance(error, (NotImplementedError, Unsupported)):
        return translate(error, operation)
    if signature.kind.is_p2p:
        return InvalidUsageError(
            f"{signature} is not possible with backend {signature.group.backend!r}: {error}"
        )
    return Unsupported(str(error))


def _is_refusal(error: BaseException, reduces: bool) -> bool:
    words = (*_REFUSALS, *_REFUSED_TYPES) if reduces else _REFUSALS
    return isinstance(error, (RuntimeError, ValueError)) and any(word in str(error).lower() for word in words)


def _future_of(work: Any) -> Any:
    """Return the torch future of a Work; None if it has none."""
    try:
        return work.get_future()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _wait(work: Any, operation: Operation) -> None:
    if isinstance(work, c10d.Work):
        work.wait(left(operation))
    else:
        work.wait()


def _source(work: Any) -> int:
    for name in ("_source_rank", "source_rank"):
        method = getattr(work, name, None)
        if method is not None:
            return int(method())
    return -1


def _end(native: Any, how: str) -> None:
    """Call a method that ends the object, if it has one. Its failure leaves nothing to be done."""
    with suppress(Exception):
        getattr(native, how)()
