"""`Passing`: the messages of one call that are sent directly over sockets where possible.

The direct sends of a plan's messages are bound once for a signature (`Ways`). A send hands header and payload
to the kernel at once. A receive reads its message when the payload is needed, so that it is copied from the
kernel right before it is folded, without another thread, record or buffer. All other messages are sent by
`Traffic`.

A long wait in this state could deadlock: a sender is blocked by its unreceived messages, and this rank may
depend, through other ranks, on its next one. So before a rank waits, it posts all receives whose buffers are
free, and queues all its sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dist2.backends.socket.executor import Memory, Traffic
from dist2.backends.socket.overlap import Message, Messages, Needs
from dist2.backends.socket.plan import Plan
from dist2.backends.socket.transport.base import Endpoint, Transfer
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from dist2.backends.socket.transport.messages.express import Lot
from dist2.backends.socket.transport.messages.express_socket import SocketReceive, SocketSend
from dist2.backends.socket.transport.messages.rails import Freight, Rails
from dist2.operation.record import Operation


class Ways:
    """The direct sends of a plan's messages, for one signature.

    Args:
        endpoint: The group's messages.
        plan: The plan whose messages they are.
        fingerprint: The signature's fingerprint.

    Attributes:
        sends: By the message's number, those that have one.
        recvs: Likewise.
        lots: The `Lot` of each of these, by number.
        messages: The messages themselves.
        rails: For scripts in C, where all messages can go that way; else None.
    """

    def __init__(self, endpoint: Endpoint, plan: Plan, fingerprint: int) -> None:
        self.fingerprint = fingerprint
        self.sends: dict[int, SocketSend] = {}
        self.recvs: dict[int, SocketReceive] = {}
        self.lots: dict[int, Lot] = {}
        self.messages: dict[int, Message] = {}
        self.rails: Rails | None = None
        if not isinstance(endpoint, FabricEndpoint):
            return
        for action in plan.actions:
            if isinstance(action, Messages):
                for message in self._short(endpoint, action.sends):
                    self.sends[message.number] = endpoint.ways.socket_send(self.lots[message.number])
                for message in self._short(endpoint, action.recvs):
                    self.recvs[message.number] = endpoint.ways.socket_receive(self.lots[message.number])
        if len(self.lots) == plan.messages > 0:
            self.rails = endpoint.ways.rails(fingerprint)

    def _short(self, endpoint: FabricEndpoint, messages: Sequence[Message]) -> Iterator[Message]:
        """Note and yield those that have a short path."""
        for message in messages:
            lot = Lot(message.peer, message.step, self.fingerprint, message.place.nbytes, tagged=False)
            if lot.nbytes and endpoint.ways.has_socket_way(lot):
                self.lots[message.number], self.messages[message.number] = lot, message
                yield message


class Passing(Traffic):
    """The messages of one call, sent directly where its plan can; see `Traffic`.

    Args:
        endpoint: Carries the others.
        operation: Gives sequence number, fingerprint and deadline.
        memories: The memories that hold messages.
        messages: How many there are.
        ways: The short paths.
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
        self._expected: Sequence[Message] = ()
        self._unsent: dict[int, Message] = {}
        self._early: dict[int, Message] = {}

    @property
    def early(self) -> Counter[int]:
        """Number of messages of each member that were received ahead of their steps."""
        return Counter([message.peer for message in self._early.values()])

    @property
    def is_quiet(self) -> bool:
        """Whether no message is in flight."""
        return not self._unsent and not self._awaited and all(each.done for each in self._started)

    def send(self, message: Message) -> None:
        """Start a send."""
        self.start(Messages((message,), ()))

    def expect(self, messages: Sequence[Message]) -> None:
        """Note the messages that may be received now, before a step needs them."""
        self._expected = messages

    def receive(self, message: Message) -> None:
        """Start a receive, if that has not been done, and wait for it."""
        self._early.pop(message.number, None)
        if self._transfers[message.number] is None:
            self.start(Messages((), (message,)))
        self.wait((message.number,))

    def has_come(self, rails: Rails, coming: int) -> bool:
        """Receive a message in place of a script, if it arrived before the script began."""
        message = self._early.get(coming)
        if message is None:
            return rails.take(self._freight(coming))
        transfer = self._transfers[coming]
        if transfer is None or transfer.error is not None:  # its waiter raises that
            return False
        del self._early[coming]
        rails.skip(message.peer)
        return True

    def close_rails(self, rails: Rails, coming: int | None) -> None:
        """Continue the messages that scripts have left unfinished.

        Args:
            rails: The rails that carry the messages.
            coming: Number of the message that one was about to receive.
        """
        left = rails.close(self._freight, coming)
        for number, transfer in left.transfers.items():
            self._note(number, transfer)
        for number in left.unsent:
            self._unsent[number] = self._ways.messages[number]

    def _freight(self, number: int) -> Freight:
        place = self._ways.messages[number].place
        return Freight(self._ways.lots[number], self._memories[place.memory].bytes(place))

    def start(self, messages: Messages) -> None:
        """Start messages; directly sent ones are complete, or only their rest is in flight."""
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
                self._receive_up_to(self._awaited[number])
        if self._unsent:
            self._send_some()
            for number in needs:
                if number in self._unsent:
                    self._send_long(self._unsent.pop(number))
        if any(not each.done for number in needs if (each := self._transfers[number])):
            self._post_all()
            self._send_all_long()
        super().wait(needs)

    def settle(self) -> None:
        """Wait for everything that was started."""
        for number in sorted(self._awaited):  # as they were sent
            self.wait((number,))
        self._send_some()
        self._send_all_long()
        super().settle()

    def _send_some(self) -> None:
        """Send messages in order while the links have room."""
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

    def _post_all(self) -> None:
        """Post all receives that have a buffer, so that their messages are received during any wait."""
        expected = {each.number: each for each in self._expected if self._transfers[each.number] is None}
        posted = {**expected, **self._awaited}
        self._early |= expected
        self._awaited.clear()
        if posted:
            super().start(Messages((), tuple(posted.values())))

    def _send_all_long(self) -> None:
        for message in self._unsent.values():
            self._send_long(message)
        self._unsent.clear()

    def _send_long(self, message: Message) -> None:
        super().start(Messages((message,), ()))

    def _receive_up_to(self, message: Message) -> None:
        """Receive a message, after earlier ones of the same member."""
        before = [
            each for each in self._awaited.values() if each.peer == message.peer and each.step < message.step
        ]
        for each in (*before, message):
            del self._awaited[each.number]
            self._receive(each)

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
