"""Copies traces of torch.profiler from ranks on CPUs so that Holistic Trace Analysis has reports about them.

    python examples/trace_for_hta.py traces for_hta     # folders: one trace a rank, and the copies

Its reports about communication read kernels of GPUs only. The copy has kernels that did not run: one for each
operation of dist2 (stream 20), and one for each outermost call of torch (stream 7), at the time of that call.
So computation that a rank does while an asynchronous operation runs counts as overlap.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMPUTATION, COMMUNICATION = 7, 20
"""The streams."""


def for_hta(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace with kernels for its calls."""
    calls = [each for each in trace["traceEvents"] if stream_of(each)]
    kernels: list[dict[str, Any]] = []
    ends: dict[tuple[int, int], float] = {}
    for call in sorted(calls, key=lambda each: (each["ts"], -each["dur"])):
        stream = stream_of(call)
        lane = call["tid"], stream
        if call["ts"] < ends.get(lane, 0.0):  # inside of another one
            continue
        ends[lane] = call["ts"] + call["dur"]
        numbers = {"correlation": (1 << 24) + len(kernels)}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 0.001, "args": numbers}
        kernels.append({**call, **launch})
        name = call["name"].replace("dist2:", "ncclKernel_")  # the names that HTA takes for communication
        place = {"pid": 0, "tid": stream, "args": {**numbers, "stream": stream, "device": 0}}
        kernels.append({**call, **place, "cat": "kernel", "name": name})
    return {**trace, "traceEvents": trace["traceEvents"] + kernels}


def stream_of(event: dict[str, Any]) -> int:
    """Return the stream for a call; 0 for what is none."""
    if event["ph"] != "X":
        return 0
    if event["name"].startswith("dist2:"):
        return COMMUNICATION
    return COMPUTATION if event.get("cat") == "cpu_op" else 0


def main(source: Path, target: Path) -> None:
    """Copy all traces of a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        (target / path.name).write_text(json.dumps(for_hta(json.loads(path.read_text()))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
