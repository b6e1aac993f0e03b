"""Made-up answers of ``/job``, their frames as text, and the output of a terminal."""

from __future__ import annotations

import errno
import os
import select
import time
from typing import Any

from rich.console import Console

from observability.commands.job_table import Frame

SOON_S = 20.0
WIDTH = 160


def text_of(frame: Frame, most_rows: int | None = None, width: int = WIDTH) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(frame.render(most_rows, width))
    return captured.get()


def operation(seq: int, age_s: float = 0.0) -> dict[str, Any]:
    return {"uid": "u", "group": "dp", "op": "all_reduce", "seq": seq, "p2p": False, "age_s": age_s}


def rank(
    number: int, at_s: float, operations: int, nbytes: int, name: str = "dp", **fields: Any
) -> dict[str, Any]:
    traffic = {"operations": operations, "bytes": nbytes, "bus_bytes": 2 * nbytes}
    group = {"uid": "u", "name": name, "state": "open", "last": operation(7), "traffic": traffic}
    row = {"rank": number, "state": "ok", "url": None, "pid": 4, "at_s": at_s, "groups": [group]}
    return {**row, "in_flight": [], **fields}


def job(*ranks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answered = sum(each["state"] != "silent" for each in ranks)
    whole = {"world_size": len(ranks), "answered": answered, "verdict": [], "waiting": []}
    return {**whole, "ranks": list(ranks), **fields}


def read_until(terminal: int, wanted: str) -> str:
    """Return the output of a program up to some words; up to its end if they are empty."""
    seen, deadline = b"", time.monotonic() + SOON_S
    while not wanted or wanted.encode() not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError as error:
                assert error.errno == errno.EIO
                part = b""
            if not part:
                break
            seen += part
    assert wanted.encode() in seen, seen
    return seen.decode(errors="replace")
