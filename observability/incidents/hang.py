"""Incidents of a job that waits, and what happens then: ``DIST2_ON_HANG``.

Theory of operation. A rank that waits asks a control plane, the *hub*, which ranks are missing
(`observability.job.watch`). The hub keeps its diagnoses: a wait that two of them have, with one reason, is
confirmed. The hub then asks all ranks for their stacks and last operations, writes these into the folder of
the incident, and has each rank write its own part; a rank that cannot answer is seen from outside. After
that, a second request has each rank carry out the policy. So the evidence is complete before anything is
ended, and each rank knows the verdict when it sees that another one has aborted a group.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Set
from pathlib import Path

from dist2.errors import GroupAbortedError
from dist2.group.open_groups import open_groups
from dist2.operation.record import Operation
from dist2.rendezvous.liveness import abort_building
from dist2.runtime import exit_report
from observability.flight_recorder import global_rank
from observability.flight_recorder import instrument as recorder
from observability.incidents import folders
from observability.incidents.recording import Recording
from observability.job.answer import RANK_S, Answers
from observability.job.diagnosis import diagnose
from observability.job.member import Member
from observability.job.state import HISTORY
from observability.job.verdict import Diagnosis, Key

EXIT_CODE = 86
"""Exit code of a rank that ``DIST2_ON_HANG=exit`` ends."""
OTHERS_S = 10.0
"""How long the other ranks may take to write their parts; one that has just been silent has `RANK_S`."""
EXPLAINS_S = 30.0
"""How long failures are explained by the wait that the policy ends."""

log = logging.getLogger("dist2.incidents")


class HangRecorder:
    """Confirms waits of the job, and writes their incidents.

    Args:
        member: This rank.
        recording: The incidents of this process; None writes none.
        policy: ``observe``, ``abort`` or ``exit``.
        after_s: Operations that are younger do not wait.
    """

    def __init__(self, member: Member, recording: Recording | None, policy: str, after_s: float) -> None:
        self._member = member
        self._recording = recording
        self._policy = policy
        self._after_s = after_s
        self._before: dict[Key, tuple[int, ...]] = {}
        self._confirmed: set[Key] = set()
        self._explanation = ""
        self._explains_until_s = 0.0
        self._ends, self._level = False, logging.INFO

    def look(self, found: Diagnosis) -> None:
        """Take note of a diagnosis of this rank: a wait that the one before has too is confirmed."""
        now = _waits(found)
        new = {key for key, culprits in now.items() if self._before.get(key) == culprits}
        new -= self._confirmed
        self._before = now
        if new:
            self._confirmed |= set(now)
            threading.Thread(target=self._confirm, args=(new,), name="dist2-incident", daemon=True).start()

    def _confirm(self, keys: Set[Key]) -> None:
        try:
            self._carry_out(keys)
        except Exception:  # such as a lack of descriptors: the next look may have more luck
            self._confirmed -= keys
            log.warning("a wait of the job cannot be confirmed", exc_info=True)

    def _carry_out(self, keys: Set[Key]) -> None:
        """Ask all ranks; write the incident and carry out the policy, if one of these waits goes on."""
        member, began = self._member, time.monotonic()
        answers = member.everyone(RANK_S, history=HISTORY, stacks=True, traffic=True)
        found = diagnose(answers, self._after_s)
        if not keys & _waits(found).keys():
            return
        folder = None
        if self._recording is not None:
            folder = self._written(self._recording, answers, found, time.monotonic() - began)
        if self._policy == "observe" and folder is None:
            return
        request: dict[str, object] = {
            "folder": "" if folder is None else folder.name,
            "why": found.summary,
            "then": self._policy,
        }
        silent = {rank for rank, answer in answers.items() if answer.state is None}
        self._ask_all({**request, "acts": False}, silent)
        if self._policy != "observe":
            self._ask_all({**request, "acts": True}, silent)

    def _ask_all(self, request: dict[str, object], silent: Set[int]) -> None:
        """Have all ranks take part, this one last."""
        self._member.ask_others("/job/incident", request, OTHERS_S, silent)
        self.take_part(request, is_told=False)

    def _written(
        self, recording: Recording, answers: Answers, found: Diagnosis, took_s: float
    ) -> Path | None:
        """Write the answers of all ranks; return the folder, or None if that is impossible."""
        info = recording.first or self._member.info()
        assert info is not None  # an operation waits
        from observability.incidents.evidence import write_answers

        try:
            folder = folders.joined(recording.root, info.uid, info.name)
            write_answers(folder.path, answers, found, self._member.rank, took_s)
        except OSError as error:  # the policy holds without evidence, too
            log.warning(folders.unwritable(recording.root, error))
            return None
        recording.note(folder)
        return folder.path

    def take_part(self, request: dict[str, object], is_told: bool = True) -> None:
        """Write the part of this rank, or carry out the policy, as a rank has asked that confirmed a wait.

        Args:
            request: The name of the folder, the verdict, the policy, and whether to carry it out.
            is_told: Whether another rank has asked, which logs it for all.

        Raises:
            KeyError, ValueError: It is no such request.
        """
        name, why, then = str(request["folder"]), str(request["why"])[:4000], str(request["then"])
        if then not in ("observe", "abort", "exit"):
            raise ValueError(f"then must be observe, abort or exit, got {then[:80]!r}")
        acts = bool(request["acts"])
        where = self._take_part(name, why, is_told) if name else None
        if then == "observe":
            return
        if self._recording is not None:
            self._recording.is_over = then == "exit"  # other ranks may end first
        words = reason(then, why, where)
        self._ends, self._level = then == "exit", logging.INFO if is_told else logging.ERROR
        self._explain_failures(words)
        if acts:
            acting = threading.Thread(target=self._act, args=(then,), name="dist2-hang", daemon=True)
            acting.start()  # after the answer to the request

    def _act(self, then: str) -> None:
        log.log(self._level, "rank %d: %s", self._member.rank, self._explanation)
        act(then, self._explanation, self._member.rank)

    def _explain_failures(self, words: str) -> None:
        """Add a note to the errors of the next seconds: another rank may abort or end first."""
        if not self._explanation:
            recorder.on_broken.append(self._explain)
        self._explanation, self._explains_until_s = words, time.monotonic() + EXPLAINS_S

    def _explain(self, operation: Operation) -> None:
        if operation.error is not None and time.monotonic() < self._explains_until_s:
            operation.error.add_note(self._explanation)
            if self._ends:  # before the program prints an error that is a consequence
                self._act("exit")

    def _take_part(self, name: str, why: str, is_told: bool) -> Path | None:
        """Write the part of this rank; return the folder, or None where incidents are off."""
        info, recording = self._member.info(), self._recording
        if recording is None or info is None:
            return None
        from observability.incidents.evidence import write_part

        try:
            job = recording.first or info
            path = folders.named(recording.root, name, job.uid, job.name)
            write_part(path, "hang", info, why, None)
            recording.note_places(path)
        except OSError as error:  # the policy holds without evidence, too
            level = logging.INFO if is_told else logging.WARNING  # a thousand ranks would say the same
            words = "the part of rank %d in an incident cannot be written: %s"
            log.log(level, words, self._member.rank, error)
            return None
        recording.joined(path)
        return path


def _waits(found: Diagnosis) -> dict[Key, tuple[int, ...]]:
    """Return the operations that wait, each with the ranks to blame; none where no reason is known."""
    return {each.key: found.culprits for each in found.waiting} if found.has_reason else {}


def act(then: str, words: str, rank: int) -> None:
    """Abort the groups of a rank of this process, also those that it makes, or end this process."""
    if then == "exit":
        exit_report.report(GroupAbortedError(words))
        os._exit(EXIT_CODE)  # the main thread waits, and no exception can be raised in it
    abort_building(lambda: GroupAbortedError(words))
    for group in open_groups():
        if global_rank(group.info) == rank:
            group._abort_for(GroupAbortedError(words))
            fault = group._runner.fault  # the cause of the error of each later call
            if fault is not None and words not in getattr(fault, "__notes__", ()):
                fault.add_note(words)


def reason(then: str, why: str, where: Path | None) -> str:
    """Return why a policy is carried out, for the error of a rank and for the log."""
    words = f"DIST2_ON_HANG={then}, as the job waited: {why}"
    return words if where is None else f"{words}; incident: {where}"
