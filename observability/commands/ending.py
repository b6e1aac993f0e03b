"""The end of a job, as a command learns it: from the page of its launcher, or from its processes here.

Theory of operation. The page of ``dist2.run`` outlives the ranks and says in ``/job`` how they ended. Other
control planes end with their processes, so while they run, a command that belongs to the same user and host
watches these by pidfd. The kernel then tells how each ended.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn
from urllib.error import HTTPError

import attrs

from dist2.errors import Dist2Error
from dist2.runtime.config import Config
from dist2.runtime.other_process import Process, has_ended, how_ended
from dist2.runtime.rank_names import RANKS
from observability import token_files
from observability.commands.control_plane import ControlPlane, NoAnswerError, end_without_answer
from observability.commands.ps import age_of, latest_incidents
from observability.incidents.folders import latest, latest_at, root_of
from observability.token_files import ControlPlaneFile

ENDED_WELL, FAILED = 0, 1
"""Exit statuses of a command that has seen the job end, beside `NO_ANSWER`."""
LAUNCHER = -1
"""The rank of a launcher's page."""
WELL, DIED, UNKNOWN = "exited with code 0", "died", "ended"
"""Words for the end of a process; before Linux 6.15 other processes are not told how."""
ASK_S = 5.0


@attrs.frozen
class Ending:
    """How a job has ended.

    Attributes:
        failed: Whether it failed.
        words: How its processes ended, in words.
        incident: The folder with the evidence; empty where there is none.
        is_final: Whether it is sure that no launcher starts the ranks again.
    """

    failed: bool
    words: str
    incident: str = ""
    is_final: bool = True

    @classmethod
    def told(cls, job: Mapping[str, Any]) -> Ending | None:
        """Return the ending that the page of a launcher tells; None while the job runs."""
        ended = job.get("ended")
        return None if ended is None else cls(ended["code"] != 0, ended["words"], ended["incident"])

    @property
    def sentence(self) -> str:
        """The ending and where the evidence is, in a sentence."""
        where = f"; incident: dist2 why {shlex.quote(self.incident)}" if self.incident else ""
        return f"The job has ended: {self.words}{where}"

    @property
    def code(self) -> int:
        """The exit status of a command."""
        return FAILED if self.failed else ENDED_WELL


@attrs.frozen
class _Watched:
    """A process of a job: the URL and the rank of its control plane, and its pidfd."""

    url: str
    rank: int
    pidfd: int


class JobProcesses:
    """The processes of a job that have control planes on this host, and a launcher with a page.

    Args:
        url: Of a control plane of the job.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._job: token_files.Job | None = None
        self._watched: dict[Process, _Watched] = {}

    def look(self) -> list[ControlPlaneFile]:
        """Return the control planes of the job on this host that run, and watch their processes."""
        planes = token_files.control_planes()
        job = self._job = next((each.job for each in planes if each.url == self._url), self._job)
        if job is None:
            return []
        found = [each for each in planes if each.url == self._url or _same(each.job, job)]
        for each in found:
            if each.process not in self._watched and (pidfd := each.process.watch()) >= 0:
                self._watched[each.process] = _Watched(each.url, each.job.rank, pidfd)
        return found

    def ending(self) -> Ending | None:
        """Return how the job has ended; None while a process of it runs, or where none is known."""
        self.look()
        if self._job is None or not self._watched:
            return None
        if not all(has_ended(each.pidfd) for each in self._watched.values()):
            return None
        # The latest process of each rank: ranks may have been started again.
        in_order = sorted(self._watched, key=lambda process: process.started)
        hows = {self._watched[each].rank: _how(self._watched[each]) for each in in_order}
        if hows.get(LAUNCHER) == WELL:
            return Ending(failed=False, words=f"the launcher {WELL}")
        incident = _incident_of(self._job.uid)
        failed = bool(incident) or any(how not in (WELL, UNKNOWN) for how in hows.values())
        return Ending(failed, _told(hows), incident, is_final=LAUNCHER in hows or not failed)

    def close(self) -> None:
        """Let go of the processes."""
        for each in self._watched.values():
            os.close(each.pidfd)
        self._watched.clear()


def end_unanswered(error: NoAnswerError, plane: ControlPlane | None) -> NoReturn:
    """End a command that is not answered, with one line: how the job has ended, or what else to ask.

    Args:
        error: The reason.
        plane: The control plane that was asked; None if the arguments name none.
    """
    if plane is None:
        end_without_answer(error)
    if isinstance(error.__cause__, OSError | Dist2Error) and not isinstance(error.__cause__, HTTPError):
        advice = "; ask the control plane of another rank"
        end_without_answer(error, advice + (_incident_at(plane.base) or _others()))
    with suppress(NoAnswerError, KeyError, TypeError):  # the page of a launcher outlives the ranks
        if (ended := Ending.told(plane.get_json("/job", ASK_S))) is not None:
            end_without_answer(NoAnswerError(f"{ended.sentence}. Its last state: dist2 top {plane.base}"))
    end_without_answer(error, _incident_at(plane.base))  # another program may have the port now


def _incident_at(url: str) -> str:
    """Return in words the latest incident of a job that had a control plane at a URL; empty without one."""
    root = root_of(Config.from_environment())
    found = None if root is None else latest_at(root, url, token_files.left_at(url))
    if found is None:
        return ""
    return (
        f", or, if the job has ended, its incident, {age_of(found)} old: dist2 why {shlex.quote(str(found))}"
    )


def _others() -> str:
    """Return where other jobs and their incidents are, in words."""
    if latest_incidents():
        return "; no incident here is of a job with this URL: dist2 ps lists those of other jobs"
    return ": dist2 ps lists the jobs that run here"


def _same(one: token_files.Job, other: token_files.Job) -> bool:
    """Whether control planes belong to one job; ranks that are started again meet at the same place."""
    return bool(one.uid and one.uid == other.uid) or bool(one.meeting and one.meeting == other.meeting)


def _how(watched: _Watched) -> str:
    """Return how a process ended; where the kernel does not tell, an exit has removed its file."""
    how = how_ended(watched.pidfd)
    return how if how != DIED or token_files.left_at(watched.url) else UNKNOWN


def _told(hows: Mapping[int, str]) -> str:
    """Return how the launcher and the ranks of a job ended, in words."""
    ranks = RANKS.ended({rank: how for rank, how in hows.items() if rank != LAUNCHER})
    return "; ".join(filter(None, [f"the launcher {hows[LAUNCHER]}" if LAUNCHER in hows else "", ranks]))


def _incident_of(job: str) -> str:
    """Return the folder of the latest incident of a job here; empty where it has none."""
    root = root_of(Config.from_environment())
    found = None if root is None or not job else latest(root, job)
    return "" if found is None else str(found)
