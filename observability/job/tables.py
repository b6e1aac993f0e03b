"""The answers of all ranks as tables for SQL: pure functions of the documents of control planes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]
Row = dict[str, Any]

TABLES: dict[str, dict[str, str]] = {
    "ranks": {
        "rank": "BIGINT",
        "state": "VARCHAR",
        "host": "VARCHAR",
        "pid": "BIGINT",
        "version": "VARCHAR",
        "place": "VARCHAR",
        "silence": "VARCHAR",
        "in_flight": "BIGINT",
        "clock_offset_s": "DOUBLE",
        "url": "VARCHAR",
    },
    "groups": {
        "rank": "BIGINT",
        "group_name": "VARCHAR",
        "uid": "VARCHAR",
        "group_rank": "BIGINT",
        "ranks": "VARCHAR",
        "state": "VARCHAR",
        "begun": "BIGINT",
        "last_op": "VARCHAR",
        "last_seq": "BIGINT",
        "operations": "BIGINT",
        "bytes": "BIGINT",
        "bus_bytes": "BIGINT",
    },
    "operations": {
        "rank": "BIGINT",
        "group_name": "VARCHAR",
        "uid": "VARCHAR",
        "op": "VARCHAR",
        "seq": "BIGINT",
        "state": "VARCHAR",
        "call": "VARCHAR",
        "bytes": "BIGINT",
        "called_s": "DOUBLE",
        "duration_s": "DOUBLE",
        "queued_s": "DOUBLE",
        "error": "VARCHAR",
    },
    "waits": {
        "group_name": "VARCHAR",
        "op": "VARCHAR",
        "seq": "BIGINT",
        "call": "VARCHAR",
        "called_at": "VARCHAR",
        "age_s": "DOUBLE",
        "rank": "BIGINT",
        "missing_rank": "BIGINT",
        "missing_stands": "VARCHAR",
    },
    "failures": {
        "rank": "BIGINT",
        "group_name": "VARCHAR",
        "call": "VARCHAR",
        "error": "VARCHAR",
        "message": "VARCHAR",
    },
    "steps": {
        "rank": "BIGINT",
        "loop": "VARCHAR",
        "number": "BIGINT",
        "ended_s": "DOUBLE",
        "step_s": "DOUBLE",
        "operations_s": "DOUBLE",
        "waited_s": "DOUBLE",
        "usual_s": "DOUBLE",
    },
    "events": {
        "at_s": "DOUBLE",
        "level": "VARCHAR",
        "rank": "BIGINT",
        "message": "VARCHAR",
        "waited_s": "DOUBLE",
    },
    "stacks": {
        "rank": "BIGINT",
        "thread": "VARCHAR",
        "main": "BOOLEAN",
        "depth": "BIGINT",
        "file": "VARCHAR",
        "line": "BIGINT",
        "function": "VARCHAR",
    },
    "stragglers": {
        "rank": "BIGINT",
        "group_name": "VARCHAR",
        "late_s": "DOUBLE",
        "share": "DOUBLE",
        "operations": "BIGINT",
        "is_straggler": "BOOLEAN",
        "is_judged": "BOOLEAN",
    },
}
"""Columns of each table, with their types."""


def tables_of(
    job: Document, stacks: Iterable[Document], timelines: Iterable[Document], stragglers: Document | None
) -> dict[str, list[Row]]:
    """Return the rows of each table.

    Args:
        job: The answer of ``/job``.
        stacks: The rows of ``/stacks``.
        timelines: The last operations of each rank, as ``/timeline`` has them.
        stragglers: The answer of ``/stragglers``; None without one.
    """
    answered = [rank for rank in job["ranks"] if rank["state"] != "silent"]
    return {
        "ranks": [_rank(rank) for rank in job["ranks"]],
        "groups": [_group(rank["rank"], group) for rank in answered for group in rank["groups"]],
        "operations": [row for timeline in timelines for row in _operations(timeline)],
        "waits": [row for waiting in job["waiting"] for row in _waits(waiting)],
        "failures": [_failure(rank["rank"], each) for rank in answered for each in rank["failures"]],
        "steps": [row for rank in answered for row in _steps(rank)],
        "events": [{name: each[name] for name in TABLES["events"]} for each in job.get("events", ())],
        "stacks": [row for rank in stacks for row in _frames(rank)],
        "stragglers": [] if stragglers is None else list(_stragglers(stragglers)),
    }


def _rank(rank: Document) -> Row:
    known = {name: rank.get(name) for name in ("rank", "state", "host", "pid", "version", "silence", "url")}
    place = (rank.get("main") or {}).get("place")
    offset_s = rank.get("clock_offset_s")
    return {**known, "place": place, "in_flight": rank.get("in_flight_count"), "clock_offset_s": offset_s}


def _group(rank: int, group: Document) -> Row:
    last, traffic = group["last"] or {}, group["traffic"] or {}
    return {
        "rank": rank,
        "group_rank": group["rank"],
        "group_name": group["name"],
        **{name: group[name] for name in ("uid", "ranks", "state", "begun")},
        "last_op": last.get("op"),
        "last_seq": last.get("seq"),
        **{name: traffic.get(name) for name in ("operations", "bytes", "bus_bytes")},
    }


def _operations(timeline: Document) -> Iterator[Row]:
    groups = timeline["groups"]
    for each in timeline["slices"]:
        end_ns = each["finished_ns"] or timeline["taken_ns"]
        yield {
            "rank": timeline["rank"],
            "group_name": groups[each["group"]]["name"],
            "uid": groups[each["group"]]["uid"],
            **{name: each[name] for name in ("op", "seq", "state", "call")},
            "bytes": each["nbytes"],
            "called_s": (each["created_ns"] + timeline["epoch_offset_ns"]) / 1e9,
            "duration_s": max(0, end_ns - each["created_ns"]) / 1e9,
            "queued_s": max(0, (each["started_ns"] or end_ns) - each["created_ns"]) / 1e9,
            "error": each["error"] or None,
        }


def _waits(waiting: Document) -> Iterator[Row]:
    common = {name: waiting[name] for name in ("op", "call", "age_s", "seq")}
    for rank in waiting["ranks"]:
        for missing in waiting["missing"] or [{"rank": None, "stands": None}]:
            yield {
                **common,
                "group_name": waiting["group"],
                "called_at": waiting["where"],
                "rank": rank,
                "missing_rank": missing["rank"],
                "missing_stands": missing["stands"],
            }


def _failure(rank: int, failure: Document) -> Row:
    known = {name: failure[name] for name in ("call", "error", "message")}
    return {"rank": rank, "group_name": failure["group"], **known}


def _steps(rank: Document) -> Iterator[Row]:
    for loop in rank.get("steps", ()):
        for step in loop["latest"]:
            times = {name: step[name] for name in ("number", "ended_s", "step_s", "operations_s", "waited_s")}
            usual_s = loop["typical"]["step_s"]
            yield {"rank": rank["rank"], "loop": loop["name"], **times, "usual_s": usual_s}


def _frames(rank: Document) -> Iterator[Row]:
    for thread in rank["threads"] or ():
        for depth, frame in enumerate(thread["frames"]):
            yield {
                "rank": rank["rank"],
                "thread": thread["name"],
                "main": thread["main"],
                "depth": depth,
                "file": frame["file"],
                "line": frame["line"],
                "function": frame["name"],
            }


def _stragglers(found: Document) -> Iterator[Row]:
    named = {(each["rank"], each["group"]) for each in found["stragglers"]}
    for each in found["ranking"]:
        known = {name: each[name] for name in ("rank", "late_s", "share", "operations")}
        yield {
            **known,
            "group_name": each["group"],
            "is_straggler": (each["rank"], each["group"]) in named,
            "is_judged": each.get("judged", True),  # earlier versions do not tell
        }
