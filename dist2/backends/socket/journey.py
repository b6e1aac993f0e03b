"""`Journey`: the part of a plan between two fences, its messages included, as one script in C.

It contains no addresses, but places in the tensors of a call and in memory that others expose: it serves
calls on any tensors. Without C, or if a message cannot go over rails, plans run stage by stage: see
`crossing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from dist2.backends.socket.borrowing import Borrowing
from dist2.backends.socket.bound_steps import Bound, Tensors, moving
from dist2.backends.socket.host import Script
from dist2.backends.socket.lowering import TENSOR
from dist2.backends.socket.overlap import Action, Combine, Message, Messages, Move
from dist2.backends.socket.passing import Passing
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.backends.socket.transport.messages.express import Lot
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.compiled import steps
from dist2.operation.record import Operation


@attrs.frozen
class Stop:
    """The state of messages before a step that uses them.

    Attributes:
        action: Does it.
        coming: Number of the message that it receives, if it does.
        expected: Messages that may be received by then.
    """

    action: Callable[[Passing], None]
    coming: int | None
    expected: tuple[Message, ...]


Local = Move | Combine
Bind = Callable[[Local], Sequence[Bound]]
"""Returns the steps of local work on the tensors of a call."""


@attrs.frozen
class Journey:
    """Local work and messages, compiled.

    Attributes:
        count: How many steps it has.
        stops: The steps that send or receive messages, by number.
        local: The steps of local work, by number: of which work, and which step of that.
        script: All of them, in C.
        rails: The rails that carry the messages.
        recall: How others of the host say that they have given up.
    """

    count: int
    stops: Mapping[int, Stop]
    local: Mapping[int, tuple[Local, int]]
    script: Script
    rails: Rails
    recall: Recall

    def run(self, operation: Operation, traffic: Passing, tensors: Tensors, bind: Bind) -> None:
        """Run it: in C as long as all goes well, and step by step where it does not.

        Args:
            operation: The call.
            traffic: Its messages.
            tensors: Its tensors, as memories of the plan are numbered.
            bind: Binds local work to them.
        """
        at, rails, count = 0, self.rails, self.count
        try:
            while at < count:
                if not rails.is_open and traffic.is_quiet:
                    rails.open(operation.seq, traffic.early)
                at = self.script.run_from(operation, (), tensors, at)
                if at == count or (rails.is_open and rails.go_on(operation.deadline_ns)):
                    continue
                stop = self.stops.get(at)
                if stop is None:
                    self._work(at, operation, traffic, bind)
                else:
                    self._halt(stop, traffic)
                at += 1
        finally:
            try:
                if rails.is_open:
                    stop = self.stops.get(at)
                    traffic.close_rails(rails, None if stop is None else stop.coming)
            finally:
                rails.abandon()
                traffic.expect(())

    def _work(self, at: int, operation: Operation, traffic: Passing, bind: Bind) -> None:
        """Do local work. If a member has given up, close the rails: its reason comes over the links."""
        work, number = self.local[at]
        with self.recall.letting_go(lambda: self._let_go(traffic)):
            bind(work)[number].action(operation)

    def _let_go(self, traffic: Passing) -> None:
        if self.rails.is_open:
            traffic.close_rails(self.rails, None)

    def _halt(self, stop: Stop, traffic: Passing) -> None:
        """Send or receive over the links, unless the message arrived before the rails were open."""
        if self.rails.is_open:
            if stop.coming is not None and traffic.has_come(self.rails, stop.coming):
                return
            traffic.close_rails(self.rails, stop.coming)
        traffic.expect(stop.expected)
        stop.action(traffic)


class Itinerary:
    """Assembles the steps of a journey.

    Args:
        rails: The rails that carry the messages.
        lots: The lots of messages, by number.
        bind: Binds local work.
        looks: The first steps: see `Borrowing.looks`.
    """

    def __init__(
        self,
        rails: Rails,
        lots: Mapping[int, Lot],
        bind: Bind,
        looks: Iterable[Bound],
    ) -> None:
        self._rails = rails
        self._lots = lots
        self._bind = bind
        self._bound = [*looks]
        self._movers = steps.Movers()
        self._stops: dict[int, Stop] = {}
        self._local: dict[int, tuple[Local, int]] = {}
        self._awaited: dict[int, Message] = {}
        self._sent: dict[int, Message] = {}

    def add(self, action: Action) -> None:
        """Add an action after the receives that it needs, which are placed just before it."""
        self._need(action.needs)
        if isinstance(action, Messages):
            for message in action.sends:
                self._send(message)
            self._awaited |= {message.number: message for message in action.recvs}
        elif isinstance(action, (Move, Combine)):
            for number, step in enumerate(self._bind(action)):
                self._local[len(self._bound)] = action, number
                self._bound.append(step)

    def end(self, borrowing: Borrowing, tensors: int) -> Journey | None:
        """Return the journey, which ends when all its messages are done; None where it cannot run in C.

        Args:
            borrowing: Accesses memory for its local work.
            tensors: How many a call has.
        """
        self._need(sorted([*self._awaited, *self._sent]))
        script = borrowing.script_of(self._bound, tensors)
        if script is None:
            return None
        count = len(self._bound)
        return Journey(count, self._stops, self._local, script, self._rails, borrowing.recall)

    def _need(self, needs: Sequence[int]) -> None:
        last: dict[int, int] = {}
        for number in needs:
            if number in self._awaited:
                self._receive(self._awaited[number])
            elif number in self._sent:
                peer = self._sent[number].peer
                last[peer] = max(number, last.get(peer, number))
        for peer, number in last.items():
            self._see_off(peer, number)

    def _stop(self, action: Callable[[Passing], None], coming: int | None = None) -> None:
        self._stops[len(self._bound)] = Stop(action, coming, tuple(self._awaited.values()))

    def _send(self, message: Message) -> None:
        def send(traffic: Passing) -> None:
            traffic.send(message)

        self._stop(send)
        self._sent[message.number] = message
        self._bound.append(self._moved(send, message, sends=True))

    def _receive(self, message: Message) -> None:
        def receive(traffic: Passing) -> None:
            traffic.receive(message)

        self._stop(receive, message.number)
        del self._awaited[message.number]
        self._bound.append(self._moved(receive, message, sends=False))

    def _moved(self, action: Callable[[Passing], None], message: Message, *, sends: bool) -> Bound:
        rail, header = self._rails.rail(message.peer), self._rails.header(self._lots[message.number])
        place = message.place
        mover = (self._movers.send if sends else self._movers.receive)(rail, header)
        there = (TENSOR, place.memory, place.start)
        return moving(action, mover, there, place.nbytes, message.number, sends)

    def _see_off(self, peer: int, last: int) -> None:
        """Wait for the sends to a member up to a message: all are sent in the order of their numbers."""
        numbers = tuple(
            number for number, message in self._sent.items() if message.peer == peer and number <= last
        )
        for number in numbers:
            del self._sent[number]

        def wait(traffic: Passing) -> None:
            traffic.wait(numbers)

        self._stop(wait)
        mover = self._movers.sent(self._rails.rail(peer))
        self._bound.append(moving(wait, mover, (TENSOR, 0, 0), 0, last, True))
