"""Notices within seconds that an operation of this rank waits, and finds out for which ranks.

A thread looks at the operations in flight each two seconds; that copies one set. A look takes 0.06 ms in a
loop, and nine times as much after a pause, in which other programs have used the caches. Only where an
operation is older than the limit, it asks the *hub*, the first rank of the job that answers, which rank is
missing. The hub gathers once for all ranks that ask within the same time, and tells the missing ranks. The
more ranks there are, the more seldom each asks, so that the hub is asked at most about `ASKS_A_SECOND`
times a second.

Overload. Ranks that share few cores answer late, and if each then asked all others, none would answer in
time again. So a hub that is alive but late is not replaced at once, and a rank pauses after an answer that
took long; if it had to ask all ranks itself, it pauses as if all ranks did the same.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterable, Iterator
from urllib.error import URLError

import attrs
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dist2.errors import Dist2Error
from dist2.operation.record import Operation
from observability.client import Asker
from observability.flight_recorder import global_rank
from observability.job.answer import RANK_S
from observability.job.diagnosis import DIST2S
from observability.job.directory import hubs_of
from observability.job.foreign_stacks import memory
from observability.job.member import Member, entry_of
from observability.job.state import where_of
from observability.job.verdict import Key, Waiting, waiting_in
from observability.job.waiting_log import WaitingLog
from observability.metrics import OTHER

ASKS_A_SECOND = 200
REST = 4.0
"""The pause after an answer is at least so many times the time that it took."""
QUIET = 3.0
"""A wait is over if no rank has asked for so many times the time after which each asks again."""
SILENT_S = 30.0
"""How long a hub that did not answer is not asked again."""
KEEPS_ALL = 256
"""In jobs of up to so many ranks each reads the directory in advance, in larger ones the first `FIRST`; the
others read only which the hubs are."""
FIRST = 32
MAX_LABELLED = 16
"""Missing ranks of an operation that have series of their own, culprits first."""

log = logging.getLogger("dist2.waiting")

Found = tuple[tuple[Waiting, ...], frozenset[int]]
"""The operations of the job that wait, and the culprits."""


@attrs.frozen(eq=False)
class Wait:
    """An operation of this rank that waits.

    Attributes:
        operation: Which one.
        key: The same, as other ranks know it.
        found: Which ranks it waits for; None while that is not known.
    """

    operation: Operation
    key: Key
    found: Waiting | None

    def age_s(self, now_ns: int) -> float:
        """Return for how long it has been in flight."""
        return (now_ns - self.operation.created_ns) / 1e9

    def sentence(self, now_ns: int) -> str:
        """Say which ranks it waits for."""
        age_s = self.age_s(now_ns)
        if self.found is not None:
            return self.found.sentence(age_s)
        signature = self.operation.signature
        title = f"{signature.kind.value} #{self.operation.seq} of group {signature.group.name}"
        return f"{title} waits for other ranks for {age_s:.1f} s; which ones is not known yet"


class Watch:
    """Looks for operations of a rank that wait.

    Args:
        member: The rank.
        url: Of its control plane.
        after_s: How long an operation may take.

    Attributes:
        after_s: How long an operation may take.
        waits: The operations that take longer.
        culprits: The ranks that hold up the job, as the latest diagnosis has found out.
    """

    def __init__(self, member: Member, url: str, after_s: float, asker: Asker | None = None) -> None:
        self.after_s = after_s
        self.waits: tuple[Wait, ...] = ()
        self.culprits: frozenset[int] = frozenset()
        self._member = member
        self._url = url
        self._asker = asker or Asker()
        self._tick_s = min(max(after_s / 2.5, 0.02), 2.0)
        self._ends = threading.Event()
        self._published = False
        self._next_read = time.monotonic()
        self._read_every_s = self._tick_s
        self._next_ask = 0.0
        self._silent: dict[int, float] = {}
        self._late_hub: int | None = None
        self._logged: set[Key] = set()
        self._waiting_log = WaitingLog(QUIET * max(after_s, self._spread_s()) + RANK_S, 1 + REST)
        member.waiting_log = self._waiting_log
        self._thread = threading.Thread(target=self._run, name="dist2-job-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that is inside a request ends by itself, with it."""
        self._ends.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(RANK_S * 2)
        self.tell_end()

    def tell_end(self) -> None:
        """Log that the job went on, if this rank has told of a wait that is over by now."""
        self._waiting_log.close(self._member.rank, self._completed)

    def _completed(self) -> dict[str, int]:
        """Return the number of the last collective of each group, by its uid; of none if one has failed."""
        state = self._member.witness.state()
        if state["failures"]:
            return {}
        last = {uid: group["recent"][0] for uid, group in state["groups"].items() if group["recent"]}
        return {uid: each["seq"] - (each["state"] != "completed") for uid, each in last.items()}

    def _run(self) -> None:
        while True:
            try:
                self._meet()
                self.look()
            except Exception:  # the watch must outlive a single failure
                log.exception("the watch for waiting operations failed; it goes on")
            if self._ends.wait(self._tick_s):
                return

    # The directory

    def _meet(self) -> None:
        """Enter this rank's address as soon as there is a group, and learn those of others in advance."""
        member = self._member
        if member.info() is None:
            return
        try:
            if not self._published:
                hubs = hubs_of(member.world())
                member.directory.publish(entry_of(member.rank, self._url), member.rank in hubs)
                self._published = True
            world = member.world()
            keeps_all = len(world) <= KEEPS_ALL or member.rank in world[:FIRST]
            wanted = world if keeps_all else hubs_of(world)
            incomplete = any(rank not in member.directory.entries for rank in wanted)
            if incomplete and time.monotonic() >= self._next_read:
                member.refresh(only_hubs=not keeps_all)
                self._next_read = time.monotonic() + self._read_every_s
                self._read_every_s = min(self._read_every_s * 2, 60.0)
        except (Dist2Error, RuntimeError) as error:  # the store is gone, or slow: later, perhaps
            log.debug("the directory of the job cannot be used: %s", error)
            self._next_read = time.monotonic() + 10.0

    # Operations that wait

    def look(self) -> None:
        """Look once."""
        now_ns = time.monotonic_ns()
        main, in_flight = self._member.witness.look(), self._member.witness.in_flight()
        memory.note(main["place"])
        old = [each for each in in_flight if now_ns - each.created_ns >= self.after_s * 1e9]
        in_other_call = str(main["inside"]).startswith(DIST2S) and not in_flight
        if not old and not (in_other_call and main["for_s"] >= self.after_s):
            self._all_went_on()
            self._waiting_log.look(self._member.rank)
            return
        known = {wait.operation: wait.found for wait in self.waits}
        self.waits = tuple(Wait(each, self._key(each), known.get(each)) for each in old)
        if not old or any(wait.found is None for wait in self.waits) or time.monotonic() >= self._next_ask:
            self._find_out()

    def _all_went_on(self) -> None:
        if self.waits:
            log.info("rank %d: no operation waits any more", self._member.rank)
        self.waits, self.culprits = (), frozenset()
        self._logged.clear()
        self._next_ask = time.monotonic() + self._spread_s() * random.random()  # not all ranks at once

    def _spread_s(self) -> float:
        """Return the time within which all ranks together may ask once."""
        return len(self._member.world()) / ASKS_A_SECOND

    def _key(self, operation: Operation) -> Key:
        signature = operation.signature
        is_p2p = signature.kind.is_p2p
        return signature.group.uid, operation.seq, is_p2p, global_rank(signature.group) if is_p2p else -1

    def _find_out(self) -> None:
        if time.monotonic() < self._next_ask:
            return
        self._next_ask = time.monotonic() + max(self.after_s, self._spread_s())
        answer = self._ask()
        if answer is None:
            return
        waiting, self.culprits = answer
        found = {each.key: each for each in waiting}
        self.waits = tuple(attrs.evolve(wait, found=found.get(wait.key, wait.found)) for wait in self.waits)
        for wait in self.waits:
            if wait.found is not None and wait.key not in self._logged:
                self._logged.add(wait.key)
                self._log(wait)

    def _ask(self) -> Found | None:
        """Return what the first rank that answers has found out; None without an answer."""
        member, began = self._member, time.monotonic()
        for rank in self._hubs():
            if self._ends.is_set():
                return None
            if rank == member.rank:
                break
            try:
                found = self._ask_hub(rank)
            except (OSError, Dist2Error, ValueError, KeyError, TypeError) as error:
                if hasattr(error, "close"):
                    error.close()
                self._silent[rank] = time.monotonic()
                log.debug("rank %d gives no diagnosis: %s", rank, error)
            else:
                self._rest(began, 1)
                return found
        diagnosis = member.waiting(self.after_s / 2, self._asked_after_s)
        self._rest(began, len(member.world()) / REST)
        return diagnosis.waiting, frozenset(diagnosis.culprits)

    def _ask_hub(self, rank: int) -> Found | None:
        """Return what a rank has found out; None if it is alive, but late for the first time."""
        url, token = self._member.directory.entries[rank].url, self._member.token
        self._asker.ask(f"{url}/livez", token, timeout_s=RANK_S)
        body = {"max_age_s": self.after_s / 2, "after_s": self._asked_after_s}
        try:
            text = self._asker.ask(f"{url}/job/waiting", token, body=body, timeout_s=4 * RANK_S)
        except URLError as error:
            if not isinstance(error.reason, TimeoutError) or self._late_hub == rank:
                raise
            self._late_hub = rank
            return None
        self._late_hub = None
        document = json.loads(text)
        return waiting_in(document), frozenset(map(int, document["culprits"]))

    def _rest(self, began: float, times: float) -> None:
        """Ask no more for a while after an answer that took long."""
        now = time.monotonic()
        self._next_ask = max(self._next_ask, now + REST * times * (now - began))

    @property
    def _asked_after_s(self) -> float:
        """A rank that arrived a little later waits as well."""
        return self.after_s / 2

    def _hubs(self) -> list[int]:
        """Return the ranks to ask, without those that were silent a while ago."""
        now = time.monotonic()
        known = sorted({*self._member.directory.entries, self._member.rank})
        return [rank for rank in hubs_of(known) if now - self._silent.get(rank, -SILENT_S) >= SILENT_S]

    def _log(self, wait: Wait) -> None:
        assert wait.found is not None
        now_ns, operation = time.monotonic_ns(), wait.operation
        signature = operation.signature
        log.info(
            "rank %d: %s",
            *(self._member.rank, wait.sentence(now_ns)),
            extra={
                "rank": self._member.rank,
                "group": signature.group.name,
                "op": signature.kind.value,
                "seq": operation.seq,
                "where": where_of(operation),
                "missing": [each.rank for each in wait.found.missing],
                "waited_s": wait.age_s(now_ns),
            },
        )


