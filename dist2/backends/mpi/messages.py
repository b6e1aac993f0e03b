"""Point-to-point messages of an MPI group, and the thread that completes those that no caller waits for.

A message is a nonblocking request of MPI. MPI makes progress when it is called: by the thread that waits for
the message, else by a thread of the group (`Progress`), which looks at all requests once a millisecond. MPI
matches messages by source and tag, in the order of the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch

from dist2.backends.base import Execute, GroupSpec, Helped, Tensors
from dist2.backends.carriers import Landing, as_bytes
from dist2.backends.mpi.collectives import Collectives
from dist2.backends.mpi.communicator import Communicator
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.outside import Outside, peers_of
from dist2.errors import Dist2Error, InvalidUsageError, MismatchError, OperationTimeoutError, PeerLostError
from dist2.operation.signature import Operation, Signature
from dist2.runtime.completion import Completion
from dist2.runtime.mpi_library import failure, give_up
from dist2.runtime.threads import Worker

IDLE_S = 2.0
"""How long an idle thread stays for the next message."""
_LOOK_NS = 1_000_000
"""Interval between two looks at all requests. Constant looks would keep the interpreter from others."""


class Message(Helped):
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
        self.operation = operation
        self._link = link
        self._request = request  # None once it is over: `Test` would return True again, with an empty status
        self._content = content
        self._land = land
        self._status = link.mpi.Status()
        self._lock = threading.Lock()
        self._done = Completion()

    def poll(self) -> bool:
        """Make progress; return whether it is over, successfully or not."""
        fault: Exception | None = None
        with self._lock:
            if self._request is None:
                return True
            try:
                if not self._request.Test(self._status):
                    return False
                self._complete()
            except Exception as error:  # noqa: BLE001 - delivered to those that wait
                fault = self._failure(error)
            self._request = None
        self._end(fault)
        return True

    def fail(self, error: BaseException) -> None:
        """Give it up, unless it is over. A receive is cancelled; MPI may still read the content of a send."""
        with self._lock:
            if self._request is None:
                return
            if self._land is not None:
                self._request.Cancel()
            give_up((self._request, self._content))
            self._request = None
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

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

    def _failure(self, error: Exception) -> Exception:
        if not isinstance(error, self._link.mpi.Exception):
            return error
        if self._land is not None and error.Get_error_class() == self._link.mpi.ERR_TRUNCATE:
            return self._of_other_size(
                f"more than {self._content.numel()} bytes", self.operation.signature.peer
            )
        found = failure(self._link.mpi, error, self.operation.describe())
        if isinstance(found, PeerLostError):
            found.ranks = peers_of(self.operation) or ()
        return found

    def _of_other_size(self, size: str, source: int | None) -> MismatchError:
        wanted, sender = f"{self._content.numel()} bytes", "a rank" if source is None else f"rank {source}"
        return MismatchError(
            f"{self.operation.describe()}: {sender} sent {size} with this tag, "
            f"and this rank (rank {self.operation.signature.group.rank}) receives {wanted}",
            expected=wanted,
            actual={} if source is None else {source: f"sent {size}"},
        )

    # Called by the group

    def add_done_callback(self, callback: Callable[[Helped], None]) -> None:
        self._done.add_done_callback(lambda _: callback(self))

    def exception(self) -> BaseException | None:
        return self._done.exception()

    def help(self, deadline_ns: int) -> None:
        ends_ns = self.operation.deadline_ns
        try:
            self._link.wait(self.poll, self.operation, min(deadline_ns, ends_ns))
        except OperationTimeoutError as error:
            if deadline_ns >= ends_ns:  # else only this wait has ended
                self.fail(error)
        except Dist2Error as error:
            self.fail(error)
        except BaseException as error:  # an interrupt
            self.fail(error)
            raise


class Messages(Collectives):
    """Tensors travel as bytes, so every dtype works."""

    def __init__(self, spec: GroupSpec, control: SocketBackend, link: Communicator) -> None:
        super().__init__(spec, control, link)
        self._progress = Progress(spec.info.name, control.outside)
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

    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Message | None:
        signature, content = operation.signature, as_bytes(inputs[0])
        request = self._post(
            operation, self._comm.Isend, self._memory(content), signature.peer, signature.tag
        )
        return self._started(Message(self.link, operation, request, content))

    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Message | None:
        signature, landing = operation.signature, Landing(outputs[0])
        source = self._mpi.ANY_SOURCE if signature.peer is None else signature.peer
        content = landing.bytes

        def land(source: int) -> None:
            operation.source = source
            landing.land()

        request = self._post(operation, self._comm.Irecv, self._memory(content), source, signature.tag)
        return self._started(Message(self.link, operation, request, content, land))

    def _post(self, operation: Operation, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the request of a function of MPI.

        Raises:
            Dist2Error: MPI failed: the peer has died, say.
        """
        try:
            return function(*arguments)
        except self._mpi.Exception as error:
            raise self.link.failed(error, operation) from error

    def _started(self, message: Message) -> Message | None:
        """Wait for a synchronous message; have an asynchronous one completed.

        Raises:
            Dist2Error: A synchronous message failed.
        """
        operation = message.operation
        if operation.is_async:
            if not message.poll():
                self._progress.watch(message)
            return message
        message.help(operation.deadline_ns)
        error = message.exception()
        if error is not None:
            raise error
        return None


@attrs.define(eq=False)
class Progress:
    """A thread of a group that completes messages; it ends when there were none for a while.

    Args:
        name: The group's.
        outside: The control links, at which it waits.
    """

    _name: str
    _outside: Outside
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _pending: list[Message] = attrs.field(factory=list, init=False)
    _thread: Worker | None = attrs.field(default=None, init=False)
    _ends: bool = attrs.field(default=False, init=False)

    def watch(self, message: Message) -> None:
        """Complete a message, unless a thread that waits for it does."""
        with self._changed:
            self._pending.append(message)
            if self._thread is None:
                self._thread = Worker(f"dist2-mpi-{self._name}", self._run, end=self.stop)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread once nothing is pending."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (soonest := self._soonest()) is not None:
            operation = soonest.operation
            try:
                self._outside.wait(
                    self._look, operation.deadline_ns, peers_of(operation), _LOOK_NS, is_patient=True
                )
            except OperationTimeoutError as error:
                soonest.fail(error)
            except Dist2Error as error:
                with self._changed:
                    failed = list(self._pending)
                for each in failed:
                    each.fail(error.again(str(error)))

    def _soonest(self) -> Message | None:
        """Return the pending message with the earliest deadline; None: the thread has to end."""
        with self._changed:
            self._pending = [each for each in self._pending if not each.poll()]
            if not self._pending and not self._ends:
                self._changed.wait_for(lambda: self._pending or self._ends, IDLE_S)
            if not self._pending:
                self._thread = None
                return None
            return min(self._pending, key=lambda each: each.operation.deadline_ns)

    def _look(self) -> bool:
        """Make progress; return whether the pending messages have changed."""
        with self._changed:
            pending = list(self._pending)
        return sum(each.poll() for each in pending) > 0  # polls all
