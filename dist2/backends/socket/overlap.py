# cython: annotation_typing=False
"""Work that overlaps with messages: a draft of a plan, whose steps wait only for the messages that they need.

A schedule says that an `Exchange` ends when all its messages are done. A plan is less strict. A step waits
for the messages whose memory it touches: a received stretch must be there before it is read or written, a
sent one must have left before it is written. A fence waits for all messages that touch slots, as other ranks
may read or write those after it. Receives start early, so that the sender of a long message need not wait
until there is a place for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from dist2.backends.socket.traffic import Await, Message, Receive, Send
from dist2.operation.engine import CONSTANTS, Plan

TENSOR: int = CONSTANTS["TENSOR"]
SLOT: int = CONSTANTS["SLOT"]
MAPPED: int = CONSTANTS["MAPPED"]
"""Bases of places: a tensor of the call, by number; a slot, by rank; memory that was taken, by number."""
_LOOK_BACK = 32
"""Steps that a receive is moved over at most."""

Place = tuple[int, int, int]
"""Where a step reads or writes: a base, which one of it, and an offset in bytes."""

Stretch = tuple[Place, int]
"""A place and a number of bytes."""


@attrs.frozen(eq=False)
class Local:
    """A step without messages.

    Attributes:
        method: The method of `Plan` that adds it,
        arguments: and its arguments.
        reads: The memory that it reads.
        writes: The memory that it writes.
        meets: Whether other ranks may access slots after it that they did not before, or no longer.
    """

    method: str
    arguments: tuple[Any, ...]
    reads: tuple[Stretch, ...]
    writes: tuple[Stretch, ...]
    meets: bool

    def add_to(self, plan: Plan) -> None:
        """Add it to a plan."""
        getattr(plan, self.method)(*self.arguments)


@attrs.frozen(eq=False)
class Messages:
    """Messages that are started together, the receives first, so that payloads find their place.

    Attributes:
        sends: Those sent.
        recvs: Those received.
    """

    sends: tuple[tuple[Send, Place], ...]
    recvs: tuple[tuple[Receive, Place], ...]
    meets = False

    @property
    def reads(self) -> tuple[Stretch, ...]:
        return tuple((place, message.nbytes) for message, place in self.sends)

    @property
    def writes(self) -> tuple[Stretch, ...]:
        return tuple((place, message.nbytes) for message, place in self.recvs)

    def add_to(self, plan: Plan) -> None:
        """Add them to a plan."""
        for recv, place in self.recvs:
            plan.recv(place, recv.nbytes, recv)
        for send, place in self.sends:
            plan.send(place, send.nbytes, send)


Action = Local | Messages


@attrs.frozen
class Aliases:
    """Memory that the caller may have passed twice.

    Attributes:
        input_starts: Where each input lies in the concatenation of all, in bytes.
        output_starts: Where each output lies in the concatenation of all.
        shift: Byte ``n`` of the inputs may be byte ``n + shift`` of the outputs; None: they share nothing.
    """

    input_starts: tuple[int, ...]
    output_starts: tuple[int, ...]
    shift: int | None

    def share(self, first: Stretch, second: Stretch) -> bool:
        """Whether two stretches may have a byte in common."""
        (base, index, start), nbytes = first
        (other_base, other_index, other_start), other_nbytes = second
        if base != other_base:
            return False
        if index != other_index:
            if base != TENSOR or self.shift is None:
                return False
            if index > other_index:
                return self.share(second, first)
            output = other_index - len(self.input_starts)
            if index >= len(self.input_starts) or not 0 <= output < len(self.output_starts):
                return False
            start += self.input_starts[index] + self.shift - self.output_starts[output]
        return start < other_start + other_nbytes and other_start < start + nbytes


class Draft:
    """Steps that are to be added to a plan. The methods are those of `Plan`, and `exchange`."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def claim(self, kind: int) -> None:
        self._add("claim", (kind,), (), (), meets=True)

    def fence(
        self, whom: int, own: tuple[Place, Place, int] | None, checked: object | None, number: int
    ) -> None:
        reads, writes = ([(own[1], own[2])], [(own[0], own[2])]) if own is not None else ((), ())
        self._add("fence", (whom, own, checked, number), reads, writes, meets=True)

    def copy(self, dst: Place, src: Place, nbytes: int, way: int) -> None:
        self._add("copy", (dst, src, nbytes, way), [(src, nbytes)], [(dst, nbytes)])

    def fold(
        self, number: int, divisor: float, dst: Place, srcs: Sequence[Place], nbytes: int, payload: object
    ) -> None:
        reads = [(src, nbytes) for src in srcs]
        self._add("fold", (number, divisor, dst, srcs, nbytes, payload), reads, [(dst, nbytes)])

    def fold_elsewhere(self, dst: Place, srcs: Sequence[Place], nbytes: int, payload: object) -> None:
        reads = [(src, nbytes) for src in srcs]
        self._add("fold_elsewhere", (dst, srcs, nbytes, payload), reads, [(dst, nbytes)])

    def exchange(self, sends: Iterable[tuple[Send, Place]], recvs: Iterable[tuple[Receive, Place]]) -> None:
        """Add messages."""
        self._actions.append(Messages(tuple(sends), tuple(recvs)))

    def _add(
        self,
        method: str,
        arguments: tuple[Any, ...],
        reads: Iterable[Stretch],
        writes: Iterable[Stretch],
        *,
        meets: bool = False,
    ) -> None:
        self._actions.append(Local(method, arguments, tuple(reads), tuple(writes), meets))

    def add_to(self, plan: Plan, aliases: Aliases) -> list[Message]:
        """Add all steps to a plan, with receives moved forward; return the messages."""
        found: list[Message] = []
        under_way: list[tuple[Message, Stretch, bool]] = []
        for action in _early(self._actions, aliases):
            needed = [each for each in under_way if _waits(action, *each, aliases)]
            if needed:
                under_way = [each for each in under_way if each not in needed]
                plan.call(Await(tuple(message.number for message, _, _ in needed)))
            action.add_to(plan)
            if isinstance(action, Messages):
                under_way += [(recv, (place, recv.nbytes), True) for recv, place in action.recvs]
                under_way += [(send, (place, send.nbytes), False) for send, place in action.sends]
                found += [message for message, _ in (*action.recvs, *action.sends)]
        return found


