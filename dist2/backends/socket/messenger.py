# cython: annotation_typing=False
"""`Messenger`: the point-to-point operations of one group, as messages on its endpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from dist2.backends.socket.memory import bytes_at, bytes_of
from dist2.backends.socket.staging import is_plain, plain
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.express import Carrier
from dist2.backends.socket.transport.messages.transfer import ANY_SOURCE, Transfer
from dist2.backends.socket.transport.messages.ways import Lot
from dist2.operation.execution import Execute, Helped, Outcome, Tensors
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.runtime.built import check_built

check_built(__name__, __file__)

Way = Callable[[Operation, torch.Tensor], "Helped | None"]
"""Sends or receives a tensor: as `Execute` does."""

_RECENT = 256
"""Operations that are kept, to describe one whose message the other side refused."""


class Messenger:
    """Sends and receives tensors of one group.

    Args:
        endpoint: The group's messages.

    Attributes:
        last: The operation begun last: the call of this rank in a mismatch.
    """

    def __init__(self, endpoint: FabricEndpoint) -> None:
        self._endpoint = endpoint
        self.last: Operation | None = None
        self._recent: deque[tuple[int, Operation]] = deque(maxlen=_RECENT)

    def note(self, number: int, operation: Operation) -> None:
        """Keep an operation, for the case that the other side refuses the message with this number."""
        self._recent.append((number, operation))

    def find(self, number: int) -> Operation | None:
        """Return the operation whose message has a number; the last one if that is long ago."""
        return next((each for posted, each in self._recent if posted == number), self.last)

    def plan(self, signature: Signature) -> Execute:
        """Return the callable that runs the sends or receives of a signature."""
        plain_way, long_way = self.plan_plain(signature), self._long_way(signature)

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Outcome:
            (tensor,) = inputs or outputs
            way = plain_way if is_plain(tensor) else long_way
            return way(operation, inputs, outputs)

        return execute

    def plan_plain(self, signature: Signature) -> Execute:
        """Do `plan` for tensors that are all plain; see `Backend.plan_plain`."""
        lot, sends = _lot_of(signature), signature.kind is OpKind.SEND
        if lot is not None and self._endpoint.ways.has_express(lot):
            otherwise = self._posting(lot, sends=sends)
            return Carrier(self, self._endpoint.ways.express(lot), sends, otherwise)
        way = self._way_in_from_any(signature) if lot is None else self._posting(lot, sends=sends)
        if way is None:
            return self._long_way(signature)

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
            (tensor,) = inputs or outputs
            self.last = operation
            return way(operation, tensor)

        return execute

    def _long_way(self, signature: Signature) -> Execute:
        return self._send if signature.kind is OpKind.SEND else self._recv

    # The short paths, of tensors whose memory holds their values one after the other

    def _posting(self, lot: Lot, *, sends: bool) -> Way:
        """Return the long path, without the copies that only tensors that are not contiguous need."""
        post = self._endpoint.send_tagged if sends else self._endpoint.recv_tagged
        peer, tag, fingerprint, nbytes, posted = lot.peer, lot.tag, lot.fingerprint, lot.nbytes, self._posted

        def run(operation: Operation, tensor: torch.Tensor) -> Helped | None:
            transfer = post(peer, tag, fingerprint, bytes_at(tensor.data_ptr(), nbytes))
            return posted(operation, transfer, tensor, None)

        return run

    def _way_in_from_any(self, signature: Signature) -> Way | None:
        (meta,) = signature.inputs or signature.outputs
        if signature.peer is not None or meta.dtype.is_complex:
            return None
        if not self._endpoint.ways.has_express_any(signature.nbytes):
            return None
        lot = Lot(ANY_SOURCE, signature.tag, signature.fingerprint, signature.nbytes)
        express, otherwise = self._endpoint.ways.express_any(lot), self._posting(lot, sends=False)

        def run(operation: Operation, tensor: torch.Tensor) -> Helped | None:
            address = tensor.data_ptr()
            source = (
                express.take(address) if operation.is_async else express.wait(address, operation.deadline_ns)
            )
            if source is None:
                return otherwise(operation, tensor)
            operation.source = source
            return None

        return run

    # The long path

    def _send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        self.last = operation
        signature = operation.signature
        tensor = plain(inputs[0])
        assert signature.peer is not None  # validated: only receives take any
        transfer = self._endpoint.send_tagged(
            signature.peer, signature.tag, signature.fingerprint, bytes_of(tensor)
        )
        return self._posted(operation, transfer, tensor, None)

    def _recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        self.last = operation
        signature = operation.signature
        target = outputs[0].detach()
        tensor = target if is_plain(target) else torch.empty(target.shape, dtype=target.dtype, device="cpu")
        peer = ANY_SOURCE if signature.peer is None else signature.peer
        transfer = self._endpoint.recv_tagged(peer, signature.tag, signature.fingerprint, bytes_of(tensor))
        return self._posted(operation, transfer, tensor, None if tensor is target else target)

    def _posted(
        self,
        operation: Operation,
        transfer: Transfer,
        tensor: torch.Tensor,
        target: torch.Tensor | None,
    ) -> Helped | None:
        """Wait for a message, or return an object that completes with it.

        Args:
            tensor: Holds the message: kept alive until then.
            target: Where a received tensor is copied then, if not there already.
        """
        self.note(transfer.number, operation)
        if not operation.is_async:
            self._endpoint.wait([transfer], operation.deadline_ns)
        if transfer.done and transfer.error is None:
            note_arrival(operation, transfer, tensor, target)
            return None
        self._endpoint.background(transfer, operation.deadline_ns)
        return Arriving(self._endpoint, operation, transfer, tensor, target)


def _lot_of(signature: Signature) -> Lot | None:
    """Return the common attributes of a signature's messages, if they may be sent directly."""
    (meta,) = signature.inputs or signature.outputs
    if signature.peer is None or meta.dtype.is_complex:
        return None
    return Lot(signature.peer, signature.tag, signature.fingerprint, signature.nbytes)


class Arriving(Helped):
    """Completes with a message; waiting for it makes progress.

    Args:
        endpoint: Where it was posted.
        operation: The operation that it belongs to.
        transfer: The message.
        tensor: Holds the message: kept alive until it is done.
        target: Where a received tensor is copied then, if not there already.
    """

    def __init__(
        self,
        endpoint: FabricEndpoint,
        operation: Operation,
        transfer: Transfer,
        tensor: torch.Tensor,
        target: torch.Tensor | None,
    ) -> None:
        self._endpoint = endpoint
        self._operation = operation
        self._transfer = transfer
        self._tensor = tensor
        self._target = target

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        self._callback = callback
        self._transfer.add_done_callback(self._done)

    def _done(self, transfer: Transfer) -> None:
        if transfer.error is None:
            note_arrival(self._operation, transfer, self._tensor, self._target)
        self._callback(self)

    def exception(self) -> BaseException | None:
        return self._transfer.error

    def help(self, deadline_ns: int) -> None:
        """Make progress until the message is done or the deadline passes."""
        self._endpoint.help(self._transfer, deadline_ns)


def note_arrival(
    operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
) -> None:
    """Set the source rank of an operation, and copy a received tensor to its target."""
    operation.source = transfer.source
    if target is not None:
        target.detach().copy_(tensor)  # it may be the first time outside of the caller's inference mode
