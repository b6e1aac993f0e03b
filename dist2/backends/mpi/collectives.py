"""The collectives of an MPI group: MPI's blocking ones, called once all ranks have agreed (`Communicator`).

Tensors that are only moved travel as bytes, so every dtype works. Reductions run in a dtype that MPI has
(`carriers`). Where ranks may send different sizes, they exchange these first: MPI takes a message that is too
short for a whole one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from dist2.backends.base import Execute, GroupSpec, Tensors
from dist2.backends.carriers import (
    Landing,
    as_bytes,
    carrier_of,
    check_carried,
    finish,
    plain,
    scale_before,
)
from dist2.backends.mpi.communicator import Communicator
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.controlled import Controlled
from dist2.backends.socket.memory import check_mode
from dist2.errors import MismatchError
from dist2.operation.aliasing import overlaps
from dist2.operation.kinds import ReduceKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature

_REDUCTIONS = {
    ReduceKind.SUM: "SUM",
    ReduceKind.PRODUCT: "PROD",
    ReduceKind.MIN: "MIN",
    ReduceKind.MAX: "MAX",
    ReduceKind.BAND: "BAND",
    ReduceKind.BOR: "BOR",
    ReduceKind.BXOR: "BXOR",
}
_TYPES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
"""MPI's names of the kinds and dtypes that `Carrier` knows."""


