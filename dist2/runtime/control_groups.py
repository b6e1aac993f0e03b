"""The control groups of this process: each level may have a limit of its own, and the least counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders that may limit what a controller counts, the innermost first, and their version.

    Version 1 has the groups of each controller in a folder of its own.

    Args:
        controller: ``cpu`` or ``memory``.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, version = (ROOT / controller, 1) if controllers else (ROOT, 2)
        path = Path(own.lstrip("/"))
        # A container may have its own group at the root, and be told the path on its host.
        for group in (path, *path.parents):
            yield top / group, version
