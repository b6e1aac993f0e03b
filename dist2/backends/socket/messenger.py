"""`Messenger`: the point-to-point operations of one group, as messages on its endpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from dist2.backends.base import Execute, Helped, Tensors
from dist2.backends.socket.memory import bytes_of
from dist2.backends.socket.staging import is_plain, plain
from dist2.backends.socket.transport.base import ANY_SOURCE, Transfer
from dist2.backends.socket.transport.endpoint import FabricEndpoint
from dist2.backends.socket.transport.express import Lot
from dist2.operation import Operation, Signature
from dist2.ops import OpKind

_RECENT = 256
"""Operations that are kept, to describe one whose message the other side refused."""


class Messenger:
    """Sends and receives tensors of one group.

    Args:
        endpoint: The group's messages.

    Attributes:
        last: The operation begun last: what a mismatch says this rank called.
    """

    def __init__(self, endpoint: FabricEndpoint) -> None:
        self._endpoint = endpoint
        self.last: Operation | None = None
        self._recent: deque[tuple[int, Operation]] = deque(maxlen=_RECENT)

    def find(self, number: int) -> Operation | None:
        """Return the operation whose message has a number; the last one if that is long ago."""
        return next((each for posted, each in self._recent if posted == number), self.last)

    def plan(self, signature: Signature) -> Execute:
        """Return what runs the sends or receives of a signature."""
        if signature.kind is OpKind.SEND:
            return self._sender(signature)
        return self._receiver(signature)

    def _sender(self, signature: Signature) -> Execute:
        lot = _lot_of(signature)
        if signature.inputs[0].dtype.is_complex:
            return self._send
        if not self._endpoint.has_express(lot):
            return self._plain_sender(lot)
        return self._long_sender(lot) if lot.is_long else self._short_sender(lot)

    def _short_sender(self, lot: Lot) -> Execute:
        send, long_way = self._endpoint.express_send(lot).send, self._send

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
            tensor = inputs[0]
            self.last = operation
            if tensor.is_contiguous() and not tensor.is_neg() and send(tensor.data_ptr()):
                return None
            return long_way(operation, inputs, outputs)

        return execute

    def _plain_sender(self, lot: Lot) -> Execute:
        """Return the long way, without what only tensors that are not contiguous need."""
        post, long_way = self._endpoint.send_tagged, self._send
        peer, tag, fingerprint = lot.peer, lot.tag, lot.fingerprint

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
            tensor = inputs[0]
            if not tensor.is_contiguous() or tensor.is_neg():
                return long_way(operation, inputs, outputs)
            self.last = operation
            return self._posted(operation, post(peer, tag, fingerprint, bytes_of(tensor)), tensor, None)

        return execute

    def _long_sender(self, lot: Lot) -> Execute:
        offer = self._endpoint.express_offer(lot)
        send, post, long_way, wait = offer.send, offer.post, self._send, self._endpoint.wait

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
            tensor, deadline_ns = inputs[0], operation.deadline_ns
            self.last = operation
            if not tensor.is_contiguous() or tensor.is_neg():
                return long_way(operation, inputs, outputs)
            view = partial(bytes_of, tensor)
            if operation.is_async:
                sending = post(tensor.data_ptr(), view)
                if sending is not None:
                    return self._posted(operation, sending, tensor, None)
            else:
                sending = send(tensor.data_ptr(), view, deadline_ns)
                if sending is not None:
                    wait([sending], deadline_ns)
                    return None
            return long_way(operation, inputs, outputs)

        return execute

    def _receiver(self, signature: Signature) -> Execute:
        if signature.peer is None or signature.outputs[0].dtype.is_complex:
            return self._recv
        lot = _lot_of(signature)
        if not self._endpoint.has_express(lot):
            return self._plain_receiver(lot)
        express, peer, long_way = self._endpoint.express_receive(lot), lot.peer, self._recv
        take, wait, post = express.take, express.wait, self._endpoint.recv_tagged

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
            tensor = outputs[0]
            self.last = operation
            if tensor.is_contiguous() and not tensor.is_neg():
                address = tensor.data_ptr()
                if take(address) if operation.is_async else wait(address, operation.deadline_ns):
                    operation.source = peer
                    return None
                transfer = post(peer, lot.tag, lot.fingerprint, bytes_of(tensor))
                return self._posted(operation, transfer, tensor, None)
            return long_way(operation, inputs, outputs)

        return execute

    def _plain_receiver(self, lot: Lot) -> Execute:
        """Return the long way, without what only tensors that are not contiguous need."""
        post, long_way = self._endpoint.recv_tagged, self._recv
        peer, tag, fingerprint = lot.peer, lot.tag, lot.fingerprint

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
            tensor = outputs[0]
            if not tensor.is_contiguous() or tensor.is_neg():
                return long_way(operation, inputs, outputs)
            self.last = operation
            return self._posted(operation, post(peer, tag, fingerprint, bytes_of(tensor)), tensor, None)

        return execute

    # The long way

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
        tensor = target if is_plain(target) else torch.empty(target.shape, dtype=target.dtype)
        peer = ANY_SOURCE if signature.peer is None else signature.peer
        transfer = self._endpoint.recv_tagged(peer, signature.tag, signature.fingerprint, bytes_of(tensor))
        return self._posted(operation, transfer, tensor, None if tensor is target else target)

    def _posted(
        self, operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
    ) -> Helped | None:
        """Wait for a message, or return what completes with it.

        Args:
            tensor: What the message is in: kept alive until then.
            target: Where a received tensor is copied then, if not there already.
        """
        self._recent.append((transfer.number, operation))
        if not operation.is_async:
            self._endpoint.wait([transfer], operation.deadline_ns)
        if transfer.done and transfer.error is None:
            _arrived(operation, transfer, tensor, target)
            return None
        self._endpoint.background(transfer, operation.deadline_ns)
        return Arriving(self._endpoint, operation, transfer, tensor, target)


class Arriving(Helped):
    """Completes with a message; whoever waits for it makes it come.

    Args:
        endpoint: Where it was posted.
        operation: What it is of.
        transfer: The message.
        tensor: What the message is in: kept alive until it is done.
        target: Where a received tensor is copied then, if not there already.
    """

    __slots__ = ("_endpoint", "_operation", "_target", "_tensor", "_transfer")

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
        def done(transfer: Transfer) -> None:
            if transfer.error is None:
                _arrived(self._operation, transfer, self._tensor, self._target)
            callback(self)

        self._transfer.add_done_callback(done)

    def exception(self) -> BaseException | None:
        return self._transfer.error

    def help(self, deadline_ns: int) -> None:
        """Make progress until the message is done or the deadline passes."""
        self._endpoint.help(self._transfer, deadline_ns)


def _lot_of(signature: Signature) -> Lot:
    assert signature.peer is not None  # of any, messages have no short way
    return Lot(signature.peer, signature.tag, signature.fingerprint, signature.nbytes)


def _arrived(
    operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
) -> None:
    operation.source = transfer.source
    if target is not None:
        target.copy_(tensor)
