"""The control planes of this host with their tokens, in files that only their user can read.

``dist2 ps`` lists the jobs of these files. ``dist2 why URL`` finds the token of a control plane of the same
user here, so that it need not be in an argument, which all users of the host can see. A file is trusted only
if the folder and the file belong to this user and give nobody else access, and only while the process that
has written it runs: another process may listen at the same address afterwards.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

import attrs

from dist2.runtime.config import MEMORY, environment_value, temporary_folder
from dist2.runtime.other_process import Process

NAMES = 8
"""Names of the folder of a user, of which other users may have taken some."""
_here: deque[str] = deque(maxlen=16)
"""The latest control planes of this process, also those that it has closed."""


@attrs.frozen
class Job:
    """The job that a control plane belongs to.

    Attributes:
        uid: Of the group that it was started with: equal on all ranks.
        name: Of that group.
        rank: The rank in the job; -1 for the page of a launcher.
        world_size: Number of ranks.
        program: The program, in a line.
        meeting: Where a launcher has the ranks meet, ``MASTER_ADDR`` and ``MASTER_PORT``; empty without one.
    """

    uid: str = ""
    name: str = ""
    rank: int = 0
    world_size: int = 1
    program: str = ""
    meeting: str = ""


@attrs.frozen
class ControlPlaneFile:
    """The content of a file.

    Attributes:
        url: Where the control plane listens.
        token: Its token.
        process: The process that has written the file.
        job: Its job.
    """

    url: str
    token: str = attrs.field(repr=False)
    process: Process
    job: Job


def folder() -> Path:
    """Return the folder of this user's files."""
    return _of_user(temporary_folder())


def in_memory() -> Path:
    """Return a folder of this user that needs no disk."""
    return _of_user(MEMORY)


def _of_user(folder: str) -> Path:
    """Return the first of a few names that is this user's, or free: another user may have taken one."""
    name = f"dist2-{os.getuid()}"
    paths = [Path(folder) / name, *(Path(folder) / f"{name}.{number}" for number in range(1, NAMES))]
    mine = (path for path in paths if is_private(path))
    return next(mine, None) or next((path for path in paths if not os.path.lexists(path)), paths[0])


def is_private(folder: Path) -> bool:
    """Whether a folder is of this user, and gives nobody else access."""
    return _is_private(folder, stat.S_ISDIR)


def write(url: str, token: str, job: Job | None = None) -> Path | None:
    """Write the token of a control plane of this process; return the file, or None if that is impossible."""
    _here.append(url)
    process = Process.here().text
    text = json.dumps({"url": url, "token": token, "process": process, "job": attrs.asdict(job or Job())})
    with suppress(OSError):
        folder().mkdir(mode=0o700, exist_ok=True)
        if is_private(folder()):
            _remove_stale()
            path = _path_of(url)
            # In one step: another process would remove a file that has no content yet as stale.
            partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(text)
            partial.replace(path)
            return path
    return None


def remove(path: Path) -> None:
    """Remove a file, and the folder if that was the last one."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def token_at(url: str) -> str | None:
    """Return the token of the control plane at a URL, if it runs here and belongs to this user."""
    if not is_private(folder()):
        return None
    held = _content_of(_path_of(url))
    return None if held is None else held.token


def left_at(url: str) -> float:
    """Return when the file of a control plane was written; 0 without one, as after an exit of its process."""
    with suppress(OSError):
        return _path_of(url).stat().st_mtime
    return 0.0


def urls_here() -> list[str]:
    """Return the latest control planes of this process, also those that it has closed."""
    return list(_here)


def meeting_here() -> str:
    """Return where a launcher has the ranks of this process meet; empty without one."""
    host, port = environment_value("MASTER_ADDR"), environment_value("MASTER_PORT")
    return f"{host}:{port}" if host and port else ""


def urls_of(job: str) -> list[str]:
    """Return the control planes of a job on this host that run or were killed, and those of this process.

    The page of a launcher knows the job by the meeting only, until its ranks have made a group.
    """
    files = folder().glob("*.json") if is_private(folder()) else ()
    known = [each for each in map(_read, files) if each is not None]
    meeting = meeting_here()
    pages = [each.url for each in known if each.job.rank < 0 and each.job.meeting == meeting != ""]
    return [*_here, *(each.url for each in known if each.job.uid == job), *pages]


def control_planes() -> list[ControlPlaneFile]:
    """Return the control planes of this user and host whose processes run."""
    if not is_private(folder()):
        return []
    found, space = map(_content_of, sorted(folder().glob("*.json"))), Process.here().space
    return [each for each in found if each is not None and each.process.space == space]


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    place = parts.netloc.replace("localhost", "127.0.0.1")
    return folder() / f"{quote(f'{parts.scheme}://{place}', safe='')[:200]}.json"


def _content_of(path: Path) -> ControlPlaneFile | None:
    """Return the content of a file; None if another user may have written it, or its process has ended."""
    held = _read(path)
    return None if held is None or held.process.has_ended else held


def _read(path: Path) -> ControlPlaneFile | None:
    """Return the content of a file; None if another user may have written it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if _is_private(path, stat.S_ISREG):
            held = json.loads(path.read_text())
            process = Process.read(held["process"])
            if process is not None:
                job = Job(**held.get("job", {}))
                return ControlPlaneFile(str(held["url"]), str(held["token"]), process, job)
    return None


def _remove_stale() -> None:
    """Remove the files of processes that were killed."""
    for path in folder().glob("*.json"):
        if _content_of(path) is None:
            path.unlink(missing_ok=True)


def _is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    with suppress(OSError):
        held = path.lstat()
        return is_kind(held.st_mode) and held.st_uid == os.getuid() and not held.st_mode & 0o077
    return False
