"""Work that overlaps with messages: the actions of a plan, and the messages that each one waits for.

An action waits for the messages whose memory it touches: a received stretch must be there before it is read
or written, a sent one must have left before it is written. A fence waits for all messages that touch slots,
as other ranks may read or write those after it. Receives start early, so that the sender of a long message
need not wait until there is a place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs

from dist2.backends.socket.reduction import Fold as FoldFunction

_LOOK_BACK = 32
"""Actions that a receive is moved over at most."""


@attrs.frozen(cache_hash=True)
class Place:
    """The position of a stretch of elements.

    Attributes:
        memory: The index of the memory: inputs first, then outputs, then scratch, then the slots of this
            host.
        start: First byte.
        stop: One past the last.
    """

    memory: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Message(NamedTuple):
    """One message.

    Attributes:
        peer: The other side.
        step: Number of the message between the two ranks in this direction.
        place: The source or target.
        number: The message's number in the plan.
    """

    peer: int
    step: int
    place: Place
    number: int


Needs = tuple[int, ...]
"""Numbers of messages that must be done before an action."""


@attrs.frozen
class Messages:
    """Start these messages."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    needs: Needs = ()


@attrs.frozen
class Move:
    """Copy bytes."""

    dst: Place
    src: Place
    needs: Needs = ()


@attrs.frozen(eq=False)
class Combine:
    """Fold elements."""

    fold: FoldFunction
    dst: Place
    srcs: tuple[Place, ...]
    needs: Needs = ()


@attrs.frozen
class Meet:
    """Wait for the other ranks of this host."""

    needs: Needs = ()


Action = Messages | Move | Combine | Meet


@attrs.frozen
class Memories:
    """The numbers of memories, and those that may alias because the caller passed them twice.

    Attributes:
        input_starts: Where each input lies in the concatenation of all, in bytes.
        output_starts: Where each output lies in the concatenation of all.
        shift: Byte ``n`` of the inputs may be byte ``n + shift`` of the outputs; None: they share nothing.
    """

    input_starts: tuple[int, ...]
    output_starts: tuple[int, ...]
    shift: int | None

    def is_shared(self, place: Place) -> bool:
        """Whether other ranks of this host may read or write a place."""
        return place.memory > len(self.input_starts) + len(self.output_starts)

    def share(self, first: Place, second: Place) -> bool:
        """Whether two places may have a byte in common."""
        if first.memory == second.memory:
            return first.start < second.stop and second.start < first.stop
        if first.memory > second.memory:
            first, second = second, first
        inputs = len(self.input_starts)
        output = second.memory - inputs
        if self.shift is None or first.memory >= inputs or not 0 <= output < len(self.output_starts):
            return False
        moved = self.input_starts[first.memory] + self.shift - self.output_starts[output]
        return first.start + moved < second.stop and second.start < first.stop + moved


def overlapped(actions: Sequence[Action], memories: Memories) -> tuple[Action, ...]:
    """Return the actions with receives moved forward, each with the messages that it waits for."""
    overlap = _Overlap(memories)
    return tuple(overlap.needing(overlap.early(actions)))


class _Overlap:
    """Moves and marks actions."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self._share = memories.share

    def early(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions with each receive as early as nothing before it touches its memory."""
        moved: list[Action] = []
        for action in actions:
            if not isinstance(action, Messages):
                moved.append(action)
                continue
            early: dict[int, list[Message]] = {}
            for recv in action.recvs:
                early.setdefault(self._earliest(moved, recv.place), []).append(recv)
            staying = early.pop(len(moved), [])
            if action.sends or staying:
                moved.append(Messages(action.sends, tuple(staying)))
            for position in sorted(early, reverse=True):
                moved.insert(position, Messages((), tuple(early[position])))
        return moved

    def _earliest(self, actions: Sequence[Action], place: Place) -> int:
        """Return the position after the last action that has to do with a place."""
        end = position = len(actions)
        if not place.nbytes:
            return end
        while position and end - position < _LOOK_BACK:
            action = actions[position - 1]
            if isinstance(action, Meet):
                if self._memories.is_shared(place):
                    break
            elif any(self._share(place, other) for other in _places(action)):
                # Behind a message it would have to wait for that one, earlier than is needed.
                return end if isinstance(action, Messages) else position
            position -= 1
        return position

    def needing(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions with the messages that each has to wait for."""
        under_way: list[tuple[Message, bool]] = []
        found: list[Action] = []
        for action in actions:
            needed = [each for each in under_way if self._waits(action, *each)]
            if needed:
                under_way = [each for each in under_way if each not in needed]
                action = attrs.evolve(action, needs=tuple(message.number for message, _ in needed))
            found.append(action)
            if isinstance(action, Messages):
                under_way += [(recv, True) for recv in action.recvs]
                under_way += [(send, False) for send in action.sends]
        return found

    def _waits(self, action: Action, message: Message, received: bool) -> bool:
        """Whether an action has to wait for a message that was started before it."""
        if not message.place.nbytes:  # it moves nothing, so it is there for its order
            return received
        if isinstance(action, Meet):
            return self._memories.is_shared(message.place)
        touched = _places(action) if received else _written(action)
        return any(self._share(message.place, place) for place in touched)


def _places(action: Action) -> list[Place]:
    """Return the memory that an action reads and writes."""
    if isinstance(action, Move):
        return [action.dst, action.src]
    if isinstance(action, Combine):
        return [action.dst, *action.srcs]
    if isinstance(action, Messages):
        return [message.place for message in (*action.sends, *action.recvs)]
    return []


def _written(action: Action) -> list[Place]:
    """Return the memory that an action writes."""
    if isinstance(action, (Move, Combine)):
        return [action.dst]
    if isinstance(action, Messages):
        return [recv.place for recv in action.recvs]
    return []
