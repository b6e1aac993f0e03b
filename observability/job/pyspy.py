"""The stacks of this process as ``py-spy dump`` prints them: by py-spy where it is installed and permitted.

py-spy reads the memory of the process from outside, so it can show native frames and does not need the
interpreter lock; the kernel may refuse that (Yama, containers). Then this process prints its own stacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from platform import python_version
from typing import Any

from observability.job.foreign_stacks import pyspy
from observability.job.stacks import stacks

FLAGS = ("native", "subprocesses", "nonblocking")
"""Options of py-spy that torch's debug server passes as parameters."""


def pyspy_dump(parameters: Mapping[str, str]) -> str:
    """Return the stacks of all threads.

    Args:
        parameters: `FLAGS`, each on if its value is neither empty nor ``0``.
    """
    flags = [f"--{flag}" for flag in FLAGS if parameters.get(flag, "") not in ("", "0")]
    text, reason = pyspy(os.getpid(), *flags)
    return text or _own_dump(reason)


def _own_dump(why: str) -> str:
    """Return the stacks of the Python threads in the form of py-spy."""
    head = (
        f"Process {os.getpid()}: {' '.join([sys.executable, *sys.argv])}",
        f"Python v{python_version()} ({sys.executable})",
        f"{why}; Python frames only",
    )
    return "\n\n".join(["\n".join(head), *map(_thread, stacks())]) + "\n"


def _thread(thread: dict[str, Any]) -> str:
    frames = [f"    {each['name']} ({Path(each['file']).name}:{each['line']})" for each in thread["frames"]]
    return "\n".join([f'Thread {thread["native_id"] or "?"}: "{thread["name"]}"', *frames])
