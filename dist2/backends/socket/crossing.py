"""`CrossingProgram`: runs plans that lend tensors inside a host and exchange messages between hosts.

What lies between two messages or fences of a plan is local work: reads and writes of what other ranks of the
host lend, copies and folds. It is bound once for each set of addresses, the caller's and those that are lent,
to scripts (see `script.py`). With dist2's parts in C a script sends and receives as well, and all between two
fences is one call (see `journey.py`); without, messages are the interpreter's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from dist2.backends.socket.algorithms.schedule import Buffer
from dist2.backends.socket.borrowing import Borrowed, Borrowing
from dist2.backends.socket.executor import Memory, MessageExecutor, Tensors
from dist2.backends.socket.flat import addresses
from dist2.backends.socket.journey import Itinerary, Journey
from dist2.backends.socket.memory import copy_bytes, tensor_at
from dist2.backends.socket.overlap import (
    Action,
    Combine,
    Meet,
    Message,
    Messages,
    Move,
    Needs,
    Place,
    Reach,
)
from dist2.backends.socket.passing import Passing, Ways
from dist2.backends.socket.plan import Plan
from dist2.backends.socket.script import FIXED, Bound, Folding, Script, copying, folding, run_bound
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.operation import Operation

MAX_KEPT = 16
"""For how many sets of addresses a program remembers what to do; where there are more, it starts over."""


@attrs.frozen
class Work:
    """Local work, made ready to run.

    Attributes:
        needs: Messages that must be done before.
        bound: Its steps.
        script: The same in C, where it can be.
    """

    needs: Needs
    bound: tuple[Bound, ...]
    script: Script | None


Stage = Work | Journey | Messages | Meet


class CrossingProgram:
    """A plan that lends, made ready for one signature.

    Args:
        executor: Starts its messages and waits for them.
        borrowing: Of this rank; None where it is alone on its host.
        plan: What to do.
        foldings: How to fold: to a partial result, and to the last one.
    """

    def __init__(
        self,
        executor: MessageExecutor,
        borrowing: Borrowing | None,
        plan: Plan,
        foldings: Sequence[Folding],
    ) -> None:
        self._executor = executor
        self._borrowing = borrowing
        self._plan = plan
        self._foldings = foldings
        ends = [number for number, action in enumerate(plan.actions) if isinstance(action, Meet)]
        first = ends[0] + 1 if ends else 0
        self._before, self._after = plan.actions[:first], plan.actions[first:]
        posted = [action for action in self._before if isinstance(action, Messages)]
        self._posted = Messages((), tuple(recv for action in posted for recv in action.recvs))
        self._travels = not any(action.sends for action in posted)
        self._ways: Ways | None = None
        self._kept: dict[object, tuple[Stage, ...]] = {}

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors; see `MessageExecutor.run`."""
        plan, borrowing = self._plan, self._borrowing
        memories = self._executor.memories_of(plan, inputs, outputs)
        own = tuple([memory.address for memory in memories])
        traffic = self._passing(operation, memories)
        if borrowing is None:
            with traffic:
                self._run(self._stages(own, ()), operation, traffic)
            return
        borrowing.offer(self._offered(inputs, outputs), operation)
        try:
            with traffic:
                self._run(self._bind(self._at_first(), own, ()), operation, traffic)
                borrowing.check(operation)
                borrowed = self._borrow(borrowing, operation)
                self._run(self._stages(own, borrowed), operation, traffic)
                borrowing.check(operation)
        except BaseException as error:
            borrowing.give_up(error)
            raise

    def _offered(self, inputs: Tensors, outputs: Tensors) -> Sequence[int]:
        """Return the addresses that a call lends."""
        plan = self._plan
        lent = outputs if plan.lends is Buffer.OUTPUT else inputs
        return addresses(lent, plan.lent, plan.dtype.itemsize)

    def _borrow(self, borrowing: Borrowing, operation: Operation) -> Sequence[Borrowed]:
        """Return what the plan borrows; all have come to the first fence."""
        return borrowing.borrow(self._plan.borrows)

    def _passing(self, operation: Operation, memories: Sequence[Memory]) -> Passing:
        """Return the messages of a call."""
        endpoint, fingerprint = self._executor.endpoint, operation.signature.fingerprint
        if self._ways is None or self._ways.fingerprint != fingerprint:
            self._ways = Ways(endpoint, self._plan, fingerprint)
            self._kept.clear()  # their steps are those of its messages
        return Passing(endpoint, operation, memories, self._plan.messages, self._ways)

    def _run(self, stages: Sequence[Stage], operation: Operation, traffic: Passing) -> None:
        for stage in stages:
            if isinstance(stage, Journey):
                stage.run(operation, traffic)
                continue
            if stage.needs:
                traffic.wait(stage.needs)
            if isinstance(stage, Work):
                run_bound(stage.bound, stage.script, operation)
            elif isinstance(stage, Messages):
                traffic.start(stage)
            else:
                self._executor.meet(operation, alone=self._rails is not None)

    def _stages(self, own: tuple[int, ...], borrowed: Sequence[Borrowed]) -> tuple[Stage, ...]:
        """Return what to do after the first fence, binding it to these addresses if that is new."""
        key = (own, tuple([each.place for each in borrowed]))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            found = self._with_journeys(own, borrowed)
            if not found:
                posted = () if self._rails is None else (self._posted,)
                found = self._bind((*posted, *self._after), own, borrowed)
            self._kept[key] = found
        return found

    @property
    def _rails(self) -> Rails | None:
        """What scripts send and receive over; None where they do not."""
        return self._ways.rails if self._travels and self._ways is not None else None

    def _at_first(self) -> Sequence[Action]:
        """Return what to do up to the first fence: receives are not posted where scripts receive."""
        if self._rails is None:
            return self._before
        return [action for action in self._before if not isinstance(action, Messages)]

    def _with_journeys(self, own: tuple[int, ...], borrowed: Sequence[Borrowed]) -> tuple[Stage, ...]:
        """Return what to do after the first fence, where all between two fences can be a script."""
        ways, borrowing, rails = self._ways, self._borrowing, self._rails
        if ways is None or borrowing is None or rails is None:
            return ()
        binder = _Binder(self._plan, self._foldings, own, borrowed)
        stages: list[Stage] = []
        rest: list[Action] = [self._posted, *self._after]
        while rest:
            itinerary = Itinerary(rails, ways.lots, binder.address_of, binder.bind)
            while rest and not isinstance(rest[0], Meet):
                itinerary.add(rest.pop(0))
            journey = itinerary.end(borrowing)
            if journey is None:
                return ()
            stages.append(journey)
            if rest:
                rest.pop(0)
                stages.append(Meet())
        return tuple(stages)

    def _bind(
        self, actions: Sequence[Action], own: tuple[int, ...], borrowed: Sequence[Borrowed]
    ) -> tuple[Stage, ...]:
        """Return actions as stages: local work that nothing has to be waited for in between is one."""
        stages: list[Stage] = []
        steps: list[Bound] = []
        needs: Needs = ()

        def complete() -> None:
            # What is waited for counts where nothing is left to do as well, as in a copy to itself.
            if steps or needs:
                script = self._borrowing.script_of(steps) if self._borrowing is not None else None
                stages.append(Work(needs, tuple(steps), script))
                steps.clear()

        binder = _Binder(self._plan, self._foldings, own, borrowed)
        for action in actions:
            if isinstance(action, (Messages, Meet)):
                complete()
                needs = ()
                stages.append(action)
                continue
            if action.needs:
                complete()
                needs = action.needs
            steps += binder.bind(action)
        complete()
        return tuple(stages)


