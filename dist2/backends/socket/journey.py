"""`Journey`: what a plan does between two fences, its messages included, as one script in C.

Without C, or where a message cannot go over rails, plans are run stage by stage: see `crossing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from dist2.backends.socket.borrowing import Borrowing
from dist2.backends.socket.overlap import Action, Combine, Message, Messages, Move
from dist2.backends.socket.passing import Passing
from dist2.backends.socket.script import Bound, Script, receiving, seeing_off, sending
from dist2.backends.socket.transport.boards.recall import Recall
from dist2.backends.socket.transport.messages.express import Lot
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.operation import Operation


@attrs.frozen
class Stop:
    """What is the case before a step that has to do with messages.

    Attributes:
        coming: Number of the message that it receives, if it does.
        expected: What may be received by then.
    """

    coming: int | None
    expected: tuple[Message, ...]


@attrs.frozen
class Journey:
    """Local work and messages, made ready to run.

    Attributes:
        bound: Its steps: of messages the closures take the `Passing` of a call.
        stops: Which of them have to do with messages.
        script: The same in C.
        rails: What it goes over.
        recall: By which others of the host say that they have given up.
    """

    bound: tuple[Bound, ...]
    stops: Mapping[int, Stop]
    script: Script
    rails: Rails
    recall: Recall

    def run(self, operation: Operation, traffic: Passing) -> None:
        """Run it: in C as long as all goes well, and step by step where it does not."""
        at, rails, count = 0, self.rails, len(self.bound)
        try:
            while at < count:
                if not rails.is_open and traffic.is_quiet:
                    rails.open(operation.seq, traffic.early)
                at = self.script.run(operation, (), (), 0, at)
                if at == count or (rails.is_open and rails.go_on(operation.deadline_ns)):
                    continue
                stop = self.stops.get(at)
                if stop is None:
                    self._work(at, operation, traffic)
                elif not self._has_come(stop, traffic):
                    if rails.is_open:
                        traffic.close_rails(rails, stop.coming)
                    traffic.expect(stop.expected)
                    self.bound[at].action(traffic)
                at += 1
        finally:
            try:
                if rails.is_open:
                    stop = self.stops.get(at)
                    traffic.close_rails(rails, None if stop is None else stop.coming)
            finally:
                rails.abandon()
                traffic.expect(())

    def _work(self, at: int, operation: Operation, traffic: Passing) -> None:
        """Do local work. If somebody has given up, the links are needed to hear why, and who is to blame."""
        with self.recall.letting_go(lambda: self._let_go(traffic)):
            self.bound[at].action(operation)

    def _let_go(self, traffic: Passing) -> None:
        if self.rails.is_open:
            traffic.close_rails(self.rails, None)

    def _has_come(self, stop: Stop, traffic: Passing) -> bool:
        """Receive what has come before the rails were open, where a step waits for that."""
        return self.rails.is_open and stop.coming is not None and traffic.has_come(self.rails, stop.coming)


class Itinerary:
    """Puts the steps of a journey together.

    Args:
        rails: What it goes over.
        lots: What the messages are, by number.
        address: Returns where a message lies.
        local: Binds local work.
    """

    def __init__(
        self,
        rails: Rails,
        lots: Mapping[int, Lot],
        address: Callable[[Message], int],
        local: Callable[[Move | Combine], Iterable[Bound]],
    ) -> None:
        self._rails = rails
        self._lots = lots
        self._address = address
        self._local = local
        self._bound: list[Bound] = []
        self._stops: dict[int, Stop] = {}
        self._awaited: dict[int, Message] = {}
        self._sent: dict[int, Message] = {}

    def add(self, action: Action) -> None:
        """Add an action, after what it needs: each message is received just before that."""
        self._need(action.needs)
        if isinstance(action, Messages):
            for message in action.sends:
                self._send(message)
            self._awaited |= {message.number: message for message in action.recvs}
        elif isinstance(action, (Move, Combine)):
            self._bound += self._local(action)

    def end(self, borrowing: Borrowing) -> Journey | None:
        """Return the journey, with all its messages done at its end; None where nothing of it is in C.

        Args:
            borrowing: What it does its local work with.
        """
        self._need(sorted([*self._awaited, *self._sent]))
        script = borrowing.script_of(self._bound)
        if script is None:
            return None
        return Journey(tuple(self._bound), self._stops, script, self._rails, borrowing.recall)

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

    def _stop(self, coming: int | None = None) -> None:
        self._stops[len(self._bound)] = Stop(coming, tuple(self._awaited.values()))

    def _send(self, message: Message) -> None:
        self._stop()
        self._sent[message.number] = message
        self._carry(sending, lambda traffic: traffic.send(message), message)

    def _receive(self, message: Message) -> None:
        self._stop(message.number)
        del self._awaited[message.number]
        self._carry(receiving, lambda traffic: traffic.receive(message), message)

    def _carry(self, bind: Callable[..., Bound], action: Callable[[Passing], None], message: Message) -> None:
        rail, header = self._rails.rail(message.peer), self._rails.header(self._lots[message.number])
        address, nbytes = self._address(message), message.place.nbytes
        self._bound.append(bind(action, rail, header, address, nbytes, message.number))

    def _see_off(self, peer: int, last: int) -> None:
        """Wait for what was sent to a member, up to a message: all went in the order of their numbers."""
        numbers = tuple(
            number for number, message in self._sent.items() if message.peer == peer and number <= last
        )
        for number in numbers:
            del self._sent[number]
        self._stop()
        self._bound.append(seeing_off(lambda traffic: traffic.wait(numbers), self._rails.rail(peer), last))
