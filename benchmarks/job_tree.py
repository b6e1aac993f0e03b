"""CPU time of all ranks together for one answer about the job: simulated ranks in one process.

    python benchmarks/job_tree.py --ranks 4096

Each rank answers with a state of the size of a real one (four groups, four steps, an operation in flight),
and asks others as the control plane does; a function call takes the place of HTTP, which
`benchmarks/job_view.py` measures. Threads, encoding, decoding, passing on and the diagnosis are included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from dist2.runtime.other_process import Process
from observability.client import Asker
from observability.clocks import clock_id
from observability.flight_recorder import FlightRecorder
from observability.job.answer import Answer
from observability.job.directory import Entry
from observability.job.gathering import read_request
from observability.job.member import Member
from observability.metrics import Metrics
from observability.straggler_watch import StragglerWatch

GROUPS = ("tp-0", "pp-0", "dp-0", "world")
LIMIT_S = 60.0
STEP = {"step_s": 0.4, "operations_s": 0.2, "waited_s": 0.1}


def operation(group: str, seq: int) -> dict[str, Any]:
    """Return the description of an operation."""
    texts = {
        "call": "all_reduce(float32[4096], op=sum)",
        "where": "train.py:77",
        "path": "/home/u/train.py:77",
    }
    names = {"uid": group, "group": group, "op": "all_reduce", "seq": seq, "p2p": False, "state": "completed"}
    more = {"timeout_s": 600.0, "age_s": 0.01, "peer": None, "tag": 0, "fingerprint": "0" * 16, "error": None}
    return {**names, **texts, **more, "idle": False}


class Rank(Member):
    """A simulated rank."""

    def __init__(self, number: int, ranks: list[Rank], asker: Asker) -> None:
        super().__init__(Metrics(), FlightRecorder(), token="t", asker=asker)
        self.number, self.ranks = number, ranks

    @property
    def rank(self) -> int:
        return self.number

    def world(self) -> tuple[int, ...]:
        return tuple(range(len(self.ranks)))

    def own_answer(self, wanted: Mapping[str, Any]) -> Answer:
        if "entries" in wanted:
            return Answer(state={"epoch_ns": time.time_ns(), "entries": self._entries(wanted["entries"])})
        return Answer(state=self._state())

    def _state(self) -> dict[str, Any]:
        everyone = f"0-{len(self.ranks) - 1}"
        group = {"backend": "socket", "rank": self.number, "ranks": everyone, "state": "open", "begun": 812}
        counts = {
            "messages": {"sent": {}, "received": {}},
            "traffic": dict.fromkeys(("operations", "bytes"), 9),
        }
        step = {"number": 9, "ended_s": 9.0, **STEP, "groups": dict.fromkeys(GROUPS, STEP)}
        place = {
            "place": "train.py:77 in step",
            "inside": None,
            "exception": None,
            "for_s": 0.1,
            "library": None,
        }
        return {
            "version": "0.1.0",
            "rank": self.number,
            "host": "node-0",
            "pid": 4000,
            "failures": [],
            "process": self._gatherer.here.text,
            "epoch_ns": time.time_ns(),
            "main": place,
            "groups": {
                name: {**group, **counts, "name": name, "recent": [operation(name, 812)]} for name in GROUPS
            },
            "steps": [{"name": "train", "typical": STEP, "latest": [step] * 4}],
            "in_flight": [operation("world", 813)],
            "in_flight_count": 1,
        }

    def _entries(self, most: int) -> dict[str, Any]:
        now_ns = time.monotonic_ns()
        called_ns = [[seq, now_ns + seq * 10**7] for seq in range(1, most + 1)]
        told = {"ranks": f"0-{len(self.ranks) - 1}", "called_ns": called_ns, "stride": 1, "torn": False}
        groups = [{**told, "uid": name, "group": name, "roots": []} for name in GROUPS]
        times = {"now_ns": now_ns, "newest_ns": now_ns}
        return {"groups": groups, "process": "node-0", "clock": clock_id(), **times}


class Network(Asker):
    """Carries requests between the ranks; counts them."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__()
        self._ranks = ranks
        self.requests = 0

    def ask(
        self, url: str, token: str | None = None, *, body: object = None, timeout_s: float = 5.0
    ) -> bytes:
        self.requests += 1
        rank = int(url.split("/")[2].partition(".")[0])
        return self._ranks[rank].part(*read_request(json.loads(json.dumps(body))))


def measure(name: str, network: Network, call: Callable[[], object]) -> None:
    """Print the CPU time of a call, the second of two."""
    for is_measured in (False, True):
        network.requests, began = 0, time.process_time()
        call()
        if is_measured:
            took_s = time.process_time() - began
            print(f"{name}: {network.requests} requests, {took_s:.2f} s of CPU time in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    count = parser.parse_args().ranks
    ranks: list[Rank] = []
    network = Network(ranks)
    ranks += [Rank(number, ranks, network) for number in range(count)]
    process = Process.here()
    entries = {each: Entry(each, f"http://{each}.example", process) for each in range(count)}
    asked = ranks[0]
    asked.directory.entries.update(entries)
    watch = StragglerWatch(
        lambda after_ns, most: asked.entries(after_ns, most, LIMIT_S), lambda: range(count)
    )
    measure("/job", network, lambda: json.dumps(asked._ask_job(LIMIT_S)))
    measure("/desync", network, lambda: asked.diagnosis(1.0, LIMIT_S, history=1))
    measure("/stragglers", network, lambda: (watch.look(), watch.document()))


if __name__ == "__main__":
    main()
