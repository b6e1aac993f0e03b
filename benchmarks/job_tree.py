"""CPU time of all ranks together for one answer about the job: simulated ranks in one process.

    python benchmarks/job_tree.py --ranks 4096
    python benchmarks/job_tree.py --ranks 4096 --http

Each rank answers with a state of the size of a real one (four groups, four steps, an operation in flight),
and asks others as the control plane does. The last rank has not begun the operation that all others are in,
and was late to each before: every answer is checked for that, and for the answers of all ranks.

A function call takes the place of HTTP, or with ``--http`` each rank has the application of a control plane,
and each `RANKS_A_SERVER` of them a server and a process: all requests go through the control planes'
client, a TCP connection on the loopback interface, uvicorn, the check of the token and the endpoint. Client,
encoding, decoding, passing on and the diagnosis are included, and the CPU time of all processes. Without HTTP
the requests are also sent one after another: ranks of one interpreter compete for it, unlike those of a job.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

from dist2.runtime.other_process import Process
from observability.client import Asker
from observability.clocks import clock_id
from observability.flight_recorder import FlightRecorder
from observability.job import gathering
from observability.job.answer import Answer
from observability.job.calls import shorten
from observability.job.directory import Entry
from observability.job.gathering import read_request
from observability.job.member import Member
from observability.metrics import Metrics
from observability.server.app import app_of
from observability.server.serving import Serving
from observability.straggler_watch import StragglerWatch

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

GROUPS = ("tp-0", "pp-0", "dp-0", "world")
TOKEN = "t"
LIMIT_S = 10.0
"""Of each rank: the longest that the endpoints take."""
AFTER_S = 1.0
WAITED_S = 10.0
CALL_NS = 50_000_000
LATE_NS = 20_000_000
RANKS_A_SERVER = 64
"""Fewer than clients that a server accepts, and few enough servers for the memory of a small machine."""
RUNS = 5
STEP = {"step_s": 0.4, "operations_s": 0.2, "waited_s": 0.1}


def operation(group: str, seq: int, age_s: float = 0.01) -> dict[str, Any]:
    """Return the description of an operation."""
    texts = {
        "call": "all_reduce(float32[4096], op=sum)",
        "where": "train.py:77",
        "path": "/home/u/train.py:77",
    }
    names = {"uid": group, "group": group, "op": "all_reduce", "seq": seq, "p2p": False, "state": "completed"}
    more = {
        "timeout_s": 600.0,
        "age_s": age_s,
        "peer": None,
        "tag": 0,
        "fingerprint": "0" * 16,
        "error": None,
    }
    return {**names, **texts, **more, "idle": False}


class Rank(Member):
    """A simulated rank; the last one is late."""

    def __init__(self, number: int, ranks: list[Rank], asker: Asker) -> None:
        super().__init__(Metrics(), FlightRecorder(), token=TOKEN, asker=asker)
        self.number, self.ranks = number, ranks

    @property
    def is_late(self) -> bool:
        return self.number == len(self.ranks) - 1

    @property
    def rank(self) -> int:
        return self.number

    def world(self) -> tuple[int, ...]:
        return tuple(range(len(self.ranks)))

    def own_answer(self, wanted: Mapping[str, Any]) -> Answer:
        if "entries" in wanted:
            return Answer(state={"epoch_ns": time.time_ns(), "entries": self._entries(**wanted)})
        state = self._state(int(wanted.get("history", 1)))
        for group in state["groups"].values():
            shorten(group)
        return Answer(state=state)

    def _state(self, history: int = 1) -> dict[str, Any]:
        everyone = f"0-{len(self.ranks) - 1}"
        in_flight = [] if self.is_late else [operation("world", 813, WAITED_S)]
        begun = 812 + len(in_flight)
        group = {"backend": "socket", "rank": self.number, "ranks": everyone, "state": "open", "begun": begun}
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
                name: {
                    **group,
                    **counts,
                    "name": name,
                    "recent": [operation(name, 812 - each) for each in range(history)],
                }
                for name in GROUPS
            },
            "steps": [{"name": "train", "typical": STEP, "latest": [step] * 4}],
            "in_flight": in_flight,
            "in_flight_count": len(in_flight),
        }

    def _entries(self, entries: int, after_ns: int) -> dict[str, Any]:
        """Return the next calls: the ranks have called so many more whenever they are asked."""
        first, last = after_ns // CALL_NS + 1, after_ns // CALL_NS + entries
        late_ns = LATE_NS if self.is_late else 0
        called_ns = [each for seq in range(first, last + 1) for each in (seq, seq * CALL_NS + late_ns)]
        told = {"ranks": f"0-{len(self.ranks) - 1}", "called_ns": called_ns, "stride": 1, "torn": False}
        groups = [{**told, "uid": name, "group": name, "roots": [], "joint": []} for name in GROUPS]
        times = {"now_ns": time.monotonic_ns(), "newest_ns": last * CALL_NS}
        return {"groups": groups, "process": "node-0", "clock": clock_id(), **times}


class Calls(Asker):
    """Carries requests between the ranks by calls of functions."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__()
        self._ranks = ranks

    def ask(
        self, url: str, token: str | None = None, *, body: object = None, timeout_s: float = 5.0
    ) -> bytes:
        rank = int(url.split("/")[2].partition(".")[0])
        return self._ranks[rank].part(*read_request(json.loads(json.dumps(body))))


