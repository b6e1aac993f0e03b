"""Messages by way of the host: those that NCCL cannot match or deliver.

NCCL has no tags, no receives from any rank, and no messages to oneself that are not sent and received by one
call. Those travel over the socket backend's links, through pinned memory. Which way a message goes depends on
information that both sides have: its tag, and whether it is to the rank itself.
"""

from __future__ import annotations

import torch

from dist2.backends.base import Execute, Helped, Tensors
from dist2.backends.nccl.device import Device
from dist2.errors import InvalidUsageError
from dist2.operation.host_staging import Landing
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature


def is_staged(signature: Signature) -> bool:
    """Whether a message goes by way of the host.

    Raises:
        InvalidUsageError: It could go either way: it is from any rank, and has no tag.
    """
    if signature.peer is None and signature.tag == 0:
        raise InvalidUsageError(
            "recv from any rank needs a tag other than 0 with backend 'nccl': messages without a tag go "
            "through NCCL, which must know the sender"
        )
    return signature.tag != 0 or signature.peer is None or signature.peer == signature.group.rank


def staged(device: Device, over_links: Execute, signature: Signature) -> Execute:
    """Return a callable that sends or receives by way of the host.

    Args:
        device: Where the tensors are.
        over_links: The socket backend's plan of the same signature.
        signature: The call's.
    """
    sends = signature.kind is OpKind.SEND

    def send(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        return over_links(operation, [device.to_host(inputs[0])], ())  # type: ignore[return-value]  # links return no Future

    def recv(operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        landing = torch.empty(outputs[0].shape, dtype=outputs[0].dtype, device="cpu")
        pending = over_links(operation, (), [landing])

        def land() -> None:
            with device.active():
                outputs[0].detach().copy_(landing)

        if pending is None:
            land()
            return None
        assert isinstance(pending, Helped)
        return Landing(pending, land)

    return send if sends else recv