class _Binder:
    """Binds local actions to addresses."""

    def __init__(
        self, plan: Plan, foldings: Sequence[Folding], own: Sequence[int], borrowed: Sequence[Borrowed]
    ) -> None:
        self._dtype = plan.dtype
        self._first_lent = plan.first_lent
        self._foldings = foldings
        self._own = own
        self._borrowed = borrowed

    def bind(self, action: Move | Combine) -> list[Bound]:
        """Return the steps of an action; none where it copies a place to itself."""
        if isinstance(action, Combine):
            return [self._fold(action)]
        if isinstance(action, Reach):
            return self._reach(action)
        dst, src, nbytes = self._at(action.dst), self._at(action.src), action.dst.nbytes
        if dst == src:  # the caller's input is its output
            return []
        return [copying(lambda operation: copy_bytes(dst, src, nbytes), (FIXED, dst), (FIXED, src), nbytes)]

    def address_of(self, message: Message) -> int:
        """Return where a message lies."""
        return self._at(message.place)

    def _at(self, place: Place) -> int:
        return self._own[place.memory] + place.start

    def _reach(self, action: Reach) -> list[Bound]:
        dst, src = action.dst, action.src
        if dst.memory >= self._first_lent:
            theirs = self._borrowed[dst.memory - self._first_lent]
            return theirs.put(dst.start, self._at(src), dst.nbytes)
        return self._borrowed[src.memory - self._first_lent].fetch(src.start, self._at(dst), dst.nbytes)

    def _fold(self, action: Combine) -> Bound:
        fold = self._foldings[action.final]
        nbytes = action.dst.nbytes
        numel = nbytes // self._dtype.itemsize
        places = [self._at(src) for src in action.srcs]
        target = tensor_at(self._at(action.dst), self._dtype, numel)
        views = [tensor_at(place, self._dtype, numel) for place in places]
        function: Callable[[torch.Tensor, Sequence[torch.Tensor]], None] = fold.function
        return folding(
            lambda operation: function(target, views),
            fold,
            (FIXED, self._at(action.dst)),
            [(FIXED, place) for place in places],
            nbytes,
            numel,
        )
