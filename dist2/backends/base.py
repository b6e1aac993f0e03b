"""`Backend`: the part of a group that moves tensors.

The group has validated every argument, numbered the operation and notified the instruments before a
backend sees it; the backend moves bytes and raises `dist2.errors` types. Adding one is a file, a
line in the entry points `dist2.backends`, and a parameter of the conformance suite.

Every operation has one shape, ``method(operation, inputs, outputs)``: `operation.signature` has the
arguments (root, reduction, splits), `inputs` are read, `outputs` written. Their content:

=============================  ============================================  ============================
operation                      inputs                                        outputs
=============================  ============================================  ============================
all_reduce                     [tensor]                                      [tensor] (the same)
all_reduce_coalesced           tensors                                       tensors (the same)
broadcast                      [tensor]                                      [tensor] (the same)
reduce                         [tensor]                                      [tensor] at root, [] elsewhere
all_gather, all_gather_v       [tensor]                                      one a rank
all_gather_single              [tensor]                                      [concatenation]
reduce_scatter(_v)             one a rank                                    [tensor]
reduce_scatter_single          [concatenation]                               [tensor]
gather                         [tensor]                                      one a rank at root, [] elsewhere
scatter                        one a rank at root, [] elsewhere              [tensor]
all_to_all                     one a rank                                    one a rank
all_to_all_single              [tensor]                                      [tensor]
``*_single_coalesced``         tensors                                       concatenations, or the reverse
barrier                        []                                            []
send                           [tensor]                                      []
recv                           []                                            [tensor]
=============================  ============================================  ============================

Tensors may be non-contiguous, 0-d or empty, and may require grad (write through `detach()`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import ClassVar

import attrs
import torch
from torch.distributed import Store

from dist2.backends.consensus import Agreement
from dist2.errors import GroupRevokedError, InvalidUsageError
from dist2.operation.execution import Execute, Helped, Job, StreamOrdered, Tensors
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature
from dist2.rendezvous.liveness import FailureWatch
from dist2.runtime.rank_names import RankNames
from dist2.store import PrefixStore

__all__ = ["Backend", "Execute", "GroupSpec", "Helped", "Job", "StreamOrdered", "Tensors"]  # for backends


@attrs.frozen(eq=False)
class GroupSpec:
    """The description of a group from which a backend is built.

    Attributes:
        info: Identity of the group.
        timeout_s: Default limit of an operation and of building the group, in seconds.
        device: Where the group's tensors live by default.
        options: The keyword arguments of `new_group`, unchecked.
        check_nan: Whether operations refuse inputs with NaN.
        verify: Every n-th operation with equal results on all ranks is verified; 0 for none.

    Args:
        store: Shared by its members.
        prefix: First part of the group's keys in it; empty for none.
    """

    info: GroupInfo
    _root: Store = attrs.field(alias="store")
    timeout_s: float
    device: torch.device
    options: Mapping[str, object] = attrs.field(factory=dict)
    _prefix: str = ""
    check_nan: bool = False
    verify: int = 0

    @cached_property
    def store(self) -> Store:
        """Private to this group (prefixed), shared by its members; made when it is first wanted."""
        return PrefixStore(self._prefix, self._root) if self._prefix else self._root

    def within(self, prefix: str, info: GroupInfo, timeout_s: float) -> GroupSpec:
        """Return the spec of a group whose members meet under a prefix of this one's store."""
        below = f"{self._prefix}/{prefix}" if self._prefix else prefix
        return attrs.evolve(self, info=info, timeout_s=timeout_s, prefix=below)

    @contextmanager
    def building(self, control: Backend | None = None) -> Iterator[GroupSpec]:
        """Yield the spec to build a backend from; if the block raises, the other ranks are notified.

        Args:
            control: A backend of the same members, which knows also of a member that dies before it begins to
                build.
        """
        info = self.info
        place = info.rank, info.world_size, info.name
        names, lost = (info.names, dict) if control is None else (control.names, control.lost)
        with FailureWatch("building", self.store, *place, names=names, lost=lost) as store:
            yield self.at(store, info, self.timeout_s)

    def at(self, store: Store, info: GroupInfo, timeout_s: float) -> GroupSpec:
        """Return the spec of a group whose members meet in another store."""
        return attrs.evolve(self, info=info, store=store, timeout_s=timeout_s, prefix="")


def ignore_revocation(error: GroupRevokedError) -> None:
    """Default for `Backend.on_revoked`, before a group uses the backend."""


