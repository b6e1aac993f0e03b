# cython: annotation_typing=False
"""`Operations`: each operation of a group as calls of NCCL.

=================================  =====================================================================
all_reduce, broadcast, reduce      the call of that name
all_gather, reduce_scatter         the call of that name; lists are joined in one piece of memory first
all_gather_v, reduce_scatter_v     a group of broadcasts, or of reduces, one a rank
gather, scatter, all_to_all        a group of sends and receives
``*_coalesced``                    a group of the calls of the single one
barrier                            an all_reduce of one byte
send, recv                         the call of that name
=================================  =====================================================================

Tensors that are only moved travel as bytes, so every dtype works. No call is made for tensors without
elements: they have none on any rank that takes part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dist2.backends.base import Tensors, split_rows
from dist2.backends.nccl.arithmetic import UINT8, Arithmetic, arithmetic_of, moved
from dist2.backends.nccl.launch import Launch, Steps
from dist2.operation.signature import Signature
from dist2.runtime.built import check_built

check_built(__name__, __file__)

_How = dict[torch.dtype, Arithmetic]

_MAX, _ONE_BYTE = 2, 1


class Operations:
    """The operations of one rank.

    Args:
        rank: The rank in its group.
        world_size: How many ranks the group has.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size

    def plan(self, signature: Signature, plain: bool) -> Steps:
        """Return a callable that adds operations of a signature to a launch.

        Args:
            signature: Of the operations.
            plain: Their tensors are known to be plain.

        Raises:
            InvalidUsageError: NCCL cannot reduce so.
        """
        method: Callable[..., None] = getattr(self, f"_{signature.kind.value}")
        how: _How = {}
        if signature.reduction is not None:
            name = signature.kind.value
            how = {
                meta.dtype: arithmetic_of(meta.dtype, signature.reduction, name) for meta in signature.inputs
            }

        def put(launch: Launch, inputs: Tensors, outputs: Tensors) -> None:
            launch.plain = plain
            method(launch, inputs, outputs, signature, how)

        return put

    # Reductions

    def _all_reduce(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        for tensor in outputs:
            self._combine_in_place(launch, launch.target(tensor, loaded=True), how[tensor.dtype])

    _all_reduce_coalesced = _all_reduce

    @staticmethod
    def _combine_in_place(launch: Launch, memory: torch.Tensor, how: Arithmetic) -> None:
        if not memory.numel():
            return
        carried = launch.operand(memory, how, written=True)
        at = carried.data_ptr()
        launch.call("allReduce", at, at, carried.numel() * how.parts, how.code, launch.op(how))

    def _reduce(self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How) -> None:
        source = launch.source(inputs[0])
        target = launch.target(outputs[0]) if outputs else source
        assert asked.root is not None
        self._reduce_to(launch, source, target if outputs else None, asked.root, how[source.dtype])

    @staticmethod
    def _reduce_to(
        launch: Launch, source: torch.Tensor, target: torch.Tensor | None, root: int, how: Arithmetic
    ) -> None:
        """Combine at the root, which alone has a target."""
        if not source.numel():
            return
        read = launch.operand(source, how)
        written = read if target is None else launch.result(target, how)
        count = read.numel() * how.parts
        launch.call("reduce", read.data_ptr(), written.data_ptr(), count, how.code, launch.op(how), root)

    def _reduce_scatter(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        if outputs[0].numel():
            self._scatter_sum(launch, launch.joined(list(inputs)), outputs[0], how[outputs[0].dtype])

    def _reduce_scatter_single(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        for source, output in zip(inputs, outputs, strict=True):
            if output.numel():
                self._scatter_sum(launch, launch.source(source), output, how[output.dtype])

    _reduce_scatter_single_coalesced = _reduce_scatter_single

    @staticmethod
    def _scatter_sum(launch: Launch, whole: torch.Tensor, output: torch.Tensor, how: Arithmetic) -> None:
        read = launch.operand(whole, how)
        written = launch.result(launch.target(output), how)
        count = written.numel() * how.parts
        launch.call("reduceScatter", read.data_ptr(), written.data_ptr(), count, how.code, launch.op(how))

    def _reduce_scatter_v(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        for root, tensor in enumerate(inputs):
            target = launch.target(outputs[0]) if root == self._rank else None
            self._reduce_to(launch, launch.source(tensor), target, root, how[tensor.dtype])

    # Moves

    def _broadcast(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        assert asked.root is not None
        if asked.root == self._rank:
            self._spread(launch, launch.source(outputs[0]), asked.root)
        else:
            self._spread(launch, launch.target(outputs[0]), asked.root)

    @staticmethod
    def _spread(launch: Launch, memory: torch.Tensor, root: int) -> None:
        if memory.numel():
            at = memory.data_ptr()
            launch.call("broadcast", at, at, *moved(memory.nbytes), root)

    def _all_gather(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        if inputs[0].numel():
            self._collect(launch, launch.source(inputs[0]), launch.parted(list(outputs)))

    def _all_gather_single(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        for source, output in zip(inputs, outputs, strict=True):
            if source.numel():
                self._collect(launch, launch.source(source), launch.target(output))

    _all_gather_single_coalesced = _all_gather_single

    @staticmethod
    def _collect(launch: Launch, source: torch.Tensor, whole: torch.Tensor) -> None:
        launch.call("allGather", source.data_ptr(), whole.data_ptr(), *moved(source.nbytes))

    def _all_gather_v(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        source = launch.source(inputs[0])
        for root, output in enumerate(outputs):
            target = launch.target(output)
            if target.numel():
                read = source if root == self._rank else target
                launch.call("broadcast", read.data_ptr(), target.data_ptr(), *moved(target.nbytes), root)

    def _gather(self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How) -> None:
        assert asked.root is not None
        if asked.root != self._rank:
            launch.send(launch.source(inputs[0]), asked.root)
        for rank, output in enumerate(outputs):
            if rank == self._rank:
                self._copy(launch, inputs[0], output)
            else:
                launch.recv(launch.target(output), rank)

    def _scatter(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        assert asked.root is not None
        if asked.root != self._rank:
            launch.recv(launch.target(outputs[0]), asked.root)
        for rank, tensor in enumerate(inputs):
            if rank == self._rank:
                self._copy(launch, tensor, outputs[0])
            else:
                launch.send(launch.source(tensor), rank)

    def _all_to_all(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        for rank, (sent, received) in enumerate(zip(inputs, outputs, strict=True)):
            if rank == self._rank:
                self._copy(launch, sent, received)
            else:
                launch.send(launch.source(sent), rank)
                launch.recv(launch.target(received), rank)

    def _all_to_all_single(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        source, target = launch.source(inputs[0]), launch.target(outputs[0])
        sent = split_rows(source.view(inputs[0].shape), asked.input_splits, self._world_size)
        received = split_rows(target.view(outputs[0].shape), asked.output_splits, self._world_size)
        self._all_to_all(launch, sent, received, asked, how)

    @staticmethod
    def _copy(launch: Launch, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy this rank's own part; where it lies there already, nothing happens."""
        read, written = source.detach(), target.detach()
        if any(
            of(read) != of(written)
            for of in (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg)
        ):
            launch.run(
                lambda: written.copy_(
                    read.view(written.shape) if read.is_contiguous() else read.reshape(written.shape)
                )
            )

    def _barrier(
        self, launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How
    ) -> None:
        token = launch.scratch(8, torch.uint8)
        launch.run(token.zero_)
        launch.call("allReduce", token.data_ptr(), token.data_ptr(), _ONE_BYTE, UINT8, _MAX)

    # Messages

    @staticmethod
    def _send(launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How) -> None:
        assert asked.peer is not None
        launch.send(launch.source(inputs[0]), asked.peer)

    @staticmethod
    def _recv(launch: Launch, inputs: Tensors, outputs: Tensors, asked: Signature, how: _How) -> None:
        assert asked.peer is not None
        launch.recv(launch.target(outputs[0]), asked.peer)
