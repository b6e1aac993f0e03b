"""`Member`: one rank's part in the job: its description, its directory of other ranks, its diagnoses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from dist2.errors import Dist2Error
from dist2.operation.signature import GroupInfo
from dist2.runtime.config import Config
from dist2.runtime.other_process import Process
from dist2.security.authenticator import Credentials
from observability.client import Asker
from observability.entries import document_of
from observability.exposition import dist2_version
from observability.flight_recorder import FlightRecorder, global_rank
from observability.frames import no_collection
from observability.job.answer import RANK_S, Answer, how_ended
from observability.job.calls import shorten
from observability.job.diagnosis import diagnose
from observability.job.directory import Directory, Entry, hubs_of
from observability.job.documents import job_document, stack_rows
from observability.job.gathering import Gatherer, misread, process_seen, seen_from_outside
from observability.job.lines import Line, encoded
from observability.job.rank_text import named
from observability.job.stacks import stacks
from observability.job.state import HISTORY, PROTOCOL, Witness
from observability.job.verdict import Diagnosis, Key
from observability.metrics import Metrics

if TYPE_CHECKING:
    from observability.incidents.hang import HangRecorder
    from observability.job.waiting_log import WaitingLog
    from observability.job.watch import Watch

log = logging.getLogger("dist2.waiting")

AFTER_S = 1.0
"""An operation that takes longer waits, in answers about a job; logs and `/healthz` take `DIST2_WAITING`."""

REFRESH_S = 2.0
"""How long a request waits for the store."""
MOVES_S = 5.0
"""How often entries that are known are read again."""

NOTICE_S = 15.0
"""How long a rank holds itself for waited for without a repetition."""

MAX_NOTICES = 64


@attrs.frozen
class Notice:
    """A report to this rank: others wait for it.

    Attributes:
        key: In which operation.
        title: The operation in words.
        by: The ranks that wait.
        since_ns: Monotonic nanosecond since when.
        told_ns: When it was said last.
    """

    key: Key
    title: str
    by: tuple[int, ...]
    since_ns: int
    told_ns: int

    def sentence(self, stands: str, now_ns: int) -> str:
        """Say it, with where the main thread of this rank stands."""
        age_s = (now_ns - self.since_ns) / 1e9
        verb = "waits" if len(self.by) == 1 else "wait"
        return f"{named(self.by)} {verb} for this rank in {self.title} for {age_s:.1f} s: {stands}"


class Member:
    """One rank of the job.

    Args:
        metrics: Counters, and the operations in flight.
        recorder: Remembers.
        info: The group whose rank names this process; None takes the first that is open.
        token: The token of the control planes of the job.
        directory: Where the others are; none for a job of one.
        asker: Sends requests.
        thread_id: Of the thread that plays the rank; the calling one by default.

    Attributes:
        token: The token of the control planes of the job.
        directory: Where the others are.
        watch: Looks for operations that wait; None before it is started.
        hang: Confirms that the job waits; None before it is started.
        waiting_log: Logs the waits of the job; None before it is started.
    """

    def __init__(
        self,
        metrics: Metrics,
        recorder: FlightRecorder,
        info: GroupInfo | None = None,
        *,
        token: str = "",
        directory: Directory | None = None,
        asker: Asker | None = None,
        thread_id: int | None = None,
    ) -> None:
        self._given = info
        self._metrics = metrics
        self.token = token
        self._asker = asker or Asker()
        thread_id = threading.get_ident() if thread_id is None else thread_id
        process = Process.here()
        self.witness = Witness(metrics, recorder, thread_id, self.info, process)
        self._gatherer = Gatherer(self._asker, token, process)
        self.directory = directory or Directory(None, Credentials.of(Config.from_environment()))
        self.watch: Watch | None = None
        self.hang: HangRecorder | None = None
        self.waiting_log: WaitingLog | None = None
        self._next_move = self._next_find = 0.0
        self._notices: dict[Key, Notice] = {}
        self._notices_lock = threading.Lock()
        self._diagnosing = threading.Lock()
        self._asking = threading.Lock()
        self._refreshing: threading.Thread | None = None
        self._refreshing_lock = threading.Lock()
        self._job: tuple[float, dict[str, Any]] | None = None
        self._latest: Diagnosis | None = None

    def info(self) -> GroupInfo | None:
        """Return the group that names this process; None before there is one."""
        known, given = self._metrics.statuses.open_groups(), self._given
        if given is None:
            return next(iter(known), None)
        return next((each for each in known if (each.uid, each.rank) == (given.uid, given.rank)), given)

    @property
    def rank(self) -> int:
        """This rank in the job; 0 before there is a group."""
        info = self.info()
        return 0 if info is None else global_rank(info)

    def world(self) -> tuple[int, ...]:
        """Return all ranks of the job."""
        info = self.info()
        return (0,) if info is None else info.global_ranks

    def label_of(self, group: GroupInfo) -> str:
        """Return the label that a group's metrics bear."""
        return self._metrics.label_of(group)

    # Answers of all ranks

    def own_answer(self, wanted: Mapping[str, Any]) -> Answer:
        """Return the answer of this rank.

        Args:
            wanted: ``history``: number of collectives of each group; ``stacks``: whether with its threads;
                ``traffic``: whether with the totals of its operations; ``look``: processes of this host to
                look at; ``entries``: instead of all this, the times of so many calls of each group, after
                ``after_ns``.
        """
        if wanted.get("entries"):
            most, after_ns = int(wanted["entries"]), int(wanted.get("after_ns", 0))
            entries = document_of(self.witness.recorder, self.rank, after_ns, most)
            return Answer(state={"epoch_ns": time.time_ns(), "entries": entries})
        state = self.witness.state(min(max(int(wanted.get("history", 1)), 1), HISTORY))
        for group in state["groups"].values():
            shorten(group)
        if wanted.get("stacks"):
            state["threads"] = stacks()
        if wanted.get("traffic"):
            for uid, traffic in self.witness.traffic().items():
                state["groups"].get(uid, {})["traffic"] = traffic
        if self.waiting_log is not None and self.waiting_log.lines:
            state["events"] = list(self.waiting_log.lines)
        processes = {str(text): Process.read(str(text)) for text in wanted.get("look", ())}
        if processes:
            state["looked"] = {
                text: outside
                for text, process in processes.items()
                if process is not None and (outside := process_seen(process)) is not None
            }
        return Answer(state=state)

    def gather(
        self, entries: Iterable[Entry], wanted: Mapping[str, Any], limit_s: float = RANK_S
    ) -> dict[int, Answer]:
        """Return the answers of this rank and of the others; see `Gatherer.gather`."""
        answers = {self.rank: self.own_answer(wanted)}
        asked = {each.rank: each for each in entries}
        lines = self._gatherer.gather(asked.values(), wanted, limit_s)
        with no_collection():  # of the answers of thousands of ranks, none is garbage yet
            for rank, entry in asked.items():
                try:
                    answers[rank] = lines[rank].answer(entry.url)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    answers[rank] = Answer(silence=misread(error), url=entry.url)
        return answers

    def part(self, entries: Sequence[Entry], wanted: Mapping[str, Any], limit_s: float) -> bytes:
        """Return the answers of this rank and of others, for the rank that asked for them."""
        received_ns = time.time_ns()
        lines = {self.rank: Line.of(self.own_answer(wanted))}
        if entries:
            lines |= self._gatherer.gather(entries, wanted, limit_s)
        head = {"protocol": PROTOCOL, "version": dist2_version(), "process": self._gatherer.here.text}
        return encoded({**head, "received_ns": received_ns, "answered_ns": time.time_ns()}, lines)

    def entries(self, after_ns: Mapping[int, int], most: int, limit_s: float) -> dict[int, Answer]:
        """Return the times of the calls of ranks, in the state of their answers.

        Args:
            after_ns: By rank, the time up to which they are known: see `observability.entries`.
            most: Number of calls of each group.
            limit_s: How long a rank may take to answer.
        """
        known = self.directory.entries
        others = [rank for rank in after_ns if rank in known and rank != self.rank]
        asked = [attrs.evolve(known[rank], after_ns=after_ns[rank]) for rank in others]
        wanted = {"entries": most, "after_ns": after_ns.get(self.rank, 0)}
        answers = self.gather(asked, wanted, limit_s)
        self._moved(answers)  # is asked the next time: calls that are known would come again now
        return answers

    def everyone(self, limit_s: float = RANK_S, **wanted: object) -> dict[int, Answer]:
        """Return an answer for each rank of the job, silent ones included."""
        world = self.world()
        others = [rank for rank in world if rank != self.rank]
        if any(rank not in self.directory.entries for rank in others):
            self.refresh(REFRESH_S)
        entries = self.directory.entries
        answers = self.gather([entries[rank] for rank in others if rank in entries], wanted, limit_s)
        if moved := self._moved(answers):
            answers |= self.gather(moved, wanted, limit_s)
        unknown = Answer(silence="it has no control plane: it never called observability.start, or not yet")
        found = {rank: answers.get(rank, unknown) for rank in world}
        return self._seen_from_outside(found)

    def _moved(self, answers: Mapping[int, Answer]) -> list[Entry]:
        """Return the new entries of silent ranks: a program may have replaced its control plane."""
        entries, now = self.directory.entries, time.monotonic()
        silent = {
            rank: entries[rank].url
            for rank, answer in answers.items()
            if answer.state is None and rank in entries
        }
        if not silent or now < self._next_move:
            return []
        self._next_move = now + MOVES_S
        self.refresh(REFRESH_S, again=silent)
        return [entries[rank] for rank, url in silent.items() if entries[rank].url != url]

    def refresh(
        self, wait_s: float = 0.0, only_hubs: bool = False, again: Container[int] = frozenset()
    ) -> None:
        """Read the directory on a thread of its own: the process that serves the store may be stopped.

        Args:
            wait_s: How long to wait for that.
            only_hubs: Whether the entries of the hubs are enough.
            again: Ranks whose entry may have changed.
        """
        with self._refreshing_lock:
            thread = self._refreshing
            if thread is None or not thread.is_alive():
                thread = threading.Thread(
                    target=self._refresh, args=(only_hubs, again), name="dist2-job-directory", daemon=True
                )
                self._refreshing = thread
                thread.start()
        thread.join(wait_s)

    def find(self) -> None:
        """Look in the store for control planes that are not known yet, or have been replaced."""
        world, now = self.world(), time.monotonic()
        if now >= self._next_find or any(rank not in self.directory.entries for rank in world):
            self._next_find = now + MOVES_S
            self.refresh(REFRESH_S, again=world)

    def _refresh(self, only_hubs: bool = False, again: Container[int] = frozenset()) -> None:
        world = self.world()
        try:
            self.directory.refresh(hubs_of(world) if only_hubs else world, only_hubs, again)
        except (Dist2Error, RuntimeError) as error:  # the store is gone: the known entries must do
            log.debug("the store of the job cannot be read: %s", error)

    def _seen_from_outside(self, answers: dict[int, Answer]) -> dict[int, Answer]:
        """Complete the answers of silent ranks: another rank of the same host looks at their process."""
        entries, looked = self.directory.entries, dict[int, dict[str, Any]]()
        silent = [rank for rank, answer in answers.items() if answer.state is None]
        lost = {rank: entries[rank] for rank in silent if rank in entries}
        by_host: dict[tuple[str, str], list[int]] = {}
        for rank, entry in lost.items():
            seen = seen_from_outside(entry)
            if seen is None:
                by_host.setdefault((entry.process.host, entry.process.space), []).append(rank)
            else:
                looked[rank] = seen
        for host, there in by_host.items():
            looked |= self._seen_by_a_neighbour(host, there, answers)
        for rank, seen in looked.items():
            pid = entries[rank].process.pid
            if not seen["state"] and (how := how_ended(pid, answers)):
                seen["words"] = f"process {pid} {how}"
        return answers | {
            rank: attrs.evolve(answers[rank], host=entry.process.host, outside=looked.get(rank))
            for rank, entry in lost.items()
        }

    def _seen_by_a_neighbour(
        self, host: tuple[str, str], silent: list[int], answers: Mapping[int, Answer]
    ) -> dict[int, dict[str, Any]]:
        entries = self.directory.entries
        neighbours = (
            rank
            for rank, entry in entries.items()
            if (entry.process.host, entry.process.space) == host and answers[rank].state is not None
        )
        neighbour = next(neighbours, None)
        if neighbour is None:
            return {}
        processes = {rank: entries[rank].process.text for rank in silent}
        found = self.gather([entries[neighbour]], {"look": list(processes.values())})[neighbour].state or {}
        seen: dict[str, Any] = found.get("looked", {})
        return {rank: seen[text] for rank, text in processes.items() if seen.get(text)}

    def job(self, limit_s: float = RANK_S) -> dict[str, Any]:
        """Describe all ranks; a rank that has not answered after the limit is silent.

        Those that ask while another answer is being made, such as open pages, get one answer; none is older
        than its question.
        """
        asked = time.monotonic()
        with self._asking:
            if self._job is None or self._job[0] < asked:
                self._job = time.monotonic(), self._ask_job(limit_s)
            return self._job[1]

    def _ask_job(self, limit_s: float) -> dict[str, Any]:
        began = time.monotonic()
        answers = self.everyone(limit_s, traffic=True)
        took_s = time.monotonic() - began
        after_s = AFTER_S if self.watch is None else min(AFTER_S, self.watch.after_s)
        info = self.info()
        with no_collection():
            document = job_document(answers, diagnose(answers, after_s), self.rank, took_s)
        return {"name": None if info is None else info.name, **document}

    def stacks(self, wanted: int | None = None, limit_s: float = RANK_S) -> list[dict[str, Any]]:
        """Return the Python threads of all ranks, or of one; of a silent rank, its state in the kernel."""
        if wanted == self.rank:
            answers = {wanted: self.own_answer({"stacks": True})}
        else:
            answers = self.everyone(limit_s, stacks=True)
        return [row for row in stack_rows(answers) if wanted in (None, row["rank"])]

    def ask_others(
        self, path: str, body: Mapping[str, Any], limit_s: float = 5.0, silent: Container[int] = ()
    ) -> dict[int, Any]:
        """Send a request to all other ranks; return the answer of each, or its error in words.

        Args:
            path: Of the request.
            body: Of the request.
            limit_s: How long a rank may take to answer.
            silent: Ranks that did not answer a moment ago: they are not waited for so long.
        """
        entries = [entry for rank, entry in self.directory.entries.items() if rank != self.rank]
        return self._gatherer.each(entries, path, body, limit_s, silent)

    # Operations that wait

    def diagnosis(
        self, after_s: float = AFTER_S, limit_s: float = RANK_S, history: int = HISTORY
    ) -> Diagnosis:
        """Return which operations wait for which ranks.

        Args:
            after_s: Operations that are younger than this are held for in progress.
            limit_s: How long a rank may take to answer.
            history: Number of collectives of each group that are compared.
        """
        at_ns = time.monotonic_ns()
        found = diagnose(self.everyone(limit_s, history=history), after_s)
        return attrs.evolve(found, at_ns=at_ns, took_s=(time.monotonic_ns() - at_ns) / 1e9)

    def waiting(self, max_age_s: float, after_s: float) -> Diagnosis:
        """Return a diagnosis without a comparison of calls; tell the missing ranks, if it is new.

        Args:
            max_age_s: An earlier answer that is no older will do.
            after_s: Operations that are younger than this are held for in progress.
        """
        asked_ns = time.monotonic_ns()
        with self._diagnosing:  # once for all that ask at a time
            latest = self._latest
            if latest is not None and latest.at_ns >= asked_ns - int(max_age_s * 1e9):
                return latest
            self._latest = found = self.diagnosis(after_s, history=1)
        self._tell_culprits(found)
        if self.waiting_log is not None:
            self.waiting_log.diagnosed(self.rank, found)
        if self.hang is not None:
            self.hang.look(found)
        return found

    def _tell_culprits(self, found: Diagnosis) -> None:
        """Tell each missing rank that answers which operations wait for it."""
        told: dict[int, list[dict[str, Any]]] = {}
        for each in found.waiting:
            notice = {"key": list(each.key), "title": each.title, "by": list(each.ranks), "age_s": each.age_s}
            for missing in each.missing:
                if missing.answers:
                    told.setdefault(missing.rank, []).append(notice)
        for rank, notices in told.items():
            if rank == self.rank:
                self.take_notices(notices)
                continue
            entry = self.directory.entries.get(rank)
            if entry is not None:
                try:
                    url, token = f"{entry.url}/job/notices", self.token
                    self._asker.ask(url, token, body={"notices": notices}, timeout_s=RANK_S)
                except (OSError, Dist2Error) as error:
                    log.debug("rank %d cannot be told that others wait for it: %s", rank, error)

    def take_notices(self, notices: Iterable[Mapping[str, Any]]) -> None:
        """Note that others wait for this rank; log new reports.

        Raises:
            KeyError, TypeError, ValueError: They are no notices.
        """
        self.notices()  # those that hold no more make room
        now_ns = time.monotonic_ns()
        for each in notices:
            uid, seq, is_p2p, caller = each["key"]
            key: Key = (str(uid), int(seq), bool(is_p2p), int(caller))
            by = tuple(map(int, each["by"]))
            since_ns = now_ns - int(float(each["age_s"]) * 1e9)
            notice = Notice(key, str(each["title"])[:300], by, since_ns, now_ns)
            with self._notices_lock:
                is_new = key not in self._notices
                if is_new and len(self._notices) >= MAX_NOTICES:
                    continue
                self._notices[key] = notice
            if is_new:
                self._log(notice, now_ns)

    def _log(self, notice: Notice, now_ns: int) -> None:
        stands = self.stands()
        fields = {"rank": self.rank, "waited_for_in": notice.title, "waiting_ranks": list(notice.by)}
        by, waited_s = named(notice.by), (now_ns - notice.since_ns) / 1e9
        log.info(
            "rank %d is waited for by %s in %s for %.1f s: %s",
            *(self.rank, by, notice.title, waited_s, stands),
            extra={**fields, "waited_s": waited_s, "stands": stands},
        )

    def stands(self) -> str:
        """Say where the main thread of this rank stands."""
        main = self.witness.position()
        where = f"its main thread is at {main['place']}" if main["place"] else "its main thread has ended"
        return f"{where}, handling {main['exception']}" if main["exception"] else where

    def notices(self) -> list[Notice]:
        """Return the reports that still hold: this rank has not entered the operation since."""
        now_ns = time.monotonic_ns()
        with self._notices_lock:
            if not self._notices:
                return []
            groups = self.witness.state()["groups"]
            for key, notice in list(self._notices.items()):
                uid, seq, is_p2p, _ = key
                entered = not is_p2p and uid in groups and groups[uid]["begun"] >= seq
                if entered or now_ns - notice.told_ns > NOTICE_S * 1e9:
                    del self._notices[key]
            return list(self._notices.values())

    def close(self) -> None:
        """End the watch, and let go of the store."""
        if self.watch is not None:
            self.watch.stop()
        self.directory.close()


def entry_of(rank: int, url: str) -> Entry:
    """Return the entry of this process."""
    return Entry(rank, url, Process.here())