class Backend(ABC):
    """Moves tensors between the members of one group.

    Attributes:
        natively_async: Whether collectives return at once with a future, in issue order. Where False,
            they block, and the group runs asynchronous ones on the thread of its `CollectiveQueue`.
        stream_ordered: Whether operations that complete later are `StreamOrdered`. Starting one never blocks.
        frees_tensors: Whether the tensors of a failed operation are no longer accessed, so that its outputs
            can be poisoned.
        leaves_at_once: Whether `shutdown` waits for nobody while no operation is under way.
        has_peers: Whether the other ranks exist, so that the group may wait for them at its store.
        device_types: Devices whose tensors it takes.
        staged_types: Devices whose tensors the group copies to the host for it.
        revoked: The error of the group's operations once a member has revoked it.
        on_revoked: Called with that error, once a member has revoked the group.
    """

    natively_async: ClassVar[bool] = False
    stream_ordered: ClassVar[bool] = False
    has_peers: ClassVar[bool] = True
    frees_tensors: bool = False
    leaves_at_once: bool = False
    device_types: tuple[str, ...] = ("cpu",)
    staged_types: tuple[str, ...] = ()

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.rank = spec.info.rank
        self.world_size = spec.info.world_size
        self.revoked: GroupRevokedError | None = None
        self.on_revoked: Callable[[GroupRevokedError], None] = ignore_revocation

    # Planning

    def plan(self, signature: Signature) -> Execute:
        """Return a callable that runs operations of this signature; the group caches it.

        A backend with something to prepare (views, schedules) overrides this.

        Raises:
            InvalidUsageError: The backend cannot do this (dtype, reduction).
        """
        method: Execute = getattr(self, signature.kind.value)
        return method

    def plan_plain(self, signature: Signature) -> Execute:
        """Like `plan`, for calls whose tensors the group found to be plain.

        Those are contiguous and neither lazily conjugated nor lazily negated.
        """
        return self.plan(signature)

    def together(self) -> AbstractContextManager[object]:
        """Start the messages that the calling thread issues in a ``with`` block together, at its end.

        None of them may then wait for another. Those that start at once need nothing for that.
        """
        return nullcontext()

    def bound(self, job: Job) -> Job:
        """Return a job that acts on another thread as in the calling one: on its current stream, say."""
        return job

    def waited_ns(self) -> int | None:
        """Return for how long operations have waited for other ranks, in nanoseconds; None if not known."""
        return None

    # Primitives

    @abstractmethod
    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Combine the tensor of all ranks, in place."""

    @abstractmethod
    def broadcast(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Overwrite the tensor with that of `signature.root`."""

    @abstractmethod
    def all_gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Write the input of rank r to ``outputs[r]``, on all ranks."""

    @abstractmethod
    def all_to_all(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Write ``inputs[self.rank]`` of rank r to ``outputs[r]``; sizes may differ."""

    @abstractmethod
    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
        """Send to `signature.peer`; a future where `operation.is_async`, or crossing sends deadlock."""

    @abstractmethod
    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
        """Receive from `signature.peer` or any rank; set `operation.source`."""

    # Built from the primitives, for backends that block; natively asynchronous ones bring their own

    def all_reduce_coalesced(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Combine each tensor of the list, in place."""
        for tensor in outputs:
            self.all_reduce(operation, [tensor], [tensor])
        return None

    def reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Combine the tensors of all ranks at the root; the others keep theirs."""
        result = inputs[0].detach().clone()
        self.all_reduce(operation, [result], [result])
        if outputs:
            outputs[0].detach().copy_(result)
        return None

    def all_gather_v(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Write the input of rank r to ``outputs[r]``; sizes may differ by rank."""
        self.all_to_all(operation, [inputs[0]] * self.world_size, outputs)
        return None

    def all_gather_single(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Write the inputs of all ranks one after the other to the output."""
        with parts_of(outputs[0], self.world_size) as parts:
            self.all_gather(operation, [inputs[0].detach().reshape(-1)], parts)
        return None

    def all_gather_single_coalesced(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Gather each tensor of the list."""
        for source, result in zip(inputs, outputs, strict=True):
            self.all_gather_single(operation, [source], [result])
        return None

    def reduce_scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Combine ``inputs[r]`` of all ranks at rank r; sizes may differ by r."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        self.all_reduce(operation, [flat], [flat])
        start = sum(tensor.numel() for tensor in inputs[: self.rank])
        mine = flat[start : start + outputs[0].numel()]
        outputs[0].detach().copy_(mine.view(outputs[0].shape))
        return None

    def reduce_scatter_v(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Combine ``inputs[r]`` of all ranks at rank r; sizes may differ by r."""
        return self.reduce_scatter(operation, inputs, outputs)

    def reduce_scatter_single(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Combine the inputs of all ranks and leave the r-th part at rank r."""
        parts = inputs[0].detach().reshape(-1).tensor_split(self.world_size)
        self.reduce_scatter(operation, parts, outputs)
        return None

    def reduce_scatter_single_coalesced(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Combine and scatter each tensor of the list."""
        for source, result in zip(inputs, outputs, strict=True):
            self.reduce_scatter_single(operation, [source], [result])
        return None

    def gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Write the input of rank r to ``outputs[r]`` at the root."""
        nothing = [torch.empty_like(inputs[0]) for _ in range(self.world_size)]
        self.all_gather(operation, inputs, outputs or nothing)
        return None

    def scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Write ``inputs[r]`` of the root to the output of rank r."""
        output = outputs[0].detach()
        if inputs:  # of any shapes
            stacked = torch.stack([tensor.detach().reshape(-1) for tensor in inputs])
        else:
            stacked = output.new_empty((self.world_size, output.numel()))
        self.broadcast(operation, [stacked], [stacked])
        output.copy_(stacked[self.rank].view(output.shape))
        return None

    def all_to_all_single(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | None:
        """Exchange row blocks of dimension 0 as the signature's splits say; equal ones without."""
        signature = operation.signature
        sent = split_rows(inputs[0].detach(), signature.input_splits, self.world_size)
        with contiguous_copy_of(outputs[0]) as result:
            self.all_to_all(operation, sent, split_rows(result, signature.output_splits, self.world_size))
        return None

    def barrier(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        """Return when all ranks have called."""
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self.all_reduce(operation, [token], [token])
        return None

    # Membership

    def revoke(self, by: int) -> None:
        """Make pending and later operations fail with `GroupRevokedError` on all live members.

        Tells `on_revoked` on each, from any thread, which must not block. Idempotent.

        Args:
            by: Group rank of the member that revoked the group.

        Raises:
            InvalidUsageError: The backend cannot tell the others.
        """
        raise self._cannot("revoke a group")

    def last_seen(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the operation that each of some members was last seen at, in words; by default none."""
        return {}

    def broken_by(self, error: BaseException) -> None:  # noqa: B027 - most have no means
        """Note the error that broke the group on this rank, and tell it to ranks that wait for this one."""

    def leaves_for(self, error: BaseException) -> None:  # noqa: B027 - likewise
        """Take in why this rank is about to abort the group: nothing that the group has done."""

    def look(self) -> None:
        """Process, without waiting, messages of members about the group's state. Nothing by default."""
        return

    def agree(self, flags: int, deadline_ns: int, shrinks: bool = False) -> tuple[int, Agreement]:
        """Return the number of the next agreement, from 1, and its result on all survivors.

        Works on groups that are broken or revoked. See `dist2.backends.consensus`.

        Raises:
            MismatchError: Some called with ``shrinks`` and others without.
            OperationTimeoutError: Ranks did not arrive in time: `missing`.
            InvalidUsageError: The backend has no way to agree once a rank is gone.
        """
        raise self._cannot("agree")

    def handle(self) -> str:
        """Return this process's address as text, for `reconfigure` in other processes.

        Raises:
            InvalidUsageError: The backend needs a store to meet.
        """
        raise self._cannot("say how it is reached")

    def reconfigure(self, spec: GroupSpec, handles: Sequence[str]) -> Backend:
        """Return a backend for the processes with these handles, by group rank; all of them call.

        Raises:
            InvalidUsageError: The backend needs a store to meet, or something is not a handle.
            OperationTimeoutError: Not all called in time: `missing`.
            PeerLostError: Some are gone.
        """
        raise self._cannot("be reconfigured")

    def _cannot(self, what: str) -> InvalidUsageError:
        return InvalidUsageError(f"backend {self.spec.info.backend!r} cannot {what}; 'socket' can")

    # Life

    @abstractmethod
    def shutdown(self) -> None:
        """Close gracefully: all operations have finished. Idempotent."""

    @abstractmethod
    def abort(self) -> None:
        """Make blocked operations raise `GroupAbortedError` within 100 ms. Idempotent.

        From any thread and from signal handlers: set flags and wake, take no lock. `shutdown` follows
        once no thread is inside.
        """

    @property
    def names(self) -> RankNames:
        """The names of the members in texts."""
        return self.spec.info.names

    def lost(self) -> Mapping[int, str]:
        """Return the group ranks that are known to have died; none by default.

        Each has how it ended, in words that follow its name: ``exited with code 3``.
        """
        return {}

    def departed(self) -> Mapping[int, str]:
        """Return the group ranks that are known to have left or aborted the group, as `lost` does."""
        return {}

    def split(self, spec: GroupSpec) -> Backend:
        """Return a backend for a subset of this one's members; only they call."""
        return type(self)(spec)


@contextmanager
def contiguous_copy_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a contiguous tensor to write to; on success, copy its content to ``tensor``."""
    target = tensor.detach()
    if target.is_contiguous():
        yield target
        return
    copy = torch.empty_like(target, memory_format=torch.contiguous_format)
    yield copy
    target.copy_(copy)


@contextmanager
def parts_of(tensor: torch.Tensor, count: int) -> Iterator[list[torch.Tensor]]:
    """Yield ``count`` equal flat parts of a tensor to write to; its strides may be any."""
    with contiguous_copy_of(tensor) as whole:
        yield list(whole.view(-1).tensor_split(count))


def split_rows(tensor: torch.Tensor, splits: Sequence[int] | None, world_size: int) -> list[torch.Tensor]:
    """Split dimension 0 into the part of each rank: by the given sizes, or equally."""
    rows = tensor if tensor.dim() else tensor.view(1)
    if splits:
        return list(torch.split(rows, list(splits)))
    return list(torch.tensor_split(rows, world_size))
