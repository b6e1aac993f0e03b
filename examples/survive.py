"""A training job that survives: a rank is killed, the others continue, a new one joins, and nothing is lost.

python examples/survive.py

Four processes train a classifier of handwritten digits. At a random step one of them is killed. The rest
get `PeerLostError`, shrink the group, go back to the last step that all of them had taken, and continue with
larger shares of the same batches. A new process takes the place of the dead one: it is merged into the
group and gets the weights. The same training without the death ends with the same loss.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import dist2
from dist2 import HashStore, PeerLostError, PrefixStore, ProcessGroup, ReduceOp, TCPStore

RANKS = 4
BATCH = 64  # images a step, over all ranks of the group
LAST = 1 / 8  # of the steps: before they begin, the survivors wait until the new rank has joined
LIMIT_S = 20.0  # of an operation; a whole run takes a few seconds
SHRUNK_S = 2.0  # longest time from the death to a working group
TOLERANCE = 1e-9  # of the loss: other shares are summed in another order, and the difference grows


class Training:
    """Model, optimizer and data of a rank; the group may change between steps."""

    def __init__(self, steps: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float64).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(576, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ]
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.step, self.steps = 0, steps
        self.back_by = steps - int(steps * LAST)

    def take_step(self, pg: ProcessGroup, news: bool) -> bool:
        """Take one step with the other ranks; return whether any of them has news."""
        # The images of a step depend on the step alone; their division between ranks depends on the group.
        chosen = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(self.step))[:BATCH]
        mine = chosen[pg.rank() :: pg.size()]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images[mine]), self.labels[mine], reduction="sum")
        (loss / BATCH).backward()
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        any_news = torch.tensor([float(news)], dtype=torch.float64)
        pg.all_reduce_coalesced([*gradients, any_news])
        self.optimizer.step()
        self.step += 1
        return any_news.item() > 0

    def state(self) -> dict[str, Any]:
        """Return the complete state of the training."""
        return copy.deepcopy(
            {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def result(self) -> tuple[float, str]:
        """Return the loss over all images, and a digest of the weights, bit for bit."""
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels).item()
        weights = torch.cat([each.detach().flatten() for each in self.model.parameters()])
        return loss, hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def train(pg: ProcessGroup, training: Training, store: TCPStore, dies_at: int | None) -> ProcessGroup:
    """Train to the end, through changes of the group; return the last group."""
    saved: dict[int, dict[str, Any]] = {}
    while training.step < training.steps:
        # Keep two states: a rank may be one step ahead of another when a death is reported.
        saved = {training.step: training.state(), training.step - 1: saved.get(training.step - 1, {})}
        if training.step == dies_at:
            store.set("died at", repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        if pg.size() < RANKS and training.step == training.back_by:
            store.wait(["newcomer"])
        try:
            merges = training.take_step(pg, news=pg.size() < RANKS and store.check(["newcomer"]))
        except PeerLostError as error:
            pg = go_on_without(pg, training, saved, store, error)
        else:
            if merges:  # all ranks learn of the newcomer in the same step
                pg = merge(pg, training, store)
    return pg


def go_on_without(
    broken: ProcessGroup,
    training: Training,
    saved: dict[int, dict[str, Any]],
    store: TCPStore,
    error: PeerLostError,
) -> ProcessGroup:
    """Return a group without the dead rank; go back to the last step that every survivor had reached."""
    pg = broken.shrink()
    broken.abort()
    common = torch.tensor([training.step])
    pg.all_reduce(common, ReduceOp.MIN)
    training.load(saved[int(common)])
    if pg.rank() == 0:
        took_s = time.monotonic() - float(store.get("died at"))
        print(f"step {training.step}: {error}")
        print(
            f"step {training.step}: {pg.size()} ranks continue, {took_s * 1e3:.0f} ms after the death",
            flush=True,
        )
        store.set("recovered in", repr(took_s))
    return pg


def merge(alone: ProcessGroup, training: Training, store: TCPStore) -> ProcessGroup:
    """Return one group of the survivors and the newcomer, all with the state of the first survivor.

    Survivors and the newcomer call it, each with its group. Another merge would need another prefix.
    """
    pg = alone.merge_remote_group(PrefixStore("merge", store), RANKS, LIMIT_S)
    alone.shutdown()
    training.load(pg.broadcast_object(training.state()))
    if pg.rank() == 0:
        print(f"step {training.step}: {pg.size()} ranks again, all with the weights of rank 0", flush=True)
    return pg


def be_rank(port: int, rank: int, steps: int, dies_at: int | None, newcomer: bool) -> None:
    """Run one process of the job: one of the first, or the newcomer."""
    torch.set_num_threads(1)
    store, training = TCPStore("127.0.0.1", port, timeout=LIMIT_S), Training(steps)
    if newcomer:
        alone = dist2.new_group("socket", LIMIT_S, store=HashStore(), rank=0, world_size=1)
        store.wait(["recovered in"])
        store.set("newcomer", "waits")
        pg = merge(alone, training, store)
    else:
        pg = dist2.new_group("socket", LIMIT_S, store=store, rank=rank, world_size=RANKS)
    pg = train(pg, training, store, dies_at)
    results = pg.all_gather_object(training.result())
    if pg.rank() == 0:
        store.set("results", json.dumps(results))
    pg.barrier()
    pg.shutdown()


def start(
    port: int, rank: int, steps: int, dies_at: int | None = None, *, newcomer: bool = False
) -> BaseProcess:
    """Start a rank; forked from a process that has imported everything, so that it starts fast."""
    context = multiprocessing.get_context("forkserver")
    # Every optimizer imports the last of these at its first step.
    context.set_forkserver_preload(["dist2", "sklearn.datasets", "torch._dynamo"])
    process = context.Process(target=be_rank, args=(port, rank, steps, dies_at, newcomer), daemon=True)
    process.start()
    return process


def run(steps: int, doomed: int | None, at: int) -> tuple[list[tuple[float, str]], float]:
    """Run the job once, and replace the rank that is killed; return the ranks' results, and the seconds
    until the others continued.
    """
    # The store is in this process, not in a rank: no death takes it down.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(store.port, rank, steps, at if rank == doomed else None) for rank in range(RANKS)]
    if doomed is not None:
        ranks[doomed].join()
        ranks[doomed] = start(store.port, doomed, steps, newcomer=True)
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank ended with exit code {process.exitcode}")
    results = json.loads(store.get("results"))
    recovered_s = 0.0 if doomed is None else float(store.get("recovered in"))
    store.close()
    return results, recovered_s


def main() -> None:
    """Train undisturbed and with a death, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="selects the rank to kill, and the step")
    parser.add_argument("--steps", type=int, default=800, help="steps of the training, at least 40")
    given = parser.parse_args()
    steps, chance = given.steps, random.Random(given.seed)
    if steps < 40:
        parser.error(f"argument --steps: must be at least 40, got {steps}")
    doomed, at = chance.randrange(RANKS), chance.randrange(steps // 10, steps // 4)
    print(f"{RANKS} ranks, {steps} steps; rank {doomed} will be killed at step {at}", flush=True)
    survived, recovered_s = run(steps, doomed, at)
    undisturbed, _ = run(steps, None, at)
    off = abs(survived[0][0] / undisturbed[0][0] - 1)
    print(f"loss {undisturbed[0][0]:.6f} undisturbed, {survived[0][0]:.6f} with a death: {off:.1e} off")
    checks = {
        "all ranks are in the last group": len(survived) == RANKS,
        "their weights are bitwise equal": len({weights for _, weights in survived}) == 1,
        f"they continued within {SHRUNK_S} s": recovered_s < SHRUNK_S,
        f"the loss is less than {TOLERANCE} off": off < TOLERANCE,
    }
    failed = [what for what, holds in checks.items() if not holds]
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")
    print(f"ok: rank {doomed} died at step {at} and was replaced; the loss equals that of an undisturbed run")


if __name__ == "__main__":
    main()