def _early(actions: Sequence[Action], aliases: Aliases) -> list[Action]:
    """Return the actions with each receive as early as nothing before it touches its memory."""
    moved: list[Action] = []
    for action in actions:
        if not isinstance(action, Messages):
            moved.append(action)
            continue
        early: dict[int, list[tuple[Receive, Place]]] = {}
        for recv, place in action.recvs:
            position = _earliest(moved, (place, recv.nbytes), aliases)
            early.setdefault(position, []).append((recv, place))
        staying = early.pop(len(moved), [])
        if action.sends or staying:
            moved.append(Messages(action.sends, tuple(staying)))
        for position in sorted(early, reverse=True):
            moved.insert(position, Messages((), tuple(early[position])))
    return moved


def _earliest(actions: Sequence[Action], stretch: Stretch, aliases: Aliases) -> int:
    """Return the position after the last action that has to do with a stretch."""
    end = position = len(actions)
    if not stretch[1]:
        return end
    while position and end - position < _LOOK_BACK:
        action = actions[position - 1]
        if action.meets and _is_shared(stretch):
            break
        if any(aliases.share(stretch, other) for other in (*action.reads, *action.writes)):
            # Behind a message it would have to wait for that one, earlier than is needed.
            return end if isinstance(action, Messages) else position
        position -= 1
    return position


def _waits(action: Action, message: Message, stretch: Stretch, received: bool, aliases: Aliases) -> bool:
    """Whether an action has to wait for a message that was started before it."""
    if not message.nbytes:  # it moves nothing, so it is there for its order
        return received
    if action.meets and _is_shared(stretch):
        return True
    touched = (*action.reads, *action.writes) if received else action.writes
    return any(aliases.share(stretch, other) for other in touched)


def _is_shared(stretch: Stretch) -> bool:
    """Whether other ranks of this host may read or write a stretch."""
    return stretch[0][0] == SLOT
