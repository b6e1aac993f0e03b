"""`Messenger`: the point-to-point operations of one group, as messages on its endpoint."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import torch

from dist2.backends.base import Execute, Tensors
from dist2.backends.socket.memory import bytes_of
from dist2.backends.socket.staging import is_plain, plain
from dist2.backends.socket.transport.base import ANY_SOURCE, Transfer
from dist2.backends.socket.transport.endpoint import FabricEndpoint
from dist2.backends.socket.transport.express import Lot
from dist2.operation import Operation, Signature
from dist2.ops import OpKind


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

    def plan(self, signature: Signature) -> Execute:
        """Return what runs the sends or receives of a signature."""
        if signature.kind is OpKind.SEND:
            return self._sender(signature)
        return self._receiver(signature)

    def _sender(self, signature: Signature) -> Execute:
        peer, complex_ = signature.peer, signature.inputs[0].dtype.is_complex
        assert peer is not None  # validated: only receives take any
        express = self._endpoint.express_send(
            Lot(peer, signature.tag, signature.fingerprint, signature.nbytes)
        )
        if express is None:
            return self._send
        send, slow = express.send, self._send

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
            tensor = inputs[0]
            self.last = operation
            # Of a real tensor that is contiguous the bytes are the values, but for a negated view.
            if not complex_ and tensor.is_contiguous() and not tensor.is_neg() and send(tensor.data_ptr()):
                return None
            return slow(operation, inputs, outputs)

        return execute

    def _receiver(self, signature: Signature) -> Execute:
        peer, complex_ = signature.peer, signature.outputs[0].dtype.is_complex
        if peer is None:
            return self._recv
        express = self._endpoint.express_receive(
            Lot(peer, signature.tag, signature.fingerprint, signature.nbytes)
        )
        if express is None:
            return self._recv
        take, wait, slow = express.take, express.wait, self._recv

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
            tensor = outputs[0]
            self.last = operation
            if not complex_ and tensor.is_contiguous() and not tensor.is_neg():
                address = tensor.data_ptr()
                if take(address) if operation.is_async else wait(address, operation.deadline_ns):
                    operation.source = peer
                    return None
            return slow(operation, inputs, outputs)

        return execute

    # The long way

    def _send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        self.last = operation
        signature = operation.signature
        tensor = plain(inputs[0])
        assert signature.peer is not None  # validated: only receives take any
        transfer = self._endpoint.send_tagged(
            signature.peer, signature.tag, signature.fingerprint, bytes_of(tensor)
        )
        return self._complete(operation, transfer, tensor, None)

    def _recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | None:
        self.last = operation
        signature = operation.signature
        target = outputs[0].detach()
        tensor = target if is_plain(target) else torch.empty(target.shape, dtype=target.dtype)
        peer = ANY_SOURCE if signature.peer is None else signature.peer
        transfer = self._endpoint.recv_tagged(peer, signature.tag, signature.fingerprint, bytes_of(tensor))
        return self._complete(operation, transfer, tensor, None if tensor is target else target)

    def _complete(
        self, operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
    ) -> Future[None] | None:
        """Wait for a message, or return a future that the thread that completes it completes.

        Args:
            tensor: What the message is in: kept alive until then.
            target: Where a received tensor is copied then, if not there already.
        """
        arrived = partial(_arrived, operation, transfer, tensor, target)
        if not operation.is_async:
            self._endpoint.wait([transfer], operation.deadline_ns)
            arrived()
            return None
        future: Future[None] = Future()

        def done(transfer: Transfer) -> None:
            if transfer.error is None:
                arrived()
                future.set_result(None)
            else:
                future.set_exception(transfer.error)

        transfer.add_done_callback(done)
        if not future.done():
            self._endpoint.background(transfer, operation.deadline_ns)
        return future


def _arrived(
    operation: Operation, transfer: Transfer, tensor: torch.Tensor, target: torch.Tensor | None
) -> None:
    operation.source = transfer.source
    if target is not None:
        target.copy_(tensor)
