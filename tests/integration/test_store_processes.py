"""Stores across real processes: torch's client on our server, and a rank 0 that is done first."""

from __future__ import annotations

import json
import textwrap
import time
from typing import Any

from support.programs import Ended, run, start
from support.stores import leaving_nothing, server, unused_port
from support.time_limits import in_time
from support.torch_features import needs
from support.warm_interpreter import warm_python, whole_python

TORCH_CLIENT = """
import json, sys
from datetime import timedelta
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False, timedelta(seconds=30))
said = []

def say(call):
    try:
        answer = call()
    except RuntimeError as error:
        answer = [type(error).__name__, str(error).splitlines()[0]]
    said.append(answer.decode() if isinstance(answer, bytes) else answer)

say(lambda: store.set("key", "value"))
say(lambda: store.get("key"))
say(lambda: store.add("count", 41))
say(lambda: store.add("count", 1))
say(lambda: store.compare_set("key", "value", "new"))
say(lambda: store.compare_set("missing", "expected", "new"))
say(lambda: store.append("key", "er"))
say(lambda: [each.decode() for each in store.multi_get(["key", "count"])])
say(lambda: store.multi_set(["a", "b"], ["1", "2"]))
say(lambda: store.check(["a", "b"]))
say(lambda: store.check(["a", "c"]))
say(lambda: store.delete_key("a"))
say(lambda: store.delete_key("a"))
say(lambda: store.num_keys())
say(lambda: sorted(store.list_keys()))
say(lambda: store.queue_len("queue"))
say(lambda: store.queue_push("queue", "1"))
say(lambda: store.queue_push("queue", "2"))
say(lambda: store.queue_len("queue"))
say(lambda: store.queue_pop("queue"))
say(lambda: store.queue_pop("queue", False))
say(lambda: store.queue_pop("queue", False))
say(lambda: store.wait(["never"], timedelta(milliseconds=100)))
say(lambda: store.barrier("alone", 1))
say(lambda: store.barrier("two", 2, timedelta(milliseconds=100)))
say(lambda: store.set("large", "x" * (5 << 20)))
say(lambda: len(store.get("large")))
say(lambda: store.clone().get("key"))
print(json.dumps(said))
"""

SAID: list[Any] = [
    None,
    "value",
    41,
    42,
    "new",
    "expected",
    None,
    ["newer", "42"],
    None,
    True,
    False,
    True,
    False,
    4,
    ["b", "count", "key"],
    0,
    None,
    None,
    2,
    "1",
    "2",
    ["QueueEmptyError", "queue is empty"],
    ["DistStoreError", "wait timeout after 100ms, keys: /never"],
    None,
    ["DistStoreError", "barrier timeout after 100ms, key: two"],
    None,
    5 << 20,
    "newer",
]


@needs("barrier")
def test_torchs_client_in_another_process_on_our_server() -> None:
    with leaving_nothing():
        store = server(wait_for_workers=False)
        ended = run([*warm_python(), "-c", TORCH_CLIENT, str(store.port)])
        assert ended.code == 0, ended
        assert json.loads(ended.output) == SAID
        store.close()


RANK = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import dist2
from dist2.rendezvous import rendezvous
from dist2.store import lifetime

lifetime.LINGER_S = {linger_s}
met = rendezvous(timeout=30)
met.store.set(f"here/{{met.rank}}", "")
met.store.wait(["here/0", "here/1"])  # rank 0 must not be done before rank 1 has joined
if {gloo}:
    dist.init_process_group("gloo", store=met.store, rank=met.rank, world_size=met.world_size)
    tensor = torch.tensor([met.rank + 1.0])
    dist.all_reduce(tensor)
    dist.new_group([0, 1])
    met.store.set(f"connected/{{met.rank}}", "")
    met.store.wait(["connected/0", "connected/1"])  # Gloo fails to connect to who has destroyed its end
    dist.destroy_process_group()
    assert tensor.item() == 3.0
if met.rank == 0:
    met.store.set("last words", "of rank 0")
    met.store.get("rank 1 is there")
    {rank_0}
else:
    met.store.set("rank 1 is there", "")
    time.sleep({rank_1_s})
    met.store.set_timeout(timedelta(seconds=10))
    print(met.store.get("last words").decode())
"""


def pair(
    rank_0: str = "", rank_1_s: float = 1.0, *, linger_s: float = 20.0, gloo: bool = False
) -> tuple[Ended, Ended, float]:
    """Run two ranks; return how they ended, and how many seconds after rank 0 rank 1 did."""
    script = textwrap.dedent(RANK).format(
        rank_0=rank_0 or "pass", rank_1_s=rank_1_s, linger_s=linger_s, gloo=gloo
    )
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    processes = [
        start([*warm_python(), "-c", script], RANK=str(rank), GLOO_SOCKET_IFNAME="lo", **common)
        for rank in (0, 1)
    ]
    ends: list[Ended] = []
    when: list[float] = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=50)
            when.append(time.monotonic())
            ends.append(Ended(process.returncode, output, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ends[0], ends[1], when[1] - when[0]


def test_rank_0_serves_until_others_are_done() -> None:
    first, second, later_s = pair(gloo=True)
    assert first.code == 0, first
    assert second.code == 0, second
    assert second.output == "of rank 0\n"
    in_time(later_s, 0.8, "it waits for nobody after that")


def test_rank_0_serves_no_longer_than_it_must() -> None:
    first, second, later_s = pair(rank_1_s=2.5, linger_s=0.3)
    assert first.code == 0, first
    assert later_s > 1.0
    assert second.code != 0
    assert "StoreConnectionError" in second.errors
    assert "shutdown or crash" in second.errors


def test_a_rank_0_that_dies_of_an_exception_does_not_linger() -> None:
    first, second, later_s = pair(rank_0="raise SystemError('rank 0 failed')", rank_1_s=2.5)
    assert first.code == 1
    assert "rank 0 failed" in first.errors
    assert later_s > 1.0
    assert "StoreConnectionError" in second.errors


KEPT_TO_THE_END = """
import ctypes, sys, types

early = sys.modules["early"] = types.ModuleType("early")  # modules lose their names last to first
import dist2, dist2.store.base

early.kept = [dist2.HashStore(), dist2.PrefixStore("part", dist2.HashStore())]
for module in (early, dist2.store.base):  # as where C holds them
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""


def test_a_store_that_outlives_its_module_says_nothing_at_the_end() -> None:
    ended = run([*whole_python(), "-c", KEPT_TO_THE_END])
    assert ended == Ended(0, "", ""), ended