class Collectives(Controlled):
    """They block: the group runs asynchronous ones on the thread of its queue.

    Args:
        spec: The group.
        control: Its control group.
        link: Its communicator.
    """

    def __init__(self, spec: GroupSpec, control: SocketBackend, link: Communicator) -> None:
        super().__init__(spec, control)
        self.link = link
        self._mpi, self._comm = link.mpi, link.comm

    def plan_collective(self, signature: Signature) -> Execute:
        """Return a callable that runs collectives of a signature.

        Raises:
            InvalidUsageError: MPI cannot do this reduction of this dtype.
        """
        check_carried(signature)
        method: Execute = getattr(self, signature.kind.value)
        outside = self.control.outside

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
            check_mode()
            outside.begin(operation)
            method(operation, inputs, outputs)
            outside.ended(operation)

        return execute

    def _call(self, operation: Operation, function: Callable[..., object], *arguments: object) -> None:
        """Call a blocking function of MPI once all ranks are about to: nothing may fail in between.

        Raises:
            Dist2Error: As `Communicator.agree`; or MPI failed.
        """
        if self.world_size > 1:
            self.link.agree(operation)
        try:
            function(*arguments)
        except self._mpi.Exception as error:
            raise self.link.failed(error, operation) from error

    # Moving

    def broadcast(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing = Landing(outputs[0], loaded=True)
        self._call(operation, self._comm.Bcast, self._memory(landing.bytes), operation.signature.root)
        landing.land()

    def all_gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        mine = as_bytes(inputs[0])
        everyone = mine.new_empty(self.world_size * mine.numel())
        self._call(operation, self._comm.Allgather, self._memory(mine), self._memory(everyone))
        _land(everyone, outputs)

    def all_gather_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing, mine = Landing(outputs[0]), as_bytes(inputs[0])
        landing.bytes[self.rank * mine.numel() :][: mine.numel()].copy_(mine)  # where it may lie already
        self._call(operation, self._comm.Allgather, self._mpi.IN_PLACE, self._memory(landing.bytes))
        landing.land()

    def all_gather_v(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        mine, counts = as_bytes(inputs[0]), [each.nbytes for each in outputs]
        everyone = mine.new_empty(sum(counts))
        self._call(operation, self._comm.Allgatherv, self._memory(mine), self._parts(everyone, counts))
        _land(everyone, outputs)

    def gather(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        mine, root = as_bytes(inputs[0]), operation.signature.root
        everyone = mine.new_empty(len(outputs) * mine.numel())
        received = self._memory(everyone) if outputs else None
        self._call(operation, self._comm.Gather, self._memory(mine), received, root)
        _land(everyone, outputs)

    def scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing = Landing(outputs[0])
        sent = self._memory(torch.cat([as_bytes(each) for each in inputs])) if inputs else None
        root = operation.signature.root
        self._call(operation, self._comm.Scatter, sent, self._memory(landing.bytes), root)
        landing.land()

    def all_to_all(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        sent = torch.cat([as_bytes(each) for each in inputs])
        counts = [each.nbytes for each in outputs]
        received = sent.new_empty(sum(counts))
        self._exchange(operation, sent, [each.nbytes for each in inputs], received, counts)
        _land(received, outputs)

    def all_to_all_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        signature, landing = operation.signature, Landing(outputs[0])
        sent = as_bytes(inputs[0])
        sizes = _sizes(inputs[0], signature.input_splits, self.world_size)
        counts = _sizes(outputs[0], signature.output_splits, self.world_size)
        self._exchange(operation, sent, sizes, landing.bytes, counts)
        landing.land()

    def _exchange(
        self,
        operation: Operation,
        sent: torch.Tensor,
        sizes: Sequence[int],
        received: torch.Tensor,
        counts: Sequence[int],
    ) -> None:
        """Send consecutive parts of bytes to each rank, and receive such parts.

        Raises:
            MismatchError: A rank sends another number of bytes than this one receives. Nothing has moved, and
                the control group tells the other ranks, which wait for this one to agree.
        """
        coming, kind = array("q", counts), self._mpi.INT64_T
        self._call(operation, self._comm.Alltoall, [array("q", sizes), kind], [coming, kind])
        wrong = {rank: size for rank, size in enumerate(coming) if size != counts[rank]}
        if wrong:
            names = operation.signature.group.names
            parts = ", ".join(
                f"{names([rank])} sends {size} and not {counts[rank]}" for rank, size in wrong.items()
            )
            raise MismatchError(
                f"{operation.describe()}: numbers of bytes differ from those that this rank, "
                f"{names([self.rank])}, receives: {parts}",
                expected=f"{list(counts)} bytes by rank",
                actual={rank: f"sends {size} bytes" for rank, size in wrong.items()},
            )
        sent = _apart(sent, received)
        self._call(operation, self._comm.Alltoallv, self._parts(sent, sizes), self._parts(received, counts))

    def barrier(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Return once all ranks have agreed."""
        self._call(operation, lambda: None)

    # Reducing

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        landing = Landing(outputs[0], loaded=True)
        self._combine(operation, landing.flat, landing.flat, self._comm.Allreduce)
        landing.land()

    def reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        root = operation.signature.root

        def move(sent: Any, received: Any, op: Any) -> None:
            self._comm.Reduce(sent, received, op, root)

        if outputs:
            landing = Landing(outputs[0], loaded=True)
            self._combine(operation, landing.flat, landing.flat, move)
            landing.land()
        else:
            self._combine(operation, plain(inputs[0]), None, move)

    def reduce_scatter(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        self._scatter(operation, torch.cat([plain(each) for each in inputs]), outputs[0], inputs)

    def reduce_scatter_single(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        self._scatter(operation, plain(inputs[0]), outputs[0], [outputs[0]] * self.world_size)

    def _scatter(
        self, operation: Operation, flat: torch.Tensor, output: torch.Tensor, parts: Tensors
    ) -> None:
        """Combine flat tensors; leave a part at each rank."""
        landing, numbers = Landing(output), 2 if flat.is_complex() else 1
        counts = [numbers * each.numel() for each in parts]

        def move(sent: Any, received: Any, op: Any) -> None:
            self._comm.Reduce_scatter(sent, received, counts, op)

        self._combine(operation, _apart(flat, landing.flat), landing.flat, move)
        landing.land()

    def _combine(
        self,
        operation: Operation,
        flat: torch.Tensor,
        result: torch.Tensor | None,
        move: Callable[[Any, Any, Any], object],
    ) -> None:
        """Reduce flat tensors.

        Args:
            operation: The operation.
            flat: This rank's contribution; not written to, unless it is the result.
            result: Where the result goes; None on a rank that gets none.
            move: Calls MPI with the contribution (``MPI.IN_PLACE`` if it is the result), the result and the
                reduction.
        """
        reduction = operation.signature.reduction
        assert reduction is not None  # the group gives one to every reducing operation
        carrier = carrier_of(flat.dtype, reduction, operation.signature.kind.value, "mpi")
        if result is flat:
            scale_before(flat, reduction)
        elif reduction.factor is not None:
            flat = flat * reduction.factor
        carried, op = carrier.load(flat), getattr(self._mpi, _REDUCTIONS[carrier.kind])
        if result is None:
            self._call(operation, move, self._typed(carried), None, op)
            return
        landed = carried if result is flat else carrier.load(result)
        sent = self._mpi.IN_PLACE if result is flat else self._typed(carried)
        self._call(operation, move, sent, self._typed(landed), op)
        finish(carrier, landed, result, reduction, self.world_size)

    # Memory. mpi4py reads a tensor's address by DLPack, and keeps the tensor as long as MPI uses it.

    def _memory(self, content: torch.Tensor) -> list[Any]:
        """Return bytes as MPI takes them."""
        return [content, self._mpi.BYTE]

    def _parts(self, content: torch.Tensor, counts: Sequence[int]) -> list[Any]:
        """Return bytes as parts of given sizes, one after the other."""
        starts = [0, *accumulate(counts)][:-1]
        return [content, (list(counts), starts), self._mpi.BYTE]

    def _typed(self, content: torch.Tensor) -> list[Any]:
        """Return a flat tensor as numbers of MPI's type."""
        return [content, getattr(self._mpi, _TYPES[content.dtype])]


def _apart(read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Return a tensor to read: a copy if it shares memory with one that is written, which MPI refuses."""
    return read.clone() if overlaps((read,), (written,)) else read


def _sizes(tensor: torch.Tensor, splits: Sequence[int] | None, world_size: int) -> list[int]:
    """Return the bytes of the part of each rank: of so many rows, or equal ones."""
    if not splits:
        return [tensor.nbytes // world_size] * world_size
    row = tensor.nbytes // max(1, sum(splits))
    return [rows * row for rows in splits]


def _land(content: torch.Tensor, outputs: Tensors) -> None:
    """Copy consecutive parts of bytes to tensors."""
    for output, part in zip(outputs, content.split([each.nbytes for each in outputs]), strict=True):
        landing = Landing(output)
        landing.bytes.copy_(part)
        landing.land()
