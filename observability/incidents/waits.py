"""Incidents of waits in processes without a control plane.

Theory of operation. A thread looks at the operations in flight each `after_s`. An operation that two looks
find waits: the rank makes a folder, and writes its part. The other ranks of the host, also those that wait
for nothing, find the folder at their next look and add their parts; so nothing is sent. The rank that made
the folder then reads the parts of all, looks at the processes of ranks that have written none (they tell
where they stand by `observability.job.foreign_stacks`), and diagnoses the wait as a control plane does. If it
is over, or no rank is missing, the folder is removed: an operation that moves much data takes long as well.
Ranks of other hosts are known by the operation at which their messages were seen last, unless the folder is
shared. Where no incident can be written, or none is wanted but the policy needs the verdict, ranks meet in a
passing folder, of which only the verdict stays.

The first `new_group` of a process waits in the same way, though there is no group yet, and no control plane
where one is to start with it. The store tells which ranks have registered; a rank that has not is known by
the environment of its process. Each rank carries out ``DIST2_ON_HANG`` by itself, once the verdict is there.

A program may wait on purpose, for a checkpoint say. After a wait that ended by itself, the next one at the
same line is written only once it takes twice as long.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from dist2.group.open_groups import open_groups
from dist2.operation.signature import GroupInfo
from dist2.rendezvous.launchers import processes_of_ranks
from dist2.rendezvous.liveness import Building, building
from dist2.rendezvous.requests import JoinRequest
from dist2.runtime.code_marks import folders_of, library
from dist2.runtime.rank_names import host_and_pid
from observability.flight_recorder import global_rank
from observability.frames import frames_of_threads
from observability.incidents import folders
from observability.incidents.recording import Recording
from observability.metrics import instrument as metrics

if TYPE_CHECKING:
    from observability.job.answer import Answer
    from observability.job.state import Witness
    from observability.job.verdict import Diagnosis

PART_S = 5.0
"""How long a rank may take to write its part, once it has found the folder."""
STORE_S = 5.0
"""How long the store may take to tell which ranks have registered."""
POLL_S = 0.2
HOLDS_S = 5.0
"""How long a failure is held up, at most, that may be a consequence of the policy."""
VERDICT = "desync.json"
DIST2 = folders_of(library())

log = logging.getLogger("dist2.incidents")

Waiting = dict[object, tuple[str, float]]
"""Operations and calls that wait: the line of each, and since how many seconds."""


class Waits:
    """Finds the waits of this process and writes their incidents.

    Args:
        recording: The incidents of this process.
        after_s: How long an operation may take.
        policy: What happens after a wait in the first `new_group`: ``observe``, ``abort`` or ``exit``.
        keeps: Whether incidents stay: else ranks meet for the verdict, which the policy needs.
    """

    def __init__(
        self, recording: Recording, after_s: float, policy: str = "observe", keeps: bool = True
    ) -> None:
        self._recording = recording
        self._keeps = keeps
        self._policy = policy
        self._after_s = after_s
        self._pid = 0
        self._ends = threading.Event()
        self._witness: Witness | None = None
        self._before: Waiting = {}
        self._begun: tuple[int, ...] = ()
        self._patience_s: dict[str, float] = {}
        self._written: set[object] = set()
        self._joined: Path | None = None

    def begin(self, making: Building) -> None:
        """Begin to look, with the first call that makes a group; a forked child has its own."""
        if self._recording.making is None and making.uid:
            self._recording.making = _info_of(making)
        if self._pid == os.getpid():
            return
        self._pid, self._ends, self._before = os.getpid(), threading.Event(), {}
        threading.Thread(target=self._run, args=(self._ends,), name="dist2-waits", daemon=True).start()

    def stop(self) -> None:
        """End the thread at its next look."""
        self._ends.set()

    def _run(self, ends: threading.Event) -> None:
        from observability.job.foreign_stacks import memory

        thread = threading.get_native_id()
        memory.opened(thread)
        try:
            _note_position()
            while not ends.wait(self._after_s):
                self._look_safely()
        finally:
            memory.closed(thread)

    def _look_safely(self) -> None:
        try:
            self.look()
        except OSError as error:  # such as a full disk
            log.warning("the incident of a wait cannot be written: %s", error)
        except Exception:  # the thread must outlive a single failure
            log.warning("the incident of a wait cannot be written", exc_info=True)

    def look(self) -> None:
        """Look once."""
        # Another thread may be importing it.
        running = getattr(sys.modules.get("observability.server"), "running", None)
        if running is not None and running():
            return  # which finds more
        _note_position()
        waiting = self._waiting()
        for key, (line, age_s) in self._before.items():
            if key not in waiting:
                self._patience_s[line] = 2 * age_s
        confirmed = {
            key
            for key, (line, age_s) in waiting.items()
            if key in self._before and age_s >= self._patience_s.get(line, 0.0)
        }
        self._before = waiting
        self._written &= waiting.keys()
        new = confirmed - self._written
        self._written |= confirmed
        if new:
            self._write(confirmed)
        else:
            self._join()

    # Whether this rank waits

    def _waiting(self) -> Waiting:
        """Return the operations that take long, and the call of dist2 in which the main thread stays."""
        now_ns, before = time.monotonic_ns(), self._begun
        self._begun = tuple(each._get_sequence_number_for_group() for each in open_groups())
        old = [each for each in metrics.in_flight() if now_ns - each.created_ns >= self._after_s * 1e9]
        if not old and (self._begun != before or not _is_in_library()):
            self._witness = None  # an ordinary job: the modules below are not even imported
            return {}
        from observability.job.diagnosis import DIST2S
        from observability.job.stacks import awaited_of
        from observability.job.state import is_idle, where_of

        main = self._watching().look()
        awaited = awaited_of(old) if any(each.is_async for each in old) else set()
        found: Waiting = {
            each: (f"{each.signature.kind.value} {where_of(each)}", (now_ns - each.created_ns) / 1e9)
            for each in old
            if not is_idle(each, awaited, main)
        }
        if not old and str(main["inside"]).startswith(DIST2S) and main["for_s"] >= self._after_s:
            found[main["inside"], main["place"]] = main["place"], main["for_s"]
        return found

    def _watching(self) -> Witness:
        from observability.incidents.evidence import witness_of

        if self._witness is None:
            self._witness = witness_of(None)
        return self._witness

    # The incident

    def _job(self) -> GroupInfo | None:
        """Return the group that names the job, or that which its ranks are making as their first."""
        known = self._recording.first or self._recording.making
        return known or next((_info_of(each) for each in building() if each.uid), None)

    def _write(self, confirmed: set[object]) -> None:
        """Meet the other ranks of the host in the first folder that can be written to."""
        why = ""
        for root in self._roots():
            try:
                self._meet(root, confirmed, why)
            except OSError as error:
                why = why or folders.unwritable(root, error)
            else:
                return
        log.warning(why)

    def _roots(self) -> list[Path]:
        return [*([self._recording.root] if self._keeps else []), *folders.passing()]

    def _stays(self, folder: Path) -> bool:
        return self._keeps and folder.parent == self._recording.root

    def _meet(self, root: Path, confirmed: set[object], why: str) -> None:
        """Write the part of this rank; if it is the first of the job, wait for the others and conclude.

        Args:
            root: Where the folder is.
            confirmed: What waits.
            why: Why the incident does not stay; empty if it does, or if none is wanted.

        Raises:
            OSError: The folder or the part cannot be written.
        """
        job, is_first = self._job(), self._recording.first is None
        if job is None:
            return
        folder = folders.joined(root, job.uid, job.name)
        is_told = (folder.path / VERDICT).exists()  # then this rank came after the verdict
        if not (is_told and (is_first or not self._stays(folder.path))):
            self._add_parts(folder.path)
        until = time.monotonic() + self._after_s + PART_S
        with self._held_failures(folder.path / VERDICT):
            if folder.is_new:
                if self._stays(folder.path):
                    self._recording.made(folder.path)  # a failure of this rank may come before the verdict
                self._await_parts(folder.path, job, until)
                self._conclude(folder, job, confirmed, why)
            if is_first and self._policy != "observe":
                self._act(folder, job, until + STORE_S)

    def _await_parts(self, path: Path, job: GroupInfo, until: float) -> None:
        """Wait for the parts of all ranks that look: in the first `new_group`, those that have registered."""
        ranks, asked = set(job.global_ranks), self._recording.first is not None
        while time.monotonic() < until:
            written = {int(each.stem.removeprefix("hang-")) for each in path.glob("hang-*.json")}
            if ranks <= written:
                return
            time.sleep(POLL_S)
            if not asked:
                asked, requests = True, _requests()
                ranks -= {rank for rank, request in requests.items() if request is None}

    @contextmanager
    def _held_failures(self, verdict: Path) -> Iterator[None]:
        """Hold up failures of `new_group` that follow a verdict, with `exit`: another rank may end first."""
        is_over = threading.Event()

        def hold() -> None:
            if verdict.exists():
                is_over.wait(HOLDS_S)  # ends with the process, unless the policy cannot be carried out

        if self._policy == "exit":
            for each in building():
                each.on_failed = hold
        try:
            yield
        finally:
            is_over.set()

    def _act(self, folder: folders.Folder, job: GroupInfo, until: float) -> None:
        """Carry out the policy, once the first rank of the host has written its verdict."""
        from observability.incidents.hang import act, reason
        from observability.job.verdict import SENTENCES

        verdict = folder.path / VERDICT
        while not verdict.exists() and folder.path.exists() and time.monotonic() < until:
            time.sleep(POLL_S)
        if verdict.exists() and self._recording.first is None:
            where = folder.path if self._stays(folder.path) else None
            if where is not None:
                self._recording.joined(where)
            told = json.loads(verdict.read_text())["verdict"]
            words = reason(self._policy, "; ".join(told[:SENTENCES]), where)
            level = logging.ERROR if folder.is_new else logging.INFO
            log.log(level, "rank %d: %s", job.rank, words)
            act(self._policy, words, job.rank)

    def _join(self) -> None:
        """Add the part of this rank to the incident of a wait that another rank has begun."""
        job = self._job()
        found = () if job is None else [folders.current(root, job.uid) for root in self._roots()]
        path = next(filter(None, found), None)
        if path is not None and path != self._joined and any(path.glob("hang-*.json")):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                self._add_parts(path)

    def _add_parts(self, path: Path) -> None:
        """Write the parts of this process: ranks may be threads."""
        from observability.incidents.evidence import write_part

        self._joined = path
        open_now = reversed(metrics.statuses.open_groups())
        ranks = {global_rank(info): info for info in open_now} or {
            each.rank: _info_of(each) for each in building()
        }
        for_s = self._watching().look()["for_s"]
        for info in ranks.values():
            write_part(path, "hang", info, "the job waits", None, for_s=for_s)

    def _conclude(
        self, folder: folders.Folder, job: GroupInfo, confirmed: set[object], why: str = ""
    ) -> None:
        """Write the diagnosis of all parts; remove the folder if nothing is the matter."""
        from observability.incidents.evidence import write_answers
        from observability.incidents.reading import Incident
        from observability.job.diagnosis import diagnose

        answers = Incident.read(folder.path).answers()
        answers = _completed(answers, job) if self._recording.first is not None else _registered(answers)
        found = diagnose(answers, self._after_s / 2)
        if not (found.waiting and found.has_reason and confirmed & self._waiting().keys()):
            if any(folder.path.glob("failure-*.json")):  # its ranks have joined, and told no path
                self._recording.note(folder)
            else:
                shutil.rmtree(folder.path, ignore_errors=True)
                self._recording.forget()
            return
        self._tell(found)  # first, as the disk may be full
        if self._stays(folder.path):
            self._recording.note(folder)  # before the verdict, at which other ranks may end the job
        try:
            write_answers(folder.path, answers, found, global_rank(job), 0.0)
        except OSError as error:
            why = folders.unwritable(folder.path.parent, error)
        if why:
            log.warning(why)
        if not self._stays(folder.path):
            _remove_parts(folder.path)

    @staticmethod
    def _tell(found: Diagnosis) -> None:
        extra = {"verdict": found.summary, "culprits": list(found.culprits)}
        log.warning("the job waits: %s", found.summary, extra=extra)


def _note_position() -> None:
    """Tell other processes where the main thread stands, for the time when this one cannot answer."""
    from observability.job.foreign_stacks import memory
    from observability.job.stacks import position

    memory.note(position(threading.main_thread().ident or 0)["place"])


def _remove_parts(folder: Path) -> None:
    """Leave only the verdict, which the other ranks of the host may not have read yet."""
    for path in folder.iterdir():
        if path.name not in (folders.HEAD, VERDICT):
            path.unlink(missing_ok=True)


def _is_in_library() -> bool:
    """Whether the main thread is inside of a call of dist2."""
    with frames_of_threads() as frames:
        frame = frames.get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame.f_code.co_filename.startswith(DIST2):
                return True
            frame = frame.f_back
        return False


def _info_of(making: Building) -> GroupInfo:
    """Return the group that the ranks are making."""
    ranks = tuple(range(making.world_size))
    return GroupInfo(making.uid, making.name or "new_group", "", "", making.rank, ranks)


def _registered(answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """Return the answers in the first `new_group`: of ranks with a part, and of those that hold it up."""
    from observability.job.answer import NO_PART, NOT_REGISTERED, Answer
    from observability.job.stacks import look_at, look_at_pid

    requests, started = _requests() or {0: None}, processes_of_ranks()  # the store is rank 0's
    found = {rank: answer for rank, answer in answers.items() if answer.state is not None}
    for rank in answers.keys() - found.keys():
        request = requests.get(rank)
        pid = started.get(rank) if request is None else None
        outside = look_at_pid(pid) if pid else None if request is None else look_at(request.process)
        is_missing = rank in requests and request is None
        answer = Answer(
            silence=NOT_REGISTERED if is_missing else NO_PART,
            outside=None if outside is None else attrs.asdict(outside),
        )
        # Others are on their way, or wait on another host.
        if is_missing or pid or (outside is not None and not answer.runs):
            found[rank] = answer
    return found


def _requests() -> dict[int, JoinRequest | None]:
    """Return which ranks have registered, as the store has it; nothing where it does not answer."""
    told: dict[int, JoinRequest | None] = {}

    def ask() -> None:
        for each in building():
            with suppress(RuntimeError, OSError):
                told.update(each.requests())

    asking = threading.Thread(target=ask, name="dist2-waits-ask", daemon=True)
    asking.start()
    asking.join(STORE_S)
    return told.copy()


def _completed(answers: Mapping[int, Answer], job: GroupInfo) -> dict[int, Answer]:
    """Add what this host knows of ranks without a part: their processes, or the last messages of others."""
    from observability.incidents.evidence import LOOKED_AT, seen_from_here
    from observability.job.answer import ELSEWHERE

    silent = [rank for rank, answer in answers.items() if answer.state is None]
    outside = seen_from_here(job, silent[:LOOKED_AT])
    found = dict(answers)
    for rank in silent:
        host = _other_host(job, rank)
        seen, here = (_last_seen(rank), None) if host else ({}, outside.get(str(rank)))
        silence = f"{ELSEWHERE} {host}" if host else answers[rank].silence
        found[rank] = attrs.evolve(answers[rank], silence=silence, outside=here, seen=seen)
    return found


def _other_host(job: GroupInfo, rank: int) -> str:
    """Return the host of a rank, as its name has it; empty if that is this host or unknown."""
    group = next((each for each in open_groups() if each.info is job), None)
    if group is None or rank not in job.global_ranks:
        return ""
    host = group.backend.names.process_of(job.global_ranks.index(rank)).rpartition(", pid ")[0]
    return "" if host == host_and_pid(socket.gethostname(), 0).rpartition(", pid ")[0] else host


def _last_seen(rank: int) -> dict[str, str]:
    """Return the operation of each group, by its uid, at which messages of a rank show it last."""
    groups = {each: each.info.global_ranks for each in open_groups()}
    return {
        group.info.uid: group.backend.last_seen([ranks.index(rank)]).get(ranks.index(rank), "")
        for group, ranks in groups.items()
        if rank in ranks
    }
