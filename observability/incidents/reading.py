"""Read an incident offline: the verdict, the ranks and their stacks, as a control plane would answer."""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from dist2.runtime.rank_names import rank_names
from observability.incidents import folders
from observability.job.answer import NO_PART, Answer, end_in
from observability.job.diagnosis import diagnose
from observability.job.documents import job_document, stack_rows
from observability.operation_files import UNREADABLE, Folder, is_operation_log

AFTER_S = 0.0
"""Operations of any age count: a rank that failed was inside."""
MOST_BYTES = 1 << 30
"""A zip of more is refused; each file is read up to the size that the zip tells for it."""
NO_PARTS = "no rank has left a part in this incident: there may have been no room for it"
_OWN = re.compile(r"\d[\d.]* s\b|\(this is rank \d+\)")
"""Parts of a message in which ranks with one failure differ."""


class NoIncidentError(ValueError):
    """A folder is no incident; the message is one line."""


def place_of(argument: str) -> Folder | None:
    """Return the folder, or the zip of one, that the argument of a command names; None for a control plane.

    Raises:
        NoIncidentError: It is neither.
    """
    path = Path(argument)
    try:
        if path.is_dir():
            return path
        if path.is_file():
            return _zipped(path)
        if "://" in argument or path.is_socket():
            return None
    except OSError as error:
        raise NoIncidentError(f"{argument}: {error.strerror or error}") from error
    raise NoIncidentError(f"{argument}: no such folder; a url must start with http://, https:// or unix://")


