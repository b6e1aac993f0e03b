"""Tokens of the control planes of this host, in files that only their user can read.

``dist2 why URL`` finds the token of a control plane of the same user here, so that it need not be in an
argument, which all users of the host can see. A file is trusted only if the folder and the file belong to
this user and give nobody else access, and only while the process that has written it runs: another process
may listen at the same address afterwards.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

from dist2.runtime.other_process import Process


def folder() -> Path:
    """Return the folder of this user's files."""
    return Path(tempfile.gettempdir()) / f"dist2-{os.getuid()}"


def write(url: str, token: str) -> Path | None:
    """Write the token of a control plane of this process; return the file, or None if that is impossible."""
    text = json.dumps({"url": url, "token": token, "process": Process.here().text})
    with suppress(OSError):
        folder().mkdir(mode=0o700, exist_ok=True)
        if _is_private(folder(), stat.S_ISDIR):
            _remove_stale()
            path = _path_of(url)
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(text)
            return path
    return None


def remove(path: Path) -> None:
    """Remove a file, and the folder if that was the last one."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def token_at(url: str) -> str | None:
    """Return the token of the control plane at a URL, if it runs here and belongs to this user."""
    if not _is_private(folder(), stat.S_ISDIR):
        return None
    return _token_in(_path_of(url))


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    place = parts.netloc.replace("localhost", "127.0.0.1")
    return folder() / f"{quote(f'{parts.scheme}://{place}', safe='')[:200]}.json"


def _token_in(path: Path) -> str | None:
    """Return the token in a file; None if another user may have written it, or its process has ended."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if _is_private(path, stat.S_ISREG):
            held = json.loads(path.read_text())
            process = Process.read(held["process"])
            if process is not None and not process.has_ended:
                return str(held["token"])
    return None


def _remove_stale() -> None:
    """Remove the files of processes that were killed."""
    for path in folder().glob("*.json"):
        if _token_in(path) is None:
            path.unlink(missing_ok=True)


def _is_private(path: Path, is_kind: Callable[[int], bool]) -> bool:
    with suppress(OSError):
        held = path.lstat()
        return is_kind(held.st_mode) and held.st_uid == os.getuid() and not held.st_mode & 0o077
    return False
