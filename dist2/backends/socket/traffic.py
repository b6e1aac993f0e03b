# cython: annotation_typing=False
"""The messages of collectives: steps of plans that send, receive and wait, and what runs them.

    program = MessageProgram(MessageHost(endpoint, board), plan)    # once a signature
    program(operation, inputs, outputs)                              # every call

The core runs a plan (`dist2.operation.engine`); each message, and each wait for some of them, is a step that
it leaves to its caller. So a `MessageHost` is to message plans what a `Host` is to those in shared memory. A
plan of ranks on several hosts has steps of both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch

from dist2.backends.socket.host import NEXT, FoldByTorch
from dist2.backends.socket.memory import bytes_at, room_of
from dist2.backends.socket.transport.boards.arrivals import lone_arrivals
from dist2.backends.socket.transport.boards.board import Board
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.transfer import Transfer
from dist2.errors import MismatchError
from dist2.operation.engine import Plan, Script
from dist2.operation.parts import PartsClock, parts_log
from dist2.operation.record import Operation
from dist2.runtime.built import check_built

check_built(__name__, __file__)

SCRATCH_KEPT_BYTES = 64 << 20
"""Scratch up to this size is kept from call to call: new memory costs a page fault every 4 KiB."""

Tensors = Sequence[torch.Tensor]


# Steps


@attrs.frozen
class Message:
    """A message.

    Attributes:
        peer: The other side.
        step: Number of the message between the two ranks in this direction.
        nbytes: Its length.
        number: Its number in the plan.
    """

    part: ClassVar[str] = "send"

    peer: int
    step: int
    nbytes: int
    number: int


class Send(Message):
    """Starts to send a message."""

    def do(self, host: MessageHost, operation: Operation, script: Any, at: int) -> int:
        host.traffic.send(self, script.address(at))
        return NEXT


class Receive(Message):
    """Starts to receive a message."""

    def do(self, host: MessageHost, operation: Operation, script: Any, at: int) -> int:
        host.traffic.receive(self, script.address(at))
        return NEXT


@attrs.frozen
class Await:
    """Waits for messages.

    Attributes:
        numbers: Their numbers.
    """

    part: ClassVar[str] = "recv"

    numbers: tuple[int, ...]

    def do(self, host: MessageHost, operation: Operation, script: Any, at: int) -> int:
        host.traffic.wait(self.numbers)
        return NEXT


@attrs.frozen(eq=False)
class MessagePlan:
    """A plan with messages.

    Attributes:
        plan: The plan; its last output is scratch.
        scratch: Bytes of scratch.
        messages: The messages.
    """

    plan: Plan
    scratch: int
    messages: Sequence[Message]


# Their caller


class MessageHost:
    """What the scripts of one group call whose plans have messages: one operation at a time.

    Attributes:
        arrivals: Where scripts come to fences.
        traffic: The messages of the call that runs.

    Args:
        endpoint: The group's messages.
        board: Shared memory of the members on this host, where there are several hosts.
    """

    traffic: Traffic

    def __init__(self, endpoint: FabricEndpoint, board: Board | None = None) -> None:
        self.endpoint = endpoint
        self._board = board
        self._scratch = room_of(0)
        self.arrivals = lone_arrivals(endpoint.rank) if board is None else board.arrivals
        self.attend = None if board is None else self._attend

    def prepare(self, operation: Operation, script: Any) -> None:
        """Find the regions of the members on this host, before the first run of a script that has fences."""
        if self._board is not None and script.plan.fences:
            self._board.meet(operation)

    def wait(self, operation: Operation) -> None:
        """Sleep until the other ranks of this host are at a fence; messages make progress meanwhile."""
        self._at_fence(Board.wait, operation)

    def _attend(self, operation: Operation) -> None:
        self._at_fence(Board.attend, operation)

    def _at_fence(self, do: Any, operation: Operation) -> None:
        try:
            do(self._board, operation)
        except MismatchError:
            self.endpoint.disagree(operation.seq)  # the other hosts would wait for this one
            raise

    def do(self, operation: Operation, script: Any, at: int, payload: Any) -> int:
        """Do a step."""
        if not parts_log.on or isinstance(payload, FoldByTorch):  # the core records folds
            answer: int = payload.do(self, operation, script, at)
            return answer
        clock = self._clock(operation)
        answer = payload.do(self, operation, script, at)
        clock.note(payload.part)
        return answer

    def _clock(self, operation: Operation) -> PartsClock:
        return PartsClock(operation, lambda: self.endpoint.waited_ns)

    def settle(self, operation: Operation) -> None:
        """Wait for all messages of the call."""
        clock = self._clock(operation) if parts_log.on else None
        self.traffic.settle()
        if clock is not None:
            clock.note("recv")

    def scratch_of(self, nbytes: int) -> torch.Tensor:
        """Return scratch of at least so many bytes."""
        if nbytes > SCRATCH_KEPT_BYTES:
            return room_of(nbytes)
        if nbytes > self._scratch.nbytes:
            self._scratch = room_of(max(nbytes, min(2 * self._scratch.nbytes, SCRATCH_KEPT_BYTES)))
        return self._scratch


class MessageProgram:
    """A plan, prepared for the calls of one signature.

    Args:
        host: Of the group.
        plan: The plan.
    """

    def __init__(self, host: MessageHost, plan: MessagePlan) -> None:
        self._host = host
        self._plan = plan
        self._script = Script(host.arrivals, plan.plan, host)

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors.

        Args:
            operation: Gives sequence number, fingerprint and deadline.
            inputs: Contiguous tensors of the lengths planned for.
            outputs: Likewise; they may be the inputs.

        Raises:
            OperationTimeoutError, PeerLostError, MismatchError, GroupAbortedError: See `FabricEndpoint.wait`
                and `Board.fence`. The tensors are free when it raises; outputs hold anything.
        """
        host = self._host
        traffic = host.traffic = Traffic(host.endpoint, operation)
        memory = [*outputs, host.scratch_of(self._plan.scratch)]
        try:
            self._script.run(operation, inputs, memory)
            host.settle(operation)
        except BaseException:
            traffic.cancel()
            raise


