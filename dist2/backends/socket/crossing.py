"""`CrossingProgram`: runs plans that expose tensors inside a host and exchange messages between hosts.

The steps between two messages or fences of a plan are local work: reads and writes of memory that other ranks
of the host expose, copies and folds. A script does local work and messages: everything between two fences is
one call, for any tensors (see `journey.py`). Where a script cannot go on, Python sends and receives, and
local work is bound once for each set of addresses, the caller's and the exposed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from dist2.backends.socket import borrowing as borrowed_memory
from dist2.backends.socket.algorithms.schedule import Buffer
from dist2.backends.socket.borrowing import Borrowed, Borrowing, Kinds, Looks
from dist2.backends.socket.bound_steps import Bound, copying, folding
from dist2.backends.socket.executor import Memory, MessageExecutor, Tensors
from dist2.backends.socket.host import Script
from dist2.backends.socket.journey import Bind, Itinerary, Journey, Local
from dist2.backends.socket.layout import addresses
from dist2.backends.socket.lowering import TENSOR
from dist2.backends.socket.memory import copy_bytes, tensor_at
from dist2.backends.socket.overlap import (
    Action,
    Combine,
    Meet,
    Messages,
    Needs,
    Place,
    Reach,
)
from dist2.backends.socket.passing import Passing, Ways
from dist2.backends.socket.plan import Plan
from dist2.backends.socket.reduction import Folding
from dist2.backends.socket.transport.messages.rails import Rails
from dist2.operation.record import Operation
from dist2.runtime.cache import keep

MAX_KEPT = 16
"""Number of bindings, by addresses, that a program caches for Python; if there are more, the cache is
cleared. Scripts do not depend on addresses."""


@attrs.frozen
class Work:
    """Local work, made ready to run.

    Attributes:
        needs: Messages that must be done before.
        steps: Of which work each step is, and which step of it.
        looks: How many steps of the script come before these: see `Borrowing.looks`.
        script: The same in C, where it can be.
    """

    needs: Needs
    steps: tuple[tuple[Local, int], ...]
    looks: int
    script: Script | None

    def run(self, operation: Operation, tensors: Tensors, bind: Bind) -> None:
        """Do it; see `Journey.run`."""
        at, count = 0, self.looks + len(self.steps)
        while at < count:
            if self.script is not None:
                at = self.script.run_from(operation, (), tensors, at)
                if at == count:
                    return
            work, number = self.steps[at - self.looks]
            bind(work)[number].action(operation)
            at += 1


Stage = Work | Journey | Messages | Meet


class CrossingProgram:
    """A plan that exposes memory, prepared for one signature.

    Args:
        executor: Starts its messages and waits for them.
        borrowing: Of this rank; None where it is alone on its host.
        plan: The plan to run.
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
        self._first: tuple[Stage, ...] | None = None
        self._stages: dict[Kinds | None, tuple[Stage, ...]] = {}  # by the kinds of access to exposed memory
        self._binders: dict[object, Binder] = {}  # by where the tensors of calls lie

    def __call__(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """Run on contiguous tensors; see `MessageExecutor.run`."""
        borrowing = self._borrowing
        memories = self._executor.memories_of(self._plan, inputs, outputs)
        traffic = self._passing(operation, memories)
        if borrowing is None:
            with traffic:
                self._run(self._behind(memories, ()), operation, traffic, memories)
            return
        borrowing.offer(self._offered(inputs, outputs), operation)
        try:
            with traffic:
                self._run(self._at_first(memories), operation, traffic, memories)
                borrowing.check(operation)
                borrowed = self._borrow(borrowing, operation)
                self._run(self._behind(memories, borrowed), operation, traffic, memories, borrowed)
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
        """Return the memory that the plan accesses; all members are at the first fence."""
        return borrowing.borrow(self._plan.borrows)

    def _passing(self, operation: Operation, memories: Sequence[Memory]) -> Passing:
        """Return the messages of a call."""
        endpoint, fingerprint = self._executor.endpoint, operation.signature.fingerprint
        if self._ways is None or self._ways.fingerprint != fingerprint:
            self._ways = Ways(endpoint, self._plan, fingerprint)
            self._first = None  # stages are those of its messages
            self._stages.clear()
        return Passing(endpoint, operation, memories, self._plan.messages, self._ways)

    def _run(
        self,
        stages: Sequence[Stage],
        operation: Operation,
        traffic: Passing,
        memories: Sequence[Memory],
        borrowed: Sequence[Borrowed] = (),
    ) -> None:
        tensors = [memory.tensor for memory in memories]

        def bind(work: Local) -> Sequence[Bound]:
            return self._binder(memories, borrowed).bind(work)

        for stage in stages:
            if isinstance(stage, Journey):
                stage.run(operation, traffic, tensors, bind)
                continue
            if stage.needs:
                traffic.wait(stage.needs)
            if isinstance(stage, Work):
                stage.run(operation, tensors, bind)
            elif isinstance(stage, Messages):
                traffic.start(stage)
            else:
                self._executor.meet(operation, alone=self._rails is not None)

    def _at_first(self, memories: Sequence[Memory]) -> tuple[Stage, ...]:
        """Return the steps up to the first fence: receives are not posted where scripts receive."""
        if self._first is None:
            actions = self._before
            if self._rails is not None:
                actions = tuple([each for each in actions if not isinstance(each, Messages)])
            self._first = self._by_stages(actions, self._binder(memories, ()), [])
        return self._first

    def _behind(self, memories: Sequence[Memory], borrowed: Sequence[Borrowed]) -> tuple[Stage, ...]:
        """Return the steps after the first fence."""
        borrowing, rails = self._borrowing, self._rails
        kinds = None if borrowing is None else borrowing.kinds()
        found = self._stages.get(kinds)
        if found is None:
            binder = self._binder(memories, borrowed)
            looks: Looks = [] if borrowing is None else borrowing.looks()
            found = self._by_journeys(binder, looks)
            if not found:
                posted = () if rails is None else (self._posted,)
                found = self._by_stages((*posted, *self._after), binder, looks)
            keep(self._stages, kinds, found, MAX_KEPT)
        return found

    def _binder(self, memories: Sequence[Memory], borrowed: Sequence[Borrowed]) -> Binder:
        """Return a callable that binds local work to the tensors of a call."""
        own = tuple([memory.address for memory in memories])
        key = own, tuple([each.place for each in borrowed])
        found = self._binders.get(key)
        if found is None:
            found = keep(self._binders, key, Binder(self._plan, self._foldings, own, borrowed), MAX_KEPT)
        return found

    @property
    def _rails(self) -> Rails | None:
        """The rails of scripts; None without any."""
        return self._ways.rails if self._travels and self._ways is not None else None

    def _by_journeys(self, binder: Binder, looks: Looks) -> tuple[Stage, ...]:
        """Return the steps after the first fence, where all between two fences can be a script."""
        ways, borrowing, rails = self._ways, self._borrowing, self._rails
        if ways is None or borrowing is None or rails is None:
            return ()
        stages: list[Stage] = []
        rest: list[Action] = [self._posted, *self._after]
        while rest:
            itinerary = Itinerary(rails, ways.lots, binder.bind, looks)
            while rest and not isinstance(rest[0], Meet):
                itinerary.add(rest.pop(0))
            journey = itinerary.end(borrowing, binder.tensors)
            if journey is None:
                return ()
            stages.append(journey)
            if rest:
                rest.pop(0)
                stages.append(Meet())
        return tuple(stages)

    def _by_stages(self, actions: Sequence[Action], binder: Binder, looks: Looks) -> tuple[Stage, ...]:
        """Return actions as stages: local work that nothing has to be waited for in between is one."""
        stages: list[Stage] = []
        works: list[Local] = []
        needs: Needs = ()

        def complete() -> None:
            # A wait counts also if there is nothing left to do, as in a copy to itself.
            if works or needs:
                stages.append(self._work(needs, works, binder, looks))
                works.clear()

        for action in actions:
            if isinstance(action, (Messages, Meet)):
                complete()
                needs = ()
                stages.append(action)
                continue
            if action.needs:
                complete()
                needs = action.needs
            works.append(action)
        complete()
        return tuple(stages)

    def _work(self, needs: Needs, works: Sequence[Local], binder: Binder, looks: Looks) -> Work:
        """Return local work with its script."""
        bound = [(work, number, step) for work in works for number, step in enumerate(binder.bind(work))]
        steps = tuple([(work, number) for work, number, _ in bound])
        script = None
        if self._borrowing is not None:
            script = self._borrowing.script_of([*looks, *(step for _, _, step in bound)], binder.tensors)
        return Work(needs, steps, 0 if script is None else len(looks), script)


class Binder:
    """Binds local work to the tensors of some calls, and to memory that other ranks expose.

    Attributes:
        tensors: How many a call has.

    Args:
        plan: Whose work.
        foldings: How to fold: to a partial result, and to the last one.
        own: Where the tensors lie.
        borrowed: The memory that others expose.
    """

    def __init__(
        self, plan: Plan, foldings: Sequence[Folding], own: Sequence[int], borrowed: Sequence[Borrowed]
    ) -> None:
        self.tensors = len(own)
        self._dtype = plan.dtype
        self._first_lent = plan.first_lent
        self._foldings = foldings
        self._own = own
        self._borrowed = borrowed
        self._bound: dict[Local, Sequence[Bound]] = {}

    def bind(self, work: Local) -> Sequence[Bound]:
        """Return the steps of some work."""
        found = self._bound.get(work)
        if found is None:
            found = self._bound[work] = self._steps(work)
        return found

    def _steps(self, work: Local) -> Sequence[Bound]:
        if isinstance(work, Combine):
            return [self._fold(work)]
        if isinstance(work, Reach):
            return self._reach(work)
        dst, src, nbytes = self._at(work.dst), self._at(work.src), work.dst.nbytes
        copy = partial(_copy, dst.address, src.address, nbytes)
        return [copying(copy, dst.any_call, src.any_call, nbytes)]

    def _at(self, place: Place) -> borrowed_memory.Place:
        any_call = (TENSOR, place.memory, place.start)
        return borrowed_memory.Place(self._own[place.memory] + place.start, any_call)

    def _reach(self, work: Reach) -> list[Bound]:
        dst, src = work.dst, work.src
        return self._borrowed[src.memory - self._first_lent].fetch(src.start, self._at(dst), dst.nbytes)

    def _fold(self, work: Combine) -> Bound:
        fold = self._foldings[work.final]
        numel = work.dst.nbytes // self._dtype.itemsize
        dst, *srcs = map(self._at, (work.dst, *work.srcs))
        target, *views = [tensor_at(each.address, self._dtype, numel) for each in (dst, *srcs)]
        function: Callable[[torch.Tensor, Sequence[torch.Tensor]], None] = fold.function
        return folding(
            lambda operation: function(target, views),
            fold,
            self._dtype,
            dst.any_call,
            [src.any_call for src in srcs],
            numel,
        )


def _copy(dst: int, src: int, nbytes: int, operation: Operation) -> None:
    if dst != src:  # else the caller's input is its output
        copy_bytes(dst, src, nbytes)
