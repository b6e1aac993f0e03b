"""`CrossingExchange`: a `CrossingProgram` for `all_to_all`, where each rank knows its own sizes only."""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.borrowing import Borrowed, Borrowing
from dist2.backends.socket.crossing import CrossingProgram
from dist2.backends.socket.executor import MessageExecutor, Tensors
from dist2.backends.socket.layout import Layout, addresses
from dist2.backends.socket.plan import Plan
from dist2.errors import MismatchError
from dist2.operation.record import Operation


class CrossingExchange(CrossingProgram):
    """A plan of an `all_to_all` that exposes memory, prepared for one signature.

    A rank exposes only the parts for other ranks of its host, and publishes start and end of each: so a
    reader with another size detects it. From other hosts the messages show it.

    Args:
        executor: Starts its messages and waits for them.
        borrowing: Of this rank; None where it is alone on its host.
        plan: The plan to run.
        layout: How the tensors are cut into parts.
        rank: The caller's group rank.
        beside: The ranks of this host.
    """

    def __init__(
        self,
        executor: MessageExecutor,
        borrowing: Borrowing | None,
        plan: Plan,
        layout: Layout,
        rank: int,
        beside: Sequence[int],
    ) -> None:
        super().__init__(executor, borrowing, plan, ())
        self._rank = rank
        self._beside = beside
        self._itemsize = layout.dtype.itemsize
        self._inputs = layout.inputs
        self._received = {each: layout.outputs.numels[each] for each in beside if each != rank}
        place = 2 * beside.index(rank) if beside else 0
        self._wanted = [(each, place + end) for each in self._received for end in (0, 1)]

    def _offered(self, inputs: Tensors, outputs: Tensors) -> Sequence[int]:
        starts, numels = addresses(inputs, self._inputs, self._itemsize), self._inputs.numels
        bounds = ((starts[each], starts[each] + numels[each] * self._itemsize) for each in self._beside)
        return [address for pair in bounds for address in pair]

    def _borrow(self, borrowing: Borrowing, operation: Operation) -> Sequence[Borrowed]:
        found = borrowing.borrow(self._wanted)
        starts = {}
        for start, end in zip(found[::2], found[1::2], strict=True):
            sent, received = (end.address - start.address) // self._itemsize, self._received[start.owner]
            if sent != received:
                self._executor.endpoint.disagree(operation.seq)  # the other hosts would wait for this one
                names = operation.signature.group.names
                sender, receiver = names([start.owner]), names([self._rank])
                raise MismatchError(
                    f"{sender} sends {sent} elements to {receiver} that expects {received}",
                    expected=f"{received} elements",
                    actual={start.owner: f"{sent} elements"},
                )
            starts[start.owner] = start
        return [starts[owner] for owner, _ in self._plan.borrows]
