"""`BriefProgram`: runs plans of short messages over sockets, without a record of each message.

A plan is compiled once for each signature into closures, each bound to the direct send or receive of a
message. Short messages need no receive posted in advance, so a message is read when the plan needs it.
All other messages go through the endpoint, as in `MessageExecutor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch

from dist2.backends.socket.executor import Memory, MessageExecutor, Tensors
from dist2.backends.socket.memory import copy_bytes
from dist2.backends.socket.overlap import Action, Combine, Meet, Message, Messages, Move, Needs, Place
from dist2.backends.socket.plan import Plan
from dist2.backends.socket.transport.base import Endpoint, Transfer
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.express import Lot
from dist2.backends.socket.wire import EAGER_BYTES
from dist2.operation.record import Operation


class Call:
    """One call of a program.

    Attributes:
        operation: Gives number and deadline.
        memories: The tensors, then the scratch.
        late: Sends that the kernel has not taken whole.
    """

    __slots__ = ("late", "memories", "operation")

    def __init__(self, operation: Operation, memories: list[Memory]) -> None:
        self.operation = operation
        self.memories = memories
        self.late: list[Transfer] = []


Step = Callable[[Call], None]


def is_brief(endpoint: Endpoint, plan: Plan) -> TypeGuard[FabricEndpoint]:
    """Whether all of a plan is short messages that may take the short path over sockets, and local work."""
    if plan.meets or not isinstance(endpoint, FabricEndpoint):
        return False
    messages = [
        message
        for action in plan.actions
        if isinstance(action, Messages)
        for message in (*action.sends, *action.recvs)
    ]
    return bool(messages) and all(
        message.place.nbytes <= EAGER_BYTES
        and endpoint.ways.has_socket_way(Lot(message.peer, 0, 0, 0, False))
        for message in messages
    )


class BriefProgram:
    """A plan of short messages, prepared for one signature.

    Args:
        executor: Has scratch.
        endpoint: The group's messages.
        plan: The plan to run.
    """

    def __init__(self, executor: MessageExecutor, endpoint: FabricEndpoint, plan: Plan) -> None:
        self._executor = executor
        self._endpoint = endpoint
        self._plan = plan
        self._fingerprint = 0
        self._steps: tuple[tuple[str, Step], ...] = ()  # each with its `Part.name`

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors; see `MessageExecutor.run`."""
        fingerprint = operation.signature.fingerprint
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            self._steps = self._compiled(self._plan.actions)
        memories: list[Memory] = [Memory(tensor) for tensor in inputs]
        memories += memories if outputs is inputs else [Memory(tensor) for tensor in outputs]
        memories.append(self._executor.scratch_of(self._plan.scratch))
        call, clock = Call(operation, memories), self._executor.clock(operation)
        try:
            for part, step in self._steps:
                step(call)
                if clock is not None:
                    clock.note(part)
            if call.late:
                self._endpoint.wait(call.late, operation.deadline_ns)
        except BaseException:
            self._endpoint.cancel(call.late)
            raise

    def _compiled(self, actions: Sequence[Action]) -> tuple[tuple[str, Step], ...]:
        """Return the steps of a plan: each message is received just before it is needed, or at the end."""
        steps: list[tuple[str, Step]] = []
        awaited: dict[int, Message] = {}
        for action in actions:
            steps += self._needed(action.needs, awaited)
            if isinstance(action, Messages):
                steps += [("send", self._sending(message)) for message in action.sends]
                awaited |= {message.number: message for message in action.recvs}
            elif isinstance(action, Combine):
                steps.append(("reduce", self._combining(action)))
            elif isinstance(action, Move):
                steps.append(("copy", _moving(action)))
            else:
                assert not isinstance(action, Meet)  # or the plan would not be brief
        return (*steps, *(("recv", self._receiving(message)) for message in awaited.values()))

    def _needed(self, needs: Needs, awaited: dict[int, Message]) -> list[tuple[str, Step]]:
        """Return the steps that wait for some of the messages, each with its `Part.name`."""
        sent = any(number not in awaited for number in needs)
        steps = [("recv", self._receiving(awaited.pop(number))) for number in needs if number in awaited]
        return [*steps, ("send", self._settle)] if sent else steps

    def _settle(self, call: Call) -> None:
        """Wait until sent memory may be written to."""
        if call.late:
            self._endpoint.wait(call.late, call.operation.deadline_ns)

    def _lot(self, message: Message) -> Lot:
        return Lot(message.peer, message.step, self._fingerprint, message.place.nbytes, tagged=False)

    def _sending(self, message: Message) -> Step:
        endpoint, fingerprint, place = self._endpoint, self._fingerprint, message.place
        send, memory, start = endpoint.ways.socket_send(self._lot(message)).send, place.memory, place.start

        def run(call: Call) -> None:
            seq, tensor = call.operation.seq, call.memories[memory]
            sent: bool | Transfer = send(tensor.address + start, seq)
            if sent is True:
                return
            if sent is False:
                sent = endpoint.send(message.peer, seq, message.step, fingerprint, tensor.bytes(place))
            call.late.append(sent)

        return run

    def _receiving(self, message: Message) -> Step:
        endpoint, fingerprint, place = self._endpoint, self._fingerprint, message.place
        wait, memory, start = endpoint.ways.socket_receive(self._lot(message)).wait, place.memory, place.start

        def run(call: Call) -> None:
            operation, tensor = call.operation, call.memories[memory]
            seq, deadline_ns = operation.seq, operation.deadline_ns
            received: bool | Transfer = wait(tensor.address + start, deadline_ns, seq)
            if received is True:
                return
            if received is False:
                received = endpoint.recv(message.peer, seq, message.step, fingerprint, tensor.bytes(place))
            endpoint.wait([received], deadline_ns, call.late)

        return run

    def _combining(self, action: Combine) -> Step:
        fold, dst, srcs, dtype = action.fold, action.dst, action.srcs, self._plan.dtype

        def run(call: Call) -> None:
            memories = call.memories
            fold(_elements(memories, dst, dtype), [_elements(memories, src, dtype) for src in srcs])

        return run


def _elements(memories: Sequence[Memory], place: Place, dtype: torch.dtype) -> torch.Tensor:
    return memories[place.memory].elements(place, dtype)


def _moving(action: Move) -> Step:
    dst, src = action.dst, action.src

    def run(call: Call) -> None:
        to = call.memories[dst.memory].address + dst.start
        start = call.memories[src.memory].address + src.start
        if to != start:  # else the caller's input is its output
            copy_bytes(to, start, dst.nbytes)

    return run