class WaitingCollector(Collector):
    """Gives Prometheus the operations that wait: nothing where none does.

    Args:
        watch: Finds them.
        member: Knows the labels of groups.
    """

    def __init__(self, watch: Watch, member: Member) -> None:
        self._watch = watch
        self._member = member

    def describe(self) -> Iterable[Metric]:
        """Return no names, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the family as it is now."""
        family = GaugeMetricFamily(
            "dist2_waiting_seconds",
            "How long an operation of this rank has waited for another rank.",
            labels=("group", "op", "missing_rank", "culprit"),
        )
        longest: dict[tuple[str, str, str, str], float] = {}
        culprits = {str(rank) for rank in self._watch.culprits}
        now_ns = time.monotonic_ns()
        for wait in self._watch.waits:
            signature = wait.operation.signature
            group = self._member.label_of(signature.group)
            missing = [] if wait.found is None else [str(each.rank) for each in wait.found.missing]
            missing.sort(key=lambda rank: rank not in culprits)
            ranks = [*missing[:MAX_LABELLED], *([OTHER] if len(missing) > MAX_LABELLED else [])]
            for rank in ranks or ["unknown"]:
                culprit = "true" if rank in culprits else "false"
                labels = (group, signature.kind.value, rank, culprit)
                longest[labels] = max(longest.get(labels, 0.0), wait.age_s(now_ns))
        for labels, age_s in sorted(longest.items()):
            family.add_metric(labels, age_s)
        yield family
