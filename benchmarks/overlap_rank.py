"""One rank of `overlap.py`: measures the given situation and prints JSON at the end."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import torch
from harness import Referee, store_at
from namespaces import INTERFACE
from torch.distributed import PrefixStore

import dist2
from dist2.backends.socket.transport.node import Node

OUTSTANDING = 100
SMALL_ROUNDS = 9
LONG_MIB = 64


@attrs.frozen
class Job:
    """The work of one rank.

    Attributes:
        pg: The group.
        tensor: The tensor to reduce.
        work: Other work, which takes about as long.
    """

    pg: dist2.ProcessGroup
    tensor: torch.Tensor
    work: Callable[[], None]

    def reduce(self) -> None:
        self.pg.all_reduce(self.tensor)

    def in_turn(self) -> None:
        self.reduce()
        self.work()

    def at_once(self) -> None:
        work = self.pg.all_reduce(self.tensor, async_op=True)
        self.work()
        work.wait()


def timed(body: Callable[[], object], referee: Referee) -> float:
    """Return the seconds that the slowest rank took."""
    referee.latest(0.0)
    start = time.perf_counter()
    body()
    return referee.latest(time.perf_counter() - start)


def products(count: int) -> Callable[[], None]:
    """Return a callable that multiplies matrices, on one thread."""
    left, right, product = (torch.rand(512, 512) for _ in range(3))

    def work() -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)

    return work


def work_like(reduce_s: float, kind: str, referee: Referee) -> Callable[[], None]:
    """Return work of one kind that takes as long as an all_reduce, on all ranks the same amount."""
    if kind == "device":
        return partial(time.sleep, reduce_s)
    once_s = min(timed(products(1), referee) for _ in range(5))
    return products(max(1, round(reduce_s / once_s)))


def overlap(pg: dist2.ProcessGroup, options: argparse.Namespace, referee: Referee) -> dict[str, object]:
    """Measure an all_reduce and other work, apart and at once, after checking the former."""
    numel = options.mib << 18
    tensor = dist2.shared_empty(numel) if options.shared else torch.empty(numel)
    tensor.fill_(1.0)
    pg.all_reduce(tensor, async_op=True).wait()
    if not tensor.eq(options.ranks).all():
        raise AssertionError("all_reduce gave a wrong result")
    tensor.zero_()
    reduce_s = min(timed(lambda: pg.all_reduce(tensor), referee) for _ in range(3))
    job = Job(pg, tensor, work_like(reduce_s, options.work, referee))
    bodies = {
        "all_reduce": job.reduce,
        "work": job.work,
        "in turn": job.in_turn,
        "at once": job.at_once,
    }
    took: dict[str, list[float]] = {name: [] for name in bodies}
    used: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(options.rounds):
        for name, body in bodies.items():
            start = time.process_time()
            took[name].append(timed(body, referee))
            used[name].append(time.process_time() - start)
    return {"rounds_s": took, "processor_s": used}


def median_us(body: Callable[[], object], operations: int, referee: Referee) -> float:
    """Return the median microseconds of an operation, of which a body runs several."""
    return statistics.median(timed(body, referee) for _ in range(SMALL_ROUNDS)) / operations * 1e6


def outstanding(pg: dist2.ProcessGroup, referee: Referee) -> dict[str, float]:
    """Return the microseconds an operation of many small ones takes: one by one, and all outstanding at once.

    They must come back in order, each with its own result.
    """
    tensors = [torch.full((2,), float(count)) for count in range(OUTSTANDING)]

    def synchronous() -> None:
        for tensor in tensors:
            pg.all_reduce(tensor)

    def in_turn() -> None:
        for tensor in tensors:
            pg.all_reduce(tensor, async_op=True).wait()

    def at_once() -> None:
        works = [pg.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        ended = [work.operation.finished_ns for work in works]
        if ended != sorted(ended):
            raise AssertionError("operations ended out of order")

    at_once()
    if [tensor[0].item() for tensor in tensors] != [pg.size() * count for count in range(OUTSTANDING)]:
        raise AssertionError("outstanding operations mixed up their tensors")
    for tensor in tensors:
        tensor.zero_()
    bodies = {"synchronous": synchronous, "each waited for": in_turn, "all outstanding": at_once}
    return {name: median_us(body, OUTSTANDING, referee) for name, body in bodies.items()}


@contextmanager
def message_pending(pg: dist2.ProcessGroup, referee: Referee) -> Iterator[None]:
    """Have every rank wait for a message that is sent only in the end."""
    token = torch.zeros(1)
    pending = pg.irecv(token, (pg.rank() - 1) % pg.size())
    yield
    if pending.is_completed():
        raise AssertionError("a message came before it was sent")
    referee.latest(0.0)
    pg.send(torch.ones(1), (pg.rank() + 1) % pg.size())
    pending.wait()
    if token.item() != 1.0:
        raise AssertionError("the message was mixed up with something else")


@contextmanager
def long_message(pg: dist2.ProcessGroup, sent: torch.Tensor, received: torch.Tensor) -> Iterator[None]:
    """Have every rank send and receive a long message meanwhile."""
    received.zero_()
    works = [
        pg.irecv(received, (pg.rank() - 1) % pg.size()),
        pg.isend(sent, (pg.rank() + 1) % pg.size()),
    ]
    yield
    for work in works:
        work.wait()
    if not received.eq(1.0).all():
        raise AssertionError("the long message was spoiled")


def beside_messages(pg: dist2.ProcessGroup, referee: Referee) -> dict[str, float]:
    """Return the microseconds of a small all_reduce: alone, and with messages in flight."""
    tensor = torch.zeros(2)

    def reduce() -> None:
        for _ in range(OUTSTANDING):
            pg.all_reduce(tensor)

    found = {"alone": median_us(reduce, OUTSTANDING, referee)}
    with message_pending(pg, referee):
        found["a message awaited"] = median_us(reduce, OUTSTANDING, referee)
    found |= beside_long_ones(pg, referee, tensor)
    return found


def beside_long_ones(pg: dist2.ProcessGroup, referee: Referee, tensor: torch.Tensor) -> dict[str, float]:
    """Return the microseconds of one small all_reduce that begins after a long message, and of the latter."""
    sent, received = torch.ones(LONG_MIB << 18), torch.zeros(LONG_MIB << 18)
    small, long = [], []
    for _ in range(SMALL_ROUNDS):
        referee.latest(0.0)
        start = time.perf_counter()
        with long_message(pg, sent, received):
            posted = time.perf_counter()
            pg.all_reduce(tensor)
            small.append(referee.latest(time.perf_counter() - posted) * 1e6)
        long.append(referee.latest(time.perf_counter() - start) * 1e6)
    return {
        f"one, {LONG_MIB} MiB each way in flight": statistics.median(small),
        "those": statistics.median(long),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--address", help="to bind to; by default, ranks share this host")
    parser.add_argument("--work", choices=["products", "device"], required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--shared", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.address is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # of the referee
    store = store_at(options.store, options.ranks)
    referee = Referee(store, options.rank, options.ranks)
    node = Node() if options.address is None else Node(options.address)
    with dist2.new_group(
        "socket",
        60.0,
        store=PrefixStore("dist2", store),
        rank=options.rank,
        world_size=options.ranks,
        node=node,
    ) as pg:
        found = overlap(pg, options, referee)
        found["outstanding_us"] = outstanding(pg, referee)
        found["beside_us"] = beside_messages(pg, referee)
    node.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