class Traffic:
    """The messages of one call.

    Args:
        endpoint: Carries them.
        operation: Gives sequence number, fingerprint and deadline.
    """

    def __init__(self, endpoint: FabricEndpoint, operation: Operation) -> None:
        self._endpoint = endpoint
        self._operation = operation
        self._fingerprint = operation.signature.fingerprint
        self._transfers: dict[int, Transfer] = {}
        self._started: list[Transfer] = []

    def receive(self, message: Message, address: int) -> None:
        """Start to receive a message to an address."""
        buffer, seq = bytes_at(address, message.nbytes), self._operation.seq
        self._note(message, self._endpoint.recv(message.peer, seq, message.step, self._fingerprint, buffer))

    def send(self, message: Message, address: int) -> None:
        """Start to send a message from an address."""
        data, seq = bytes_at(address, message.nbytes), self._operation.seq
        transfer = self._endpoint.send(message.peer, seq, message.step, self._fingerprint, data)
        if not transfer.done or transfer.error is not None:
            self._note(message, transfer)

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait for some of the messages that were started."""
        waiting = [self._transfers[number] for number in numbers if number in self._transfers]
        if waiting:
            self._started = [each for each in self._started if not each.done or each.error is not None]
            self._endpoint.wait(waiting, self._operation.deadline_ns, self._started)

    def settle(self) -> None:
        """Wait for everything that was started."""
        if self._started:
            self._endpoint.wait(self._started, self._operation.deadline_ns)

    def cancel(self) -> None:
        """Give up on everything that was started."""
        self._endpoint.cancel(self._started)

    def _note(self, message: Message, transfer: Transfer) -> None:
        self._transfers[message.number] = transfer
        self._started.append(transfer)
