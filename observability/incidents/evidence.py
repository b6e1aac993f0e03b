"""The part of one rank in an incident: all that this process knows, as plain data."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch

from dist2.errors import (
    CorruptionError,
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousError,
)
from dist2.group.open_groups import open_groups
from dist2.operation.signature import GroupInfo
from dist2.runtime.config import shown_environment
from dist2.runtime.control_groups import control_groups
from dist2.runtime.exit_report import blamed
from dist2.runtime.other_process import Process
from dist2.runtime.rank_names import host_and_pid
from observability import metrics
from observability.exposition import dist2_version
from observability.flight_recorder import Recording, encode, global_rank
from observability.flight_recorder import instrument as recorder
from observability.incidents import folders
from observability.job.answer import Answers
from observability.job.documents import job_document, stack_rows
from observability.job.stacks import MAX_FRAMES, kernel_view, look_at_pid, stacks
from observability.job.state import HISTORY, Witness
from observability.job.verdict import Diagnosis
from observability.job.workers import told_workers
from observability.tracing import timeline_of

TRACE_S = 60.0
DUMPED = 512
"""Operations of a dump and of the trace, at most: to write more would hold up the error that is raised."""
LOOKED_AT = 4
"""Other ranks whose processes are looked at, which may take a second each."""
SHARED = (
    CorruptionError,
    GroupAbortedError,
    GroupRevokedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    RendezvousError,
)
"""Errors that ranks raise together: a rank that raises one is not the cause for that."""
UNLIMITED_KB = 1 << 50
"""The first version of control groups has a large number where there is no limit."""
DUMP = "flight_"
"""Prefix of the dumps for torchfrtrace, which end with the rank."""


def write_part(
    folder: Path,
    kind: str,
    info: GroupInfo,
    why: str,
    error: BaseException | None,
    *,
    looks: bool = False,
    for_s: float = 0.0,
) -> None:
    """Write the part of a rank, unless it has written one of this kind.

    Args:
        folder: Of the incident.
        kind: ``failure`` or ``hang``.
        info: The group whose rank names this process.
        why: What has happened, in a line.
        error: The error that is the reason.
        looks: Whether to look at the processes of other ranks that the error blames: one rank does.
        for_s: For how long the main thread is known to have been where it is.

    Raises:
        OSError: It cannot be written.
    """
    rank = global_rank(info)
    path = folder / f"{kind}-{rank}.json"
    if path.exists():
        return
    recording = recorder.recording(rank)
    last = attrs.evolve(recording, operations=recording.operations[-DUMPED:])
    part = part_of(info, why, error, last, for_s)
    if looks and error is not None:
        part["outside"] = seen_from_here(info, blamed(error)[:LOOKED_AT])
    folders.write(path, json.dumps(part, default=repr))
    folders.write(folder / f"{DUMP}{rank}", encode(last))


def write_answers(folder: Path, answers: Answers, found: Diagnosis, asked_rank: int, took_s: float) -> None:
    """Write the answers of all ranks, and what was found in them.

    Args:
        folder: The folder of the incident.
        answers: By rank.
        found: Their diagnosis.
        asked_rank: The rank that has gathered them.
        took_s: How long that took.

    Raises:
        OSError: They cannot be written.
    """
    documents = {
        "job": _text(job_document(answers, found, asked_rank, took_s)),
        "stacks": _most_wanted(stack_rows(answers), found.culprits),
        "desync": _text(found.document()),  # last: ranks that wait for the verdict may end the job
    }
    for name, document in documents.items():
        folders.write(folder / f"{name}.json", document, folders.ANSWERS_BYTES)


def _text(document: object) -> str:
    return json.dumps(document, default=repr)


def _most_wanted(rows: list[dict[str, Any]], culprits: Collection[int]) -> str:
    """Return as many rows as have room, those of the culprits first; each rank has its own in its part."""
    size, found = 0, list[str]()
    for row in sorted(rows, key=lambda row: row["rank"] not in culprits):
        text = _text(row)
        size += len(text)
        if size > folders.ANSWERS_BYTES // 2:
            break
        found.append(text)
    return f"[{', '.join(found)}]"


def witness_of(info: GroupInfo | None) -> Witness:
    """Return what describes this process, as a rank of a group."""
    thread_id = threading.main_thread().ident or 0
    return Witness(metrics.instrument, recorder, thread_id, lambda: info, Process.here())


def part_of(
    info: GroupInfo, why: str, error: BaseException | None, last: Recording, for_s: float = 0.0
) -> dict[str, Any]:
    """Return the part of a rank as plain data; the arguments are those of `write_part`."""
    witness = witness_of(info)
    state = witness.state(HISTORY)
    state["threads"] = stacks()
    state["main"]["for_s"] = for_s
    if error is None and not state["in_flight"]:  # the job waits, perhaps for this rank
        state["main"]["workers"] = told_workers(witness.thread_id)
    if (
        error is not None
        and state["main"]["library"] in ("observability", "dist2")
        and not state["in_flight"]
    ):
        _show_raised(state, error)
    for uid, traffic in witness.traffic().items():
        state["groups"].get(uid, {})["traffic"] = traffic
    return {
        "format": folders.FORMAT,
        "rank": global_rank(info),
        "world_size": len(info.global_ranks),
        "at_s": time.time(),
        "why": why,
        "error": None if error is None else _error(error),
        "state": state,
        "timeline": timeline_of(last, time.monotonic_ns() - int(TRACE_S * 1e9)).document(),
        "kernel": {
            "process": {**attrs.asdict(kernel_view(os.getpid())), "cause": ""},  # it runs: it is here
            "load": os.getloadavg(),
            **_memory(),
        },
        "versions": _versions(),
        "program": sys.argv[:1],
        "environment": shown_environment(),
    }


def _show_raised(state: dict[str, Any], error: BaseException) -> None:
    """Have the main thread stand where it raised the error that ends the process: it is at exit by now."""
    raised = [
        {"name": each.name, "file": each.filename, "line": each.lineno or 0}
        for each in reversed(traceback.extract_tb(error.__traceback__, MAX_FRAMES))
    ]
    if not raised:
        return
    first = raised[0]
    place = f"{Path(str(first['file'])).name}:{first['line']} in {first['name']}"
    state["main"] |= {"place": place, "file": first["file"], "line": first["line"], "inside": None}
    for thread in state["threads"]:
        if thread["main"]:
            thread["frames"] = raised


def _error(error: BaseException) -> dict[str, Any]:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Dist2Error):
        cause = cause.__cause__ or cause.__context__
    return {
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "traceback": "".join(traceback.format_exception(error))[-20_000:],
        "blames": blamed(error),
        "shared": isinstance(cause, SHARED),
    }


def seen_from_here(info: GroupInfo, ranks: Iterable[int]) -> dict[str, Any]:
    """Return how the processes of other ranks look, where they are of this host: they may write nothing."""
    group = next((each for each in open_groups() if each.info is info), None)
    if group is None:
        return {}
    found, process_of = {}, group.backend.names.process_of
    for rank in ranks:
        told = process_of(info.global_ranks.index(rank)) if rank in info.global_ranks else ""
        pid = int(told.rpartition(" ")[2]) if told else 0
        if pid and pid != os.getpid() and told == host_and_pid(socket.gethostname(), pid):
            found[str(rank)] = attrs.asdict(look_at_pid(pid))
    return found


def _memory() -> dict[str, str]:
    """Return the memory of this process, of the host and of the control group that has the least limit."""
    wanted = {
        "/proc/self/status": ("VmRSS", "VmSwap", "Threads"),
        "/proc/meminfo": ("MemAvailable", "SwapFree"),
    }
    found: dict[str, str] = {}
    for path, names in wanted.items():
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        found |= {name: fields[name].strip() for name in names if name in fields}
    limits = sorted(_memory_limits())
    if limits:
        limit_kb, used_kb = limits[0]
        found |= {"GroupLimit": f"{limit_kb} kB", "GroupUsed": f"{used_kb} kB"}
    return found


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in kB, of each control group of this process that has a limit of memory."""
    for group, version in control_groups("memory"):
        limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limit_kb = int((group / f"memory.{limit}").read_text()) >> 10
            if limit_kb < UNLIMITED_KB:
                yield limit_kb, int((group / f"memory.{used}").read_text()) >> 10


def _versions() -> dict[str, str]:
    return {
        "dist2": dist2_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
