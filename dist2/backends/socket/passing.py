"""`Passing`: the messages of one call that take the short way over sockets where they can.

A plan's messages have their short way bound once a signature (`Ways`). A send hands header and payload to the
kernel at once; a receive is looked for when its payload is wanted, so that it is copied from the kernel
right before it is folded, and no other thread, record or buffer has to do with it. Messages for which that
cannot be go as `Traffic` has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.executor import Memory, Traffic
from dist2.backends.socket.overlap import Message, Messages, Needs
from dist2.backends.socket.plan import Plan
from dist2.backends.socket.transport.base import Endpoint, Transfer
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.express import Lot
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.operation import Operation


class Ways:
    """The short ways of a plan's messages, for one signature.

    Args:
        endpoint: The group's messages.
        plan: Whose messages.
        fingerprint: Of the signature.

    Attributes:
        sends: By the message's number, those that have one.
        recvs: Likewise.
    """

    def __init__(self, endpoint: Endpoint, plan: Plan, fingerprint: int) -> None:
        self.fingerprint = fingerprint
        self.sends: dict[int, SocketSend] = {}
        self.recvs: dict[int, SocketReceive] = {}
        if not isinstance(endpoint, FabricEndpoint):
            return
        for action in plan.actions:
            if isinstance(action, Messages):
                for message in action.sends:
                    if (lot := self._lot(endpoint, message)) is not None:
                        self.sends[message.number] = endpoint.socket_send(lot)
                for message in action.recvs:
                    if (lot := self._lot(endpoint, message)) is not None:
                        self.recvs[message.number] = endpoint.socket_receive(lot)

    def _lot(self, endpoint: FabricEndpoint, message: Message) -> Lot | None:
        lot = Lot(message.peer, message.step, self.fingerprint, message.place.nbytes, tagged=False)
        return lot if lot.nbytes and endpoint.has_socket_way(lot) else None


class Passing(Traffic):
    """Messages of one call, by the short ways of its plan; see `Traffic`.

    Args:
        endpoint: What carries those that have none.
        operation: Gives sequence number, fingerprint and deadline.
        memories: What places of messages are in.
        messages: How many there are.
        ways: The short ways.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        operation: Operation,
        memories: Sequence[Memory],
        messages: int,
        ways: Ways,
    ) -> None:
        super().__init__(endpoint, operation, memories, messages)
        self._ways = ways
        self._awaited: dict[int, Message] = {}
        self._unsent: dict[int, Message] = {}

    def start(self, messages: Messages) -> None:
        """Start messages: what is sent the short way is done, or only its rest is under way."""
        recvs: list[Message] = []
        for message in messages.recvs:
            if message.number in self._ways.recvs:
                self._awaited[message.number] = message
            else:
                recvs.append(message)
        sends: list[Message] = []
        for message in messages.sends:
            if message.number in self._ways.sends:
                self._unsent[message.number] = message
            else:
                sends.append(message)
        if recvs or sends:
            super().start(Messages(tuple(sends), tuple(recvs)))
        self._send_some()

    def wait(self, needs: Needs) -> None:
        """Wait for some of the messages that were started."""
        for number in needs:
            if number in self._awaited:
                self._receive(self._awaited.pop(number))
        if self._unsent:
            self._send_some()
            for number in needs:
                if number in self._unsent:
                    self._send_long(self._unsent.pop(number))
        super().wait(needs)

    def settle(self) -> None:
        """Wait for everything that was started."""
        for number in list(self._awaited):
            self.wait((number,))
        self._send_some()
        for message in self._unsent.values():
            self._send_long(message)
        self._unsent.clear()
        super().settle()

    def _send_some(self) -> None:
        """Send what the links have room for, in order."""
        while self._unsent:
            message = next(iter(self._unsent.values()))
            way, place = self._ways.sends[message.number], message.place
            sent = way.send(self._memories[place.memory].address + place.start, self._operation.seq)
            if sent is False and way.held_up:
                return
            del self._unsent[message.number]
            if sent is False:
                self._send_long(message)
            elif sent is not True:
                self._note(message.number, sent)

    def _send_long(self, message: Message) -> None:
        super().start(Messages((message,), ()))

    def _receive(self, message: Message) -> None:
        operation, place = self._operation, message.place
        address = self._memories[place.memory].address + place.start
        if self._unsent:
            self._send_some()
        received = self._ways.recvs[message.number].wait(address, operation.deadline_ns, operation.seq)
        if received is False:
            super().start(Messages((), (message,)))
        elif received is not True:
            self._note(message.number, received)

    def _note(self, number: int, transfer: Transfer) -> None:
        self._transfers[number] = transfer
        self._started.append(transfer)
