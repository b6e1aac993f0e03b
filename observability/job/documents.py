"""The answers of `/job` and `/stacks`: pure functions of the answers of the ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from observability.job.answer import Answer, Answers, State
from observability.job.steps import slow_step
from observability.job.verdict import Diagnosis

MAX_EVENTS = 32


def job_document(answers: Answers, found: Diagnosis, asked_rank: int, took_s: float) -> dict[str, Any]:
    """Return the answer of `/job`."""
    trouble = found.document()
    waiting = {rank for each in found.waiting for rank in each.ranks}
    answers = {rank: answer for rank, answer in answers.items() if rank not in found.left}
    return {
        "slow_step": slow_step(answers),
        "world_size": len(answers),
        "asked_rank": asked_rank,
        "answered": sum(answer.state is not None for answer in answers.values()),
        "took_s": took_s,
        **{name: trouble[name] for name in ("verdict", "culprits", "waiting")},
        "events": _events(answers),
        "ranks": [_row(rank, answer, found, waiting) for rank, answer in answers.items()],
    }


def _events(answers: Answers) -> list[dict[str, Any]]:
    """Return the last lines about waits of the job that any rank has logged, the oldest first."""
    states = [each.state for each in answers.values() if each.state is not None]
    lines: list[dict[str, Any]] = [line for state in states for line in state.get("events", ())]
    return sorted(lines, key=lambda line: line["at_s"])[-MAX_EVENTS:]


def stack_rows(answers: Answers) -> list[dict[str, Any]]:
    """Return the threads of each rank, or why they are not known: the rows of `/stacks`."""
    return [
        {
            "rank": rank,
            "threads": _threads(answer),
            "silence": answer.why_silent or None,
            "process": answer.outside,
        }
        for rank, answer in answers.items()
    ]


def _threads(answer: Answer) -> list[dict[str, Any]] | None:
    """Return the Python threads of a rank, by itself or seen from outside; None if they are unknown."""
    if answer.state is not None:
        threads: list[dict[str, Any]] = answer.state["threads"]
        return threads
    return list((answer.outside or {}).get("python", ())) or None


def _row(rank: int, answer: Answer, found: Diagnosis, waiting: Collection[int]) -> dict[str, Any]:
    """Return the row of a rank in `/job`; ``waiting`` has the ranks inside of operations that wait."""
    common = {"rank": rank, "url": answer.url or None}
    state = answer.state
    if state is None:
        host = {"host": answer.host} if answer.host else {}
        return {**common, **host, "state": "silent", "silence": answer.why_silent, "process": answer.outside}
    return {
        **common,
        "state": _condition(rank, state, found, waiting),
        "at_s": state["epoch_ns"] / 1e9,
        "clock_offset_s": answer.offset_s,
        "clock_error_s": answer.error_s,
        **{name: state[name] for name in ("host", "pid", "version", "main", "failures")},
        "groups": [
            {**{name: group[name] for name in ("name", "rank", "ranks", "state", "begun")}, "uid": uid}
            | {"last": _last(group), "traffic": group.get("traffic")}
            for uid, group in state["groups"].items()
        ],
        "steps": state.get("steps", []),
        "in_flight": state["in_flight"],
        "in_flight_count": state["in_flight_count"],
    }


def _last(group: State) -> dict[str, Any] | None:
    """Return the last collective of a group, as far as pages and commands show it."""
    last = next(iter(group["recent"]), None)
    return None if last is None else {name: last[name] for name in ("op", "seq", "call", "where", "state")}


def _condition(rank: int, state: State, found: Diagnosis, waiting: Collection[int]) -> str:
    """Return how a rank is, in a word or two."""
    if any(group["state"] == "broken" for group in state["groups"].values()):
        return "broken"
    if rank in found.culprits:
        return "waited for"
    return "waiting" if rank in waiting else "ok"