class Applications:
    """Several control planes behind one server, each below the path of its rank."""

    def __init__(self) -> None:
        self.by_rank: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rank, _, path = scope["path"][1:].partition("/")
        await self.by_rank[rank]({**scope, "path": f"/{path}"}, receive, send)


def serve(ranks: list[Rank], children: ExitStack) -> tuple[list[str], list[int]]:
    """Start the control planes of all ranks; return their addresses, and the processes beside this one.

    Args:
        ranks: This process serves the first ones.
        children: Ends the other processes.
    """
    listeners = [
        socket.create_server(("127.0.0.1", 0), backlog=RANKS_A_SERVER)
        for _ in range(0, len(ranks), RANKS_A_SERVER)
    ]
    ports = [listener.getsockname()[1] for listener in listeners]
    pids = []
    for index, listener in enumerate(listeners[1:], start=1):
        pid = os.fork()
        if pid == 0:
            _serve(ranks[index * RANKS_A_SERVER :][:RANKS_A_SERVER], listener, ports[index])
            while True:
                signal.pause()
        children.callback(os.waitpid, pid, 0)
        children.callback(os.kill, pid, signal.SIGKILL)
        listener.close()
        pids.append(pid)
    _serve(ranks[:RANKS_A_SERVER], listeners[0], ports[0])
    return [f"http://127.0.0.1:{ports[rank.number // RANKS_A_SERVER]}/{rank.number}" for rank in ranks], pids


def _serve(ranks: list[Rank], listener: socket.socket, port: int) -> None:
    applications = Applications()
    for rank in ranks:
        application = app_of(Metrics(), FlightRecorder(), token=TOKEN, port=port, member=rank)
        applications.by_rank[str(rank.number)] = application
    gc.collect()
    gc.freeze()  # a collection in a real rank does not look at the objects of many others
    Serving(applications, listener)


def by_calls(asked: Rank) -> dict[str, Callable[[], bytes]]:
    """Return how the asked rank makes its answers without HTTP."""
    count = len(asked.ranks)
    watch = StragglerWatch(
        lambda after_ns, most: asked.entries(after_ns, most, LIMIT_S), lambda: range(count)
    )

    def stragglers() -> bytes:
        watch.look()
        return json.dumps(watch.document()).encode()

    return {
        "/job": lambda: json.dumps(asked._ask_job(LIMIT_S)).encode(),
        "/desync": lambda: json.dumps(asked.diagnosis(AFTER_S, LIMIT_S).document()).encode(),
        "/stragglers": stragglers,
    }