def _zipped(path: Path) -> zipfile.Path:
    """Return the folder in an archive that is an incident or a log, or else its top; unpack nothing."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        what = f"neither a folder nor a zip of one ({error}); unpack another archive first"
        raise NoIncidentError(f"{path}: {what}") from error
    if sum(each.file_size for each in archive.infolist()) > MOST_BYTES:
        raise NoIncidentError(f"{path}: unpacked, it would have more than {MOST_BYTES} bytes")
    top = zipfile.Path(archive)
    inner = (each for each in top.iterdir() if each.is_dir())
    return next((each for each in inner if (each / folders.HEAD).is_file() or is_operation_log(each)), top)


@attrs.frozen
class Incident:
    """An incident that was read.

    Attributes:
        path: Its folder, perhaps in a zip.
        head: The content of ``incident.json``.
        failures: The parts that ranks wrote when they failed, by rank.
        hangs: The parts that ranks wrote while the job waited, by rank.
    """

    path: Folder
    head: dict[str, Any]
    failures: dict[int, dict[str, Any]]
    hangs: dict[int, dict[str, Any]]

    @classmethod
    def read(cls, path: Folder) -> Incident:
        """Read a folder, or a zip of one.

        Raises:
            NoIncidentError: It is no incident, or of another version of dist2, or cannot be read.
        """
        head = _json(path / folders.HEAD)
        if not isinstance(head, dict) or head.get("format") != folders.FORMAT:
            raise NoIncidentError(f"{path} is not an incident of this version of dist2: no {folders.HEAD}")
        try:
            return cls(path, head, _parts(path, "failure"), _parts(path, "hang"))
        except OSError as error:
            raise NoIncidentError(f"{path}: {error.strerror or error}") from error

    @property
    def parts(self) -> dict[int, dict[str, Any]]:
        """The part of each rank: of the hang, which came first, or else of the failure."""
        return dict(sorted((self.failures | self.hangs).items()))

    def answers(self) -> dict[int, Answer]:
        """Return the answer of each rank of the job, as its part has it."""
        parts, outside = self.parts, dict[int, dict[str, Any]]()
        for part in parts.values():
            outside |= {int(rank): seen for rank, seen in part.get("outside", {}).items()}
        world_size = max((part["world_size"] for part in parts.values()), default=0)
        # A part tells the size of the group that failed, which may be smaller than the job.
        ranks = sorted({*range(world_size), *parts, *outside, *self._causes()})
        return {
            rank: Answer(state=parts[rank]["state"])
            if rank in parts
            else Answer(silence=NO_PART, outside=self._with_end(rank, outside.get(rank)))
            for rank in ranks
        }

    def _with_end(self, rank: int, seen: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what is known of a process, with how it ended or that it gave up, if an error says it."""
        errors = [part["error"]["message"] for part in self.failures.values() if part["error"]]
        aborted = re.compile(rf"\brank {rank}(?: \([^;]*?\))? aborted the group \((.*)\)", re.DOTALL)
        reason = next((found[1] for text in errors if (found := aborted.search(text))), "")
        if reason:  # its process may have been seen before its end
            known = seen or {"threads": [], "python": [], "stands": "", "unseen": ""}
            return {**known, "state": "", "words": f"it aborted the group ({reason})", "cause": ""}
        ended = (
            None if seen is None or seen["state"] else re.match(r"process (\d+) has ended$", seen["words"])
        )
        if seen is None or ended is None:
            return seen
        how = end_in(int(ended[1]), errors)
        return {**seen, "words": f"process {ended[1]} {how}"} if how else seen

    def desync(self) -> dict[str, Any]:
        """Return the diagnosis as ``/desync`` has it: that of the control planes, and the failures.

        Failures of the ranks to blame come first. Where these have left none, as a rank that was killed, what
        the others say of them does.
        """
        told: dict[str, Any] | None = _json(self.path / "desync.json")
        if told is None and not self.parts:
            return {**diagnose({}, AFTER_S).document(), "verdict": [NO_PARTS]}
        failures, causes = self._failures(), sorted(self._causes())
        if told is not None:  # failures of a job that waits are consequences
            culprits = told["culprits"] or ([] if told["cycles"] else causes)
            return {**told, "verdict": [*told["verdict"], *failures], "culprits": culprits}
        found = diagnose(self.answers(), AFTER_S).document()
        blamed = () if self.failures.keys() & causes else tuple(f"rank {rank} " for rank in causes)
        first = [
            each for each in found["verdict"] if each.startswith(blamed) and " is waited for by " in each
        ]
        others = [each for each in found["verdict"] if each not in first]
        return {**found, "verdict": [*first, *failures, *others], "culprits": causes or found["culprits"]}

    def stacks(self) -> list[dict[str, Any]]:
        """Return the threads of all ranks, as ``/stacks`` has them."""
        rows = {row["rank"]: row for row in _json(self.path / "stacks.json") or ()}
        known = {row["rank"]: row for row in stack_rows(self.answers())}
        return [rows[rank] if not row["threads"] and rank in rows else row for rank, row in known.items()]

    def job(self) -> dict[str, Any]:
        """Return the state of all ranks, as ``/job`` has it."""
        told: dict[str, Any] | None = _json(self.path / "job.json")
        if told is not None:
            return told
        answers = self.answers()
        return job_document(answers, diagnose(answers, AFTER_S), min(self.parts, default=0), 0.0)

    def _failures(self) -> list[str]:
        words: dict[int, str] = {}
        for rank, part in self.failures.items():
            error = part["error"] or {"type": "failure", "message": part["why"], "shared": False}
            words[rank] = f"{error['type']}: {error['message']}{_place(error)}"
        return failed(words, self._causes())

    def _causes(self) -> set[int]:
        """Return the ranks that failed by themselves, or else those that others blame and that blame none."""
        errors = {rank: part["error"] for rank, part in self.failures.items() if part["error"]}
        alone = {rank for rank, error in errors.items() if not error["blames"] and not error["shared"]}
        blamed = {int(each) for error in errors.values() for each in error["blames"]}
        return alone or {rank for rank in blamed if rank not in errors or not errors[rank]["blames"]}


def failed(words: Mapping[int, str], causes: Collection[int] = ()) -> list[str]:
    """Return a sentence for each failure; ranks with the same one are named together.

    Args:
        words: By rank, type and text of its error.
        causes: The ranks to blame, which come first.
    """
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, text in words.items():
        alike[_OWN.sub("", text)].append(rank)
    some = sorted(alike.values(), key=lambda ranks: (not {*ranks} & {*causes}, len(ranks), ranks))
    return [f"{rank_names(ranks)} failed: {words[ranks[0]]}" for ranks in some]


def _place(error: dict[str, Any]) -> str:
    """Return where an uncaught error was raised; empty if that is in the message."""
    found = re.findall(r'(?m)^  File "(.+?)", line (\d+), in (\S+)', error.get("traceback", ""))
    if not found or error["shared"]:
        return ""
    file, line, function = found[-1]
    return f", raised at {Path(file).name}:{line} in {function}"


def _parts(path: Folder, kind: str) -> dict[int, dict[str, Any]]:
    found = [_json(each) for each in path.iterdir() if re.fullmatch(rf"{kind}-.*\.json", each.name)]
    return {part["rank"]: part for part in sorted(filter(None, found), key=lambda part: part["rank"])}


def _json(path: Folder) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (*UNREADABLE, KeyError, ValueError):  # none, or broken
        return None
