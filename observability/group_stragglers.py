"""The rank that arrives late, found by a collective call: for programs without control planes.

The entry times of all ranks travel through the group itself, from the flight recorders to its first rank.

Clocks. Where ranks read different monotonic clocks, their offsets come from rounds of an `all_gather` of the
time at which each rank calls it. No rank calls a round before all have called the one before, and none leaves
a round before all have called it: so another rank's time lies between the call of the round before and the
end of this one on the own clock, which is a sample as in `observability.clocks`.
"""

from __future__ import annotations

from time import monotonic_ns

from dist2 import ProcessGroup
from dist2.errors import InvalidUsageError
from dist2.operation.instruments import dispatch
from observability.clocks import ClockOffset, clock_id
from observability.entries import Entries, document_of
from observability.flight_recorder import global_rank, instrument
from observability.stragglers import Ledger

CLOCK_ROUNDS = 5


def slowest_in(pg: ProcessGroup) -> int | None:
    """Return the rank in the job that costs the ranks of a group most; see `observability.slowest_rank`.

    All ranks of the group must call it. All get the same answer.

    Raises:
        InvalidUsageError: This process does not record operations.
    """
    if instrument not in dispatch.instruments:
        raise InvalidUsageError("the flight recorder of this process is off: unset DIST2_INSTRUMENTS")
    mine = document_of(instrument, global_rank(pg.info))
    clocks = clocks_of(pg)
    documents = pg.gather_object(mine)
    slowest: int | None = None
    if documents is not None:
        ledger = Ledger()
        for document, clock in zip(documents, clocks, strict=True):
            offset = clock.at(monotonic_ns())
            assert offset is not None  # there is a sample
            ledger.take(document["rank"], map(Entries.of, document["groups"]), offset, document["process"])
        slowest = next((each.rank for each in ledger.close()), None)
    answer: int | None = pg.broadcast_object(slowest)
    return answer


def clocks_of(pg: ProcessGroup) -> list[ClockOffset]:
    """Measure how far the clocks of the ranks of a group are off; all ranks of it must call it."""
    clocks = [ClockOffset() for _ in range(pg.size())]
    before_ns = monotonic_ns()
    pg.barrier()
    for _ in range(CLOCK_ROUNDS):
        called_ns = monotonic_ns()
        told = pg.all_gather_object([called_ns, clock_id()])
        received_ns = monotonic_ns()
        for clock, (there_ns, its_clock) in zip(clocks, told, strict=True):
            clock.add(before_ns, there_ns, received_ns, its_clock)
        before_ns = called_ns
        if {its_clock for _, its_clock in told} == {clock_id()} != {""}:
            break  # one clock
    return clocks
