"""Measures contenders side by side, one case after the other, round by round in turn, and compares them.

A round runs an operation in a loop of about `Plan.round_s` on all ranks at once, after they have met; its
time is that of the slowest rank, per call. The report has the median over rounds. Results are
checked first. While one crew is measured the others sleep.

Buffers are *fresh* by default: the ranks rewrite their input before each call, as programs do. A library
that has one rank read another's memory has copies of *hot* buffers, which nobody changes, in its caches from
the last call. *Cold* buffers are in no cache: other memory was read before each call. Fresh and cold calls
are timed one by one, after a barrier.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from dist2.cli.bench.crew import Crew, CrewError
from dist2.cli.bench.neighbours import Neighbours, Patience, free_memory
from dist2.cli.bench.peers import Peer, launcher, starts_itself
from dist2.cli.bench.workloads import FRESH, SEND_RECV, Case
from dist2.runtime.config import environment_value
from dist2.runtime.deadline import FOREVER_NS, remaining_s

MAX_CALLS = 2000
WARM_UP_CALLS = 20
MAX_TRIALS = 6


@attrs.frozen
class Plan:
    """How it is measured.

    Attributes:
        world_size: Number of ranks of each contender.
        rounds: Number of rounds of each contender and case; the median counts.
        round_s: Length of a round, in seconds; at least one call is made.
        patience: When to measure a case again.
        own_sessions: Give each rank of a crew without MPI a session, not one for all.
        buffers: One of `BUFFERS`.
    """

    world_size: int
    rounds: int = 7
    round_s: float = 0.02
    patience: Patience = attrs.field(factory=Patience)
    own_sessions: bool = False
    buffers: str = FRESH


@attrs.frozen
class Measurement:
    """One contender's times for one case.

    Attributes:
        case: The case.
        contender: Name of the contender.
        rounds_s: Seconds a call, one number a round; for `SEND_RECV` half of a round trip.
        failure: The reason if there are none.
        foreign_cores: Number of cores that other processes kept busy meanwhile.
    """

    case: Case
    contender: str
    rounds_s: tuple[float, ...] = ()
    failure: str | None = None
    foreign_cores: float = 0.0

    @property
    def median_s(self) -> float | None:
        """The figure that is reported."""
        return statistics.median(self.rounds_s) if self.rounds_s else None


class Contest:
    """Crews of all contenders, in step. A context manager: leaving it ends their processes.

    Args:
        peers: The contenders, in the order in which they take turns.
        plan: How to measure.
        until_ns: Monotonic nanosecond after which no case is repeated, and a case ends with the round that
            it is in.
    """

    def __init__(self, peers: Sequence[Peer], plan: Plan, until_ns: int = FOREVER_NS) -> None:
        self._peers = list(peers)
        self._plan = plan
        self._until_ns = until_ns
        self._crews: dict[str, Crew] = {}
        self._failures: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Contest:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dist2-bench-")))
            for name in dict.fromkeys(peer.crew for peer in self._peers):
                members = [peer for peer in self._peers if peer.crew == name]
                try:
                    self._crews[name] = stack.enter_context(self._started(members, folder))
                except CrewError as error:
                    self._failures |= {peer.name: str(error) for peer in members}
            self._stack = stack.pop_all()
        return self

    def _started(self, peers: Sequence[Peer], folder: Path) -> Crew:
        if starts_itself(peers[0]):
            return Crew(peers, self._plan.world_size, folder, own_sessions=self._plan.own_sessions)
        start = launcher(peers[0], environment_value("LD_LIBRARY_PATH"))
        if start is None:
            raise CrewError(f"{peers[0].title} is not here: {peers[0].install}")
        return Crew(peers, self._plan.world_size, folder, start)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, case: Case, only: Sequence[Peer] | None = None) -> list[Measurement]:
        """Return a measurement of every contender, repeated as far as patience goes.

        Args:
            case: The operation, dtype and size.
            only: Some of the contenders; by default all.
        """
        patience, peers = self._plan.patience, self._peers if only is None else only
        lack = self._lack(case, peers)
        if lack is not None:
            return [Measurement(case, peer.name, failure=lack) for peer in peers]
        best = self._measure(case, peers)
        for _ in range(patience.retries):
            if best[0].foreign_cores <= patience.foreign_cores or not remaining_s(self._until_ns):
                break
            time.sleep(patience.pause_s)
            best = min(best, self._measure(case, peers), key=lambda found: found[0].foreign_cores)
        return best

    def _lack(self, case: Case, peers: Sequence[Peer]) -> str | None:
        """Return the lack of memory, in words, if the tensors of all crews and as many copies do not fit."""
        crews = len({peer.crew for peer in peers})
        needed, free = 2 * crews * case.footprint(self._plan.world_size), free_memory()
        if free is None or needed <= free:
            return None
        return f"left out: it may take {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"

    def _measure(self, case: Case, peers: Sequence[Peer]) -> list[Measurement]:
        for crew in dict.fromkeys(peer.crew for peer in peers):
            self._tell(crew, "prepare", case.op, case.nbytes, case.shared)
        complaints = {peer.name: self._verified(peer) for peer in peers}
        counts = {peer: self._calls_a_round(peer) for peer in peers if complaints[peer.name] is None}
        neighbours = Neighbours(self._own_s)
        times: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for _ in range(self._plan.rounds):
            for peer, calls in counts.items():
                times[peer.name] += self._round(peer, calls)
            if not remaining_s(self._until_ns):
                break
        foreign = neighbours.cores()
        messages = 2 if case.op == SEND_RECV else 1
        found = []
        for name, taken in times.items():
            failure = self._failures.get(name) or complaints[name]
            rounds = () if failure else tuple(each / messages for each in taken)
            found.append(Measurement(case, name, rounds, failure, foreign))
        return found

    def _verified(self, peer: Peer) -> str | None:
        """Return the error in a contender's results; None if they are right."""
        answers = self._tell(peer.crew, "verify", peer.name)
        if answers is None:
            return self._failures[peer.name]
        return next((each for each in answers if each is not None), None)

    def _calls_a_round(self, peer: Peer) -> int:
        """Return how many calls fill a round.

        The first calls of a round are slower: their code and data have left the caches meanwhile, and ranks
        arrive at different times. The very first ones make plans as well. So the number is tried until it
        stops growing: equally fast contenders must have equally many slow calls in a round.
        """
        calls, settled = 1, 0
        for _ in range(MAX_TRIALS):
            took = self._round(peer, calls)
            enough = MAX_CALLS if calls > 1 else WARM_UP_CALLS
            fill = max(1, min(enough, int(self._plan.round_s / took[0]))) if took else 1
            settled = settled + 1 if fill <= calls else 0
            if settled == 2:
                break
            calls = max(calls, fill)
        return calls

    def _round(self, peer: Peer, calls: int) -> list[float]:
        """Return the seconds a call took on the slowest rank; nothing if the crew is lost."""
        took = self._tell(peer.crew, "run", peer.name, calls, self._plan.buffers)
        return [max(took) / calls] if took is not None else []

    def _tell(self, crew: str, command: str, *arguments: object) -> list[Any] | None:
        """Have a crew do something; return None if it is lost. The others go on without it."""
        if crew not in self._crews:
            return None
        try:
            return self._crews[crew].tell(command, *arguments)
        except CrewError as error:
            lost = self._crews.pop(crew)
            lost.kill()
            self._failures |= {peer.name: str(error) for peer in lost.peers}
            return None

    def _own_s(self) -> float:
        """Return the processor seconds of the contenders and this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        ranks = sum(sum(self._tell(name, "usage") or ()) for name in list(self._crews))
        return used.ru_utime + used.ru_stime + float(ranks)


@attrs.frozen
class Comparison:
    """The measurements of all contenders for one case, compared with one of them.

    Attributes:
        case: The case.
        by_name: Contender to its measurement.
        subject: The contender that is compared with the others.
        world_size: Number of ranks.
    """

    case: Case
    by_name: dict[str, Measurement]
    subject: str
    world_size: int

    @property
    def own(self) -> Measurement:
        """The subject's measurement."""
        return self.by_name[self.subject]

    def ratio(self, peer: str) -> float | None:
        """Return how many times faster the subject is than a peer; None if either has no figure."""
        mine, theirs = self.own.median_s, self.by_name[peer].median_s
        return theirs / mine if mine and theirs else None

    def algorithm_bandwidth(self, name: str) -> float | None:
        """Return bytes a second as the caller sees them: payload by time."""
        took = self.by_name[name].median_s
        return self.case.nbytes / took if took and self.case.nbytes else None

    def bus_bandwidth(self, name: str) -> float | None:
        """Return the bytes per second that each rank must move at least, with any algorithm."""
        bandwidth = self.algorithm_bandwidth(name)
        return bandwidth * self.case.bus_factor(self.world_size) if bandwidth else None


def compare(measurements: Iterable[Measurement], subject: str, world_size: int) -> list[Comparison]:
    """Group measurements by case, in their order."""
    cases: dict[Case, dict[str, Measurement]] = {}
    for each in measurements:
        cases.setdefault(each.case, {})[each.contender] = each
    return [Comparison(case, by_name, subject, world_size) for case, by_name in cases.items()]
