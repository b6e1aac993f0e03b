"""Point-to-point messages of an MPI group.

A message is a nonblocking request of MPI. MPI makes progress when it is called: by the thread that waits for
the message, else by a thread of the group (`Progress`), which looks at all requests once a millisecond. MPI
matches messages by source and tag, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dist2.backends.base import Execute, GroupSpec, Helped, Tensors
from dist2.backends.carriers import Landing, as_bytes
from dist2.backends.mpi.collectives import Collectives
from dist2.backends.mpi.communicator import Communicator
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.memory import check_mode
from dist2.backends.socket.outside import peers_of
from dist2.backends.socket.watched_messages import Progress, WatchedMessage
from dist2.errors import Dist2Error, InvalidUsageError, MismatchError, PeerLostError
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.runtime.mpi_library import failure, give_up

_LOOK_NS = 1_000_000
"""Interval between two looks at all requests. Constant looks would keep the interpreter from others."""


class Message(WatchedMessage):
    """A message under way.

    Args:
        link: The communicator.
        operation: Its operation.
        request: MPI's.
        content: The bytes that MPI reads or writes.
        land: For a receive: called with the received bytes' source once they are there.
    """

    def __init__(
        self,
        link: Communicator,
        operation: Operation,
        request: Any,
        content: torch.Tensor,
        land: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(link.outside, operation)
        self._link = link
        self._request = request
        self._content = content
        self._land = land
        self._status = link.mpi.Status()

    def _advance(self) -> bool:
        try:
            if not self._request.Test(self._status):
                return False
        except self._link.mpi.Exception as error:
            raise self._failure(error) from error
        self._complete()
        return True

    def _give_up(self) -> None:
        """Cancel a receive; MPI may still read the content of a send."""
        if self._land is not None:
            self._request.Cancel()
        give_up((self._request, self._content))

    def _wait(self, until_ns: int) -> None:
        self._link.wait(self.poll, self.operation, until_ns)

    def _complete(self) -> None:
        """Check what has arrived, and write it to the output.

        Raises:
            MismatchError: The message is shorter than the tensor.
        """
        if self._land is None:
            return
        nbytes, source = self._status.Get_count(self._link.mpi.BYTE), self._status.Get_source()
        if nbytes != self._content.numel():
            raise self._of_other_size(f"{nbytes} bytes", source)
        self._land(source)

    def _failure(self, error: Any) -> Dist2Error:
        if self._land is not None and error.Get_error_class() == self._link.mpi.ERR_TRUNCATE:
            return self._of_other_size(
                f"more than {self._content.numel()} bytes", self.operation.signature.peer
            )
        found = failure(self._link.mpi, error, self.operation.describe())
        if isinstance(found, PeerLostError):
            found.ranks = peers_of(self.operation) or ()
        return found

    def _of_other_size(self, size: str, source: int | None) -> MismatchError:
        group, wanted = self.operation.signature.group, f"{self._content.numel()} bytes"
        sender = "a rank" if source is None else group.names([source])
        return MismatchError(
            f"{self.operation.describe()}: {sender} sent {size} with this tag, "
            f"and this rank, {group.names([group.rank])}, receives {wanted}",
            expected=wanted,
            actual={} if source is None else {source: f"sent {size}"},
        )


class Messages(Collectives):
    """Tensors travel as bytes, so every dtype works."""

    def __init__(self, spec: GroupSpec, control: SocketBackend, link: Communicator) -> None:
        super().__init__(spec, control, link)
        self._progress = Progress(f"dist2-messages-{spec.info.name}", control.outside, _LOOK_NS)
        self._max_tag: int = link.mpi.COMM_WORLD.Get_attr(link.mpi.TAG_UB)

    def plan(self, signature: Signature) -> Execute:
        """Return a callable that runs operations of a signature.

        Raises:
            InvalidUsageError: MPI cannot do this reduction of this dtype, or has no such tag.
        """
        if not signature.kind.is_p2p:
            return self.plan_collective(signature)
        if signature.tag > self._max_tag:
            raise InvalidUsageError(
                f"tag must be at most {self._max_tag} with this MPI library, got {signature.tag}"
            )
        return super().plan(signature)

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        signature, content = operation.signature, as_bytes(inputs[0])
        request = self._post(
            operation, self._comm.Isend, self._memory(content), signature.peer, signature.tag
        )
        return self._progress.started(Message(self.link, operation, request, content))

    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Helped | None:
        signature, landing = operation.signature, Landing(outputs[0])
        source = self._mpi.ANY_SOURCE if signature.peer is None else signature.peer
        content = landing.bytes

        def land(source: int) -> None:
            operation.source = source
            landing.land()

        request = self._post(operation, self._comm.Irecv, self._memory(content), source, signature.tag)
        return self._progress.started(Message(self.link, operation, request, content, land))

    def _post(self, operation: Operation, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the request of a function of MPI.

        Raises:
            Dist2Error: MPI failed: the peer has died, say.
            InvalidUsageError: A mode or transform of torch makes tensors without memory.
        """
        check_mode()
        try:
            return function(*arguments)
        except self._mpi.Exception as error:
            raise self.link.failed(error, operation) from error
