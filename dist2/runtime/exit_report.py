"""The error that ended a rank, in a file for the launcher of the job.

A launcher names the file in ``TORCHELASTIC_ERROR_FILE``. Its format is that of torch.distributed.elastic: so
torchrun shows the error too. ``blames`` is ours: the ranks of the job that the error names as its cause. The
folder with the evidence of a trouble is in a file beside it as soon as it is known: a rank may handle the
error and end by `sys.exit`, or be killed.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import attrs

from dist2.errors import Dist2Error, GroupRevokedError, OperationTimeoutError, PeerLostError
from dist2.runtime.config import environment_value

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_TEXT_CHARS = 2000

_INCIDENT = ".incident"
"""What the name of the file beside it ends with."""


@attrs.frozen
class ExitReport:
    """The end of a rank.

    Attributes:
        words: Type and text of the error, and its notes.
        blames: Ranks of the job that it names as its cause.
    """

    words: str
    blames: tuple[int, ...] = ()


def report(error: BaseException) -> None:
    """Write an error that ends this process to the file that the launcher named, unless there is one."""
    path = environment_value(VARIABLE)
    if not path or isinstance(error, (SystemExit, KeyboardInterrupt)):
        return
    notes = getattr(error, "__notes__", ())  # such as the verdict for which a group was aborted
    words = "; ".join([f"{type(error).__name__}: {error}", *map(str, notes)])[:_TEXT_CHARS]
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    content = {"message": {"message": words, "extraInfo": extra}, "blames": blamed(error)}
    try:
        with Path(path).open("x") as file:
            json.dump(content, file)
    except OSError:
        return  # torch's `record` has written it, or the launcher is gone: the error is on standard error too


def read_report(path: Path) -> ExitReport | None:
    """Return the report of a rank; None if it has written none that can be read."""
    try:
        content = json.loads(path.read_text())
        words = str(content["message"]["message"])
        blames = tuple(int(rank) for rank in content.get("blames", ()))
        return ExitReport(words, blames)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def note_incident(folder: str) -> None:
    """Tell the launcher the folder with the evidence of a trouble of this rank; empty takes it back."""
    path = environment_value(VARIABLE)
    if path:
        with suppress(OSError):  # the launcher is gone: the folder is in the log too
            Path(f"{path}{_INCIDENT}").write_text(folder)


def latest_incident(paths: Iterable[Path]) -> str:
    """Return the folder that one of several ranks has noted last; empty if none has."""
    noted: list[tuple[float, str]] = []
    for path in paths:
        with suppress(OSError, ValueError):
            beside = Path(f"{path}{_INCIDENT}")
            noted.append((beside.stat().st_mtime, beside.read_text()))
    return max(((at_s, folder) for at_s, folder in noted if folder), default=(0.0, ""))[1]


def blamed(error: BaseException | None) -> list[int]:
    """Return the ranks of the job that an error, or one that it was raised from, names as its cause."""
    while error is not None and not isinstance(error, Dist2Error):
        error = error.__cause__ or error.__context__
    match error:
        case OperationTimeoutError():
            return list(error.global_missing)
        case PeerLostError():
            return list(error.global_ranks)
        case GroupRevokedError():
            return [error.global_by]
    return []