def by_http(url: str) -> dict[str, Callable[[], bytes]]:
    """Return how a client asks."""
    asker, limit_ms = Asker(), round(LIMIT_S * 1000)

    def get(path: str) -> Callable[[], bytes]:
        return lambda: asker.ask(f"{url}{path}", TOKEN, timeout_s=10 * LIMIT_S)

    return {
        "/job": get(f"/job?limit_ms={limit_ms}"),
        "/desync": get(f"/desync?limit_ms={limit_ms}&after_ms={round(AFTER_S * 1000)}"),
        "/stragglers": get("/stragglers"),
    }


def check(name: str, answer: bytes, count: int) -> None:
    """Verify the content of an answer.

    Raises:
        AssertionError: A rank is missing, or the last one is not blamed.
    """
    document, late = json.loads(answer), count - 1
    if name == "/stragglers":
        assert not document["silent"], document["silent"]
        assert len(document["clocks"]) == count
        latest = document["ranking"][: len(GROUPS)]
        assert [row["rank"] for row in latest] == [late] * len(GROUPS), latest
        assert all(abs(row["late_s"] - LATE_NS / 1e9) < 1e-3 for row in latest), latest
        return
    assert document["culprits"] == [late], document["culprits"]
    (waiting,) = document["waiting"]
    assert waiting["ranks"] == list(range(late)), waiting["ranks"]
    assert [each["rank"] for each in waiting["missing"]] == [late]
    if name == "/desync":
        assert not document["silent"], document["silent"]
        return
    assert document["answered"] == count
    rows = [(row["rank"], row["state"], len(row["groups"])) for row in document["ranks"]]
    assert rows == [(rank, "waited for" if rank == late else "waiting", len(GROUPS)) for rank in range(count)]


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time of this process and of others: clock_getcpuclockid(3)."""
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def measure(asks: Mapping[str, Callable[[], bytes]], count: int, how: str, pids: list[int]) -> None:
    """Print the CPU time of each question: the median of some runs, the least and the most."""
    for name, ask in asks.items():
        times = []
        for _ in range(1 + RUNS):
            began = cpu_s(pids)
            answer = ask()
            times.append(cpu_s(pids) - began)
            check(name, answer, count)
        spent, size = sorted(times[1:]), len(answer) / 2**20
        print(
            f"{name}, {how}: {statistics.median(spent):.2f} s of CPU time in all "
            f"({spent[0]:.2f} to {spent[-1]:.2f}), {size:.1f} MiB",
            flush=True,
        )


def in_turn(asked: Iterable[Any], ask: Callable[[Any], Any], at_once: int = 1) -> dict[Any, Any]:
    """Return what `observability.job.fan_out.ask_each` does, without threads."""
    return {each: ask(each) for each in asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--http", action="store_true", help="ask by HTTP, not by calls of functions")
    given = parser.parse_args()
    logging.disable()  # of the late rank
    ranks: list[Rank] = []
    asker = Asker() if given.http else Calls(ranks)
    ranks += [Rank(number, ranks, asker) for number in range(given.ranks)]
    gc.collect()
    gc.freeze()
    print(f"{given.ranks} ranks, {'HTTP' if given.http else 'calls of functions'}")
    ways: list[tuple[str, AbstractContextManager[object]]] = [
        ("several at a time, as in a job", nullcontext())
    ]
    if not given.http:
        in_turns = mock.patch.object(gathering, "ask_each", in_turn)
        ways.insert(0, ("one request after another", in_turns))
    with ExitStack() as children:
        urls, pids = [f"http://{each}.example" for each in range(given.ranks)], list[int]()
        if given.http:
            urls, pids = serve(ranks, children)
        process = Process.here()
        ranks[0].directory.entries.update({each: Entry(each, url, process) for each, url in enumerate(urls)})
        asks = by_http(urls[0]) if given.http else by_calls(ranks[0])
        for how, changed in ways:
            with changed:
                measure(asks, given.ranks, how, pids)


if __name__ == "__main__":
    main()
