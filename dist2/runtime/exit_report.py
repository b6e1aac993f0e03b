"""The error that ended a rank, in a file for the launcher of the job.

A launcher names the file in ``TORCHELASTIC_ERROR_FILE``. Its format is that of torch.distributed.elastic: so
torchrun shows the error too. ``blames`` is ours: the ranks of the job that the error names as its cause.
"""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path

import attrs

from dist2.errors import Dist2Error, GroupRevokedError, OperationTimeoutError, PeerLostError
from dist2.runtime.config import environment_value

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_TEXT_CHARS = 2000

incident = ""
"""The folder with the evidence of the failure of this process, for the launcher; empty for none."""


@attrs.frozen
class ExitReport:
    """The end of a rank.

    Attributes:
        words: Type and text of the error, and its notes.
        blames: Ranks of the job that it names as its cause.
        incident: The folder with the evidence; empty where there is none.
    """

    words: str
    blames: tuple[int, ...] = ()
    incident: str = ""


def report(error: BaseException) -> None:
    """Write an error that ends this process to the file that the launcher named, unless there is one."""
    path = environment_value(VARIABLE)
    if not path or isinstance(error, (SystemExit, KeyboardInterrupt)):
        return
    notes = getattr(error, "__notes__", ())  # such as the verdict for which a group was aborted
    words = "; ".join([f"{type(error).__name__}: {error}", *map(str, notes)])[:_TEXT_CHARS]
    stack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    content = {
        "message": {"message": words, "extraInfo": extra},
        "blames": blamed(error),
        "incident": incident,
    }
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
        return ExitReport(words, blames, str(content.get("incident", "")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


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
