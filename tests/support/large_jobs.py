"""Answers of ``/job`` of large jobs that are not there, for the page."""

from __future__ import annotations

from typing import Any

TP, PP, HOST = 8, 4, 8
DIVERGES = (
    "ranks 8, 10-15: all_reduce(float32[4096], op=sum) at train.py:77; rank 9: barrier() at train.py:41"
)


def job_of(world_size: int, state: str = "run") -> dict[str, Any]:
    """Return the state of a job with tensor, pipeline and data groups.

    Args:
        world_size: Number of ranks, a multiple of 32.
        state: ``run``, ``hang`` (two ranks are missing), ``broken`` (one called something else) or ``dead``
            (one was killed).
    """
    culprits = {"run": [], "hang": [5, 29], "broken": [9], "dead": [21]}[state]
    ranks = [_rank(rank, world_size, state, culprits) for rank in range(world_size)]
    waits = "in all_reduce #812 of its group for 12.1 s: its main thread is at train.py:41 in load"
    verdict = [f"rank {rank} is waited for by 7 ranks {waits}" for rank in culprits]
    if state == "broken":
        verdict = [f"group tp-1 diverges at operation #812: {DIVERGES}"]
    slow = "step 100 took 1.90 s instead of 410 ms: rank 5 computed for 1.71 s instead of 220 ms"
    return {
        "name": "training",
        "slow_step": slow if state == "run" else None,
        "world_size": world_size,
        "asked_rank": 0,
        "answered": world_size - (state == "dead"),
        "took_s": 0.21,
        "verdict": verdict,
        "culprits": culprits,
        "waiting": _waiting(ranks, culprits),
        "ranks": ranks,
    }


def _waiting(ranks: list[dict[str, Any]], culprits: list[int]) -> list[dict[str, Any]]:
    """Return what the ranks that are inside of an operation wait for."""
    inside = {work["uid"]: work for rank in ranks for work in rank.get("in_flight", ())}
    missing = {f"tp-{rank // TP}": [{"rank": rank}] for rank in culprits}
    return [
        {**work, "caller": -1, "missing": missing.get(uid, []), "more": 0} for uid, work in inside.items()
    ]


def _rank(rank: int, world_size: int, state: str, culprits: list[int]) -> dict[str, Any]:
    common = {"rank": rank, "url": f"http://127.0.0.1:{20000 + rank}", "host": f"node-{rank // HOST:03}"}
    if state == "dead" and rank in culprits:
        process = {"state": "", "words": "process 4242 was killed by SIGKILL", "cause": ""}
        return {**common, "state": "silent", "silence": "connection refused", "process": process}
    waits = state in ("hang", "dead") and rank not in culprits
    condition = "waited for" if rank in culprits else "waiting" if waits else "ok"
    if state == "broken" and rank // TP == 1:
        condition = "broken"
    groups = [_group(*each, rank, condition) for each in _dimensions(rank, world_size)]
    in_flight = [_operation(groups[0])] if waits else []
    return {
        **common,
        "state": condition,
        "at_s": 1000.0,
        "clock_offset_s": 0.0,
        "clock_error_s": 0.0001,
        "pid": 4000 + rank,
        "version": "0.1.0",
        "main": {"place": "train.py:41 in load" if rank in culprits else "train.py:77 in step"},
        "failures": [_failure(groups[0])] if condition == "broken" else [],
        "groups": groups,
        "steps": [_loop(rank)],
        "in_flight": in_flight,
        "in_flight_count": len(in_flight),
    }


def _dimensions(rank: int, world_size: int) -> list[tuple[str, range]]:
    block = rank // (TP * PP) * TP * PP
    tp, inner = rank // TP, rank % TP
    return [
        (f"tp-{tp}", range(tp * TP, tp * TP + TP)),
        (f"pp-{block // PP + inner}", range(block + inner, block + TP * PP, TP)),
        (f"dp-{rank % (TP * PP)}", range(rank % (TP * PP), world_size, TP * PP)),
        ("world", range(world_size)),
    ]


def _group(name: str, members: range, rank: int, condition: str) -> dict[str, Any]:
    is_broken = condition == "broken" and name.startswith("tp")
    return {
        "name": name,
        "uid": name,
        "rank": members.index(rank),
        "ranks": _ranks(members),
        "state": "broken" if is_broken else "open",
        "begun": 812 - (condition == "waited for" and name.startswith("tp")),
        "last": {"op": "all_reduce", "seq": 811},
        "traffic": {"operations": 811, "bytes": 1 << 30, "bus_bytes": 1 << 30},
    }


def _ranks(members: range) -> str:
    step = f":{members.step}" if members.step > 1 else ""
    return f"{members[0]}-{members[-1]}{step}"


def _operation(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "uid": group["uid"],
        "group": group["name"],
        "op": "all_reduce",
        "seq": 812,
        "p2p": False,
        "call": "all_reduce(float32[4096], op=sum)",
        "where": "train.py:77",
        "timeout_s": 600.0,
        "age_s": 12.1,
        "peer": None,
    }


def _failure(group: dict[str, Any]) -> dict[str, Any]:
    called = {"group": group["name"], "call": "all_reduce #812"}
    return {**called, "error": "MismatchError", "message": f"operation differs: {DIVERGES}"}


def _loop(rank: int) -> dict[str, Any]:
    times = {"step_s": 0.4 + rank % 7 / 100, "operations_s": 0.2, "waited_s": rank % 16 / 100}
    latest = [{"number": 100, "ended_s": 990.0 + rank % 5, **times, "groups": {}}]
    return {"name": "train", "typical": times, "latest": latest}
