"""The folders of incidents: one for each trouble of a job, bounded in number, size and age.

Ranks of a host find the folder of their job by its name, under a lock on a file beside it. On a shared file
system (``DIST2_INCIDENTS``) the ranks of all hosts do.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from dist2.runtime.config import Config, without_url_users
from observability import token_files
from observability.access import is_loopback

FORMAT = 1
HEAD = "incident.json"
URLS = "control_planes.txt"
"""The control planes of the job, each in a line after its host: other hosts have the same local addresses."""
JOIN_S = 60.0
"""Parts of one job that are written within this time belong to one incident."""
MOST = 32
"""Incidents that are kept."""
MOST_BYTES = 256 << 20
"""Size of all incidents; the oldest are removed."""
SHARE = 8
"""Incidents take at most one such part of a file system: it may be a small one in memory."""
MOST_AGE_S = 14 * 86400.0
LOCK_S = 2.0
PART_BYTES = 8 << 20
"""Size of a file of one rank; a longer one is left out."""
ANSWERS_BYTES = 64 << 20
"""Size of a file with the answers of all ranks: 4,096 ranks have 13 MiB in ``job.json``."""
_NAME = re.compile(r"\d{8}-\d{6}-[\w.-]{1,64}")


@attrs.frozen
class Folder:
    """The folder of an incident.

    Attributes:
        path: Its path.
        is_new: Whether this call has made it.
    """

    path: Path
    is_new: bool


def root_of(config: Config) -> Path | None:
    """Return the folder that incidents are written to; None if they are switched off."""
    if config.incidents == "0":
        return None
    return token_files.folder() / "incidents" if config.incidents is None else Path(config.incidents)


def passing() -> list[Path]:
    """Return where the ranks of a host may meet if no incident is kept, or none can be written."""
    folders = token_files.folder(), token_files.in_memory()
    return [each / "waits" for each in dict.fromkeys(folders)]


def unwritable(root: Path, error: OSError) -> str:
    """Say that no incident can be written to a folder, and the remedy."""
    return (
        f"no incident can be written to {root}: {error.strerror or error}; "
        "set DIST2_INCIDENTS to a folder that has room and is this user's, or to 0 for none"
    )


def joined(root: Path, job: str, name: str) -> Folder:
    """Return the folder of the trouble that a job has now; make it if there is none.

    Args:
        root: Where incidents are.
        job: Equal on all ranks of the job.
        name: Of its first group.

    Raises:
        OSError: It cannot be made.
    """
    with _locked(root):
        known = current(root, job)
        if known is not None:
            add_urls(known, token_files.urls_here())
            return Folder(known, is_new=False)
        slug = re.sub(r"[^\w.]+", "-", name)[:40]
        path = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{_key(job)}"
        path.mkdir(mode=0o700, exist_ok=True)
        head = {"format": FORMAT, "job": job, "name": name, "at_s": time.time()}
        (path / HEAD).write_text(json.dumps(head))
        add_urls(path, token_files.urls_of(job))
        _remove_old(root, path)
        return Folder(path, is_new=True)


def current(root: Path, job: str) -> Path | None:
    """Return the folder of the trouble that a job has now; None if it has none."""
    # The clock may have been set back since.
    return next((path for path in _of_job(root, job) if abs(time.time() - created(path)) < JOIN_S), None)


def latest(root: Path, job: str) -> Path | None:
    """Return the folder of the latest trouble of a job; None if it had none."""
    return next(iter(_of_job(root, job)), None)


def latest_at(root: Path, url: str, after_s: float) -> Path | None:
    """Return the folder of the latest trouble of a job that had a control plane at a URL; None without one.

    Args:
        root: Where incidents are.
        url: Without a path. Another job may have had it before.
        after_s: When the latest control plane there was started, as far as known, in seconds since 1970.
    """
    host, url = socket.gethostname(), url.replace("//localhost", "//127.0.0.1")
    is_local = url.startswith("unix:") or is_loopback(urlsplit(url).hostname or "")
    for path in newest(root):
        known = [line.split(" ", 1) for line in _urls(path)]
        if max(created(path), _noted(path)) >= after_s and any(
            _place(each[-1]) == _place(url) and not (is_local and each[0] != host) for each in known
        ):
            return path
    return None


def add_urls(path: Path, urls: Iterable[str]) -> None:
    """Note control planes of this host of the job of an incident.

    Raises:
        OSError: They cannot be written.
    """
    host = socket.gethostname()
    add_places(path, ((host, url) for url in urls))


def add_places(path: Path, places: Iterable[tuple[str, str]]) -> None:
    """Note control planes of the job of an incident, each with the name of its host.

    Raises:
        OSError: They cannot be written.
    """
    known = set(_urls(path))
    lines = [line for line in dict.fromkeys(f"{host} {url}" for host, url in places) if line not in known]
    if lines:
        with (path / URLS).open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


def _place(url: str) -> str:
    """Return a URL without its scheme, which users get wrong where a job has TLS."""
    return url.partition("://")[2]


def _urls(path: Path) -> list[str]:
    with suppress(OSError):
        return (path / URLS).read_text(errors="replace").splitlines()
    return []


def _noted(path: Path) -> float:
    """Return when a control plane was noted last: a rank may fail while others still start theirs."""
    with suppress(OSError):
        return (path / URLS).stat().st_mtime
    return 0.0


def _of_job(root: Path, job: str) -> list[Path]:
    return sorted(root.glob(f"*-{_key(job)}"), reverse=True)


def _key(job: str) -> str:
    return re.sub(r"[^\w.]", "", job)[:12]


def named(root: Path, folder: str, job: str, name: str) -> Path:
    """Return the folder that another rank has chosen; make it if it is not here.

    Args:
        root: Where incidents are.
        folder: Its name.
        job: Equal on all ranks of the job.
        name: Of its first group.

    Raises:
        ValueError: It is no name of a folder.
        OSError: It cannot be made.
    """
    if not _NAME.fullmatch(folder):
        raise ValueError(f"not a name of an incident: {folder[:80]!r}")
    with _locked(root):
        path = root / folder
        if not path.exists():
            path.mkdir(mode=0o700)
            head = {"format": FORMAT, "job": job, "name": name, "at_s": time.time()}
            (path / HEAD).write_text(json.dumps(head))
            add_urls(path, token_files.urls_of(job))
        else:
            add_urls(path, token_files.urls_here())
        return path


def write(path: Path, data: bytes | str, most: int = PART_BYTES) -> None:
    """Write a file of an incident in one step, unless it is there or has more bytes than ``most``.

    Errors have URLs in their texts, and those may have passwords: these are left out.

    Raises:
        OSError: It cannot be written.
    """
    content = without_url_users(data).encode(errors="replace") if isinstance(data, str) else data
    if path.exists() or len(content) > most:
        return
    # Ranks may be threads of one process, or have equal process ids in containers that share the folder.
    partial = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_native_id()}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.parent == token_files.folder() and not token_files.is_private(root.parent):
        raise PermissionError(f"others have access to {root.parent}")
    root.mkdir(mode=0o700, exist_ok=True)
    if root.lstat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user")
    with os.fdopen(os.open(root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)) as file:
        _lock(file.fileno())
        yield


def _lock(descriptor: int) -> None:
    """Take the lock; go on without it after `LOCK_S`, as the process that has it may be stopped."""
    deadline = time.monotonic() + LOCK_S
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.01)


def newest(root: Path) -> list[Path]:
    """Return the folders of all incidents, the newest first."""
    with suppress(OSError):
        return sorted((path for path in root.iterdir() if (path / HEAD).is_file()), key=created, reverse=True)
    return []


def created(path: Path) -> float:
    """Return when a folder was made, in seconds since 1970; 0 if it does not tell."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((path / HEAD).read_text())["at_s"])
    return 0.0


def _remove_old(root: Path, made: Path) -> None:
    """Remove the oldest incidents beyond the bounds; the one just made stays, whatever the clock says."""
    most, total = min(MOST_BYTES, shutil.disk_usage(root).total // SHARE), 0
    for index, path in enumerate([made, *(each for each in newest(root) if each != made)]):
        total += _size(path)
        is_old = time.time() - created(path) > MOST_AGE_S
        if index and (index >= MOST or total > most or is_old):
            shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    """Return the size of the files of an incident: others may rename or remove them meanwhile."""
    total = 0
    with suppress(OSError):
        for each in path.iterdir():
            with suppress(OSError):
                total += each.lstat().st_size
    return total
