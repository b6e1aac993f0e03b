"""A training job that survives: a rank is killed, the others go on, it comes back, and nothing is lost.

python examples/survive.py

Four processes train a classifier of handwritten digits. At a random step one of them is killed. The rest
get `PeerLostError`, shrink the group, go back to the last step that all of them had taken, and go on with
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
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import attrs
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import dist2
from dist2 import PeerLostError, PrefixStore, ProcessGroup, TCPStore

RANKS = 4
STEPS = 800
BATCH = 64
"""Images a step, over all ranks, however many there are."""

OPERATION_S, RUN_S = 20.0, 60.0
SHRUNK_S = 2.0
"""From the death to a group that works: no longer than this."""

TOLERANCE = 1e-9
"""How far the loss may be off, relative to it: other shares are summed in another order, which grows."""

console = Console(highlight=False)


@attrs.frozen
class Plan:
    """What all processes of a run know.

    Attributes:
        port: Of the store where they meet, which the driver serves.
        doomed: The rank that is killed; None: nobody is.
        at: The step at which it is.
        back_by: The step before which the others wait for it to come back, should that take so long.
    """

    port: int
    doomed: int | None
    at: int
    back_by: int = STEPS - 100


class Training:
    """One rank's training, on whichever group it is in.

    Attributes:
        pg: The group.
        step: How many steps were taken.
    """

    def __init__(self, pg: ProcessGroup, store: TCPStore) -> None:
        self.pg, self.step = pg, 0
        self._store = store
        self._joined = 0
        self._saved: dict[int, tuple[object, object]] = {}
        digits = load_digits()
        self._images = torch.tensor(digits.images, dtype=torch.float64).unsqueeze(1) / 16
        self._labels = torch.tensor(digits.target)
        torch.manual_seed(0)
        self._model = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        self._model.double()  # training amplifies the rounding of sums in another order
        parameters = list(self._model.parameters())
        self._optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
        # Every gradient is a view of one tensor, so that one operation sums them all. One more number
        # travels with them, so that all know at the same step whether a newcomer waits.
        sizes = [each.numel() for each in parameters]
        self._sums = torch.zeros(sum(sizes) + 1, dtype=torch.float64)
        for each, part in zip(parameters, self._sums.split([*sizes, 1]), strict=False):
            each.grad = part.view_as(each)
            self._optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each)

    def run(self, plan: Plan) -> float:
        """Train to the end; return the loss over all images."""
        while self.step < STEPS:
            try:
                self._take_step(plan)
            except PeerLostError as error:
                self._recover(error)
                continue
            if self._sums[-1] > 0:
                self._welcome()
        with torch.no_grad():
            return nn.functional.cross_entropy(self._model(self._images), self._labels).item()

    def _take_step(self, plan: Plan) -> None:
        self._save()
        # Which images a step takes depends on the step alone; who takes which of them, on the group.
        seeded = torch.Generator().manual_seed(self.step)
        chosen = torch.randperm(len(self._labels), generator=seeded)[:BATCH]
        mine = chosen[self.pg.rank() :: self.pg.size()]
        self._sums.zero_()
        answers = self._model(self._images[mine])
        loss = nn.functional.cross_entropy(answers, self._labels[mine], reduction="sum") / BATCH
        loss.backward()
        if self.step == plan.back_by and self._joined == 0 and plan.doomed is not None:
            self._store.get("newcomer")
        self._sums[-1] = float(self._joined == 0 and self._store.check(["newcomer"]))
        if self.pg.global_rank() == plan.doomed and self.step == plan.at:
            self._store.set("died at", repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        self.pg.all_reduce(self._sums)
        self._optimizer.step()
        self.step += 1

    def _save(self) -> None:
        """Keep this step and the one before: a rank may be one step ahead when another hears of a death."""
        state = self._model.state_dict(), self._optimizer.state_dict()
        self._saved[self.step] = copy.deepcopy(state)
        self._saved.pop(self.step - 2, None)

    def _recover(self, error: PeerLostError) -> None:
        """Go on without the dead, from the last step that every survivor had come to."""
        broken, self.pg = self.pg, self.pg.shrink()
        broken.abort()
        common = torch.tensor([self.step])
        self.pg.all_reduce(common, dist2.ReduceOp.MIN)
        self.step = int(common)
        weights, momentum = self._saved[self.step]
        self._model.load_state_dict(weights)  # type: ignore[arg-type]
        self._optimizer.load_state_dict(momentum)  # type: ignore[arg-type]
        took_s = time.monotonic() - float(self._store.get("died at"))
        if self.pg.rank() == 0:
            console.print(f"step {self.step}: {error}", soft_wrap=True)
            console.print(
                f"step {self.step}: {self.pg.size()} ranks go on, {took_s * 1e3:.0f} ms after the death"
            )
            self._store.set("recovered in", repr(took_s))
            self._store.set("ready for newcomers", "yes")

    def _welcome(self) -> None:
        """Take in a process that waits, and give it the weights."""
        if self.pg.rank() == 0:
            self._store.set("merged size", str(self.pg.size() + 1))
        self.merge()

    def merge(self) -> None:
        """Make one group of the survivors and a newcomer, as both call it; who is ahead gives its state."""
        alone, size = self.pg, int(self._store.get("merged size"))
        self._joined += 1
        self.pg = alone.merge_remote_group(
            PrefixStore(f"merge/{self._joined}", self._store), size, OPERATION_S
        )
        steps = torch.empty(size, dtype=torch.int64)
        self.pg.all_gather_single(steps, torch.tensor([self.step]))
        giver = int(steps.argmax())
        self.step = int(steps[giver])
        for weights in self._model.parameters():
            self.pg.broadcast(weights.data, giver)
            self.pg.broadcast(self._optimizer.state[weights]["momentum_buffer"], giver)
        alone.shutdown()
        if self.pg.rank() == giver:
            console.print(
                f"step {self.step}: {self.pg.size()} ranks again, all with the weights of rank {giver}"
            )

    def digests(self) -> list[str]:
        """Return the SHA-256 of every rank's weights, bit for bit."""
        weights = torch.cat([each.detach().flatten() for each in self._model.parameters()])
        return self.pg.all_gather_object(hashlib.sha256(weights.numpy().tobytes()).hexdigest())


def be_rank(plan: Plan, rank: int, newcomer: bool) -> None:
    """Be one process of the run: from the start, or as the one that comes back."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", plan.port, timeout=timedelta(seconds=OPERATION_S))
    if newcomer:
        store.get("ready for newcomers")
        alone = dist2.new_group("socket", OPERATION_S, store=dist2.HashStore(), rank=0, world_size=1)
        training = Training(alone, store)
        store.set("newcomer", str(rank))
        training.merge()
    else:
        group = dist2.new_group("socket", OPERATION_S, store=store, rank=rank, world_size=RANKS)
        training = Training(group, store)
    loss = training.run(attrs.evolve(plan, doomed=None) if newcomer else plan)
    digests = training.digests()
    if training.pg.rank() == 0:
        store.set("result", json.dumps({"loss": loss, "digests": digests}))
    training.pg.barrier()
    training.pg.shutdown()


def run(doomed: int | None, at: int) -> dict[str, str]:
    """Run the training once, replacing the rank that is killed; return what the ranks left in the store.

    Raises:
        RuntimeError: A rank failed, or all of it took too long.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plan = Plan(server.port, doomed, at)
    running = {process.sentinel: process for process in (start(plan, rank) for rank in range(RANKS))}
    deadline = time.monotonic() + RUN_S
    try:
        while running:
            ended = wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ended:
                raise RuntimeError(f"{len(running)} ranks are still at it after {RUN_S:.0f} s")
            for process in [running.pop(sentinel) for sentinel in ended]:
                if process.exitcode == -signal.SIGKILL and doomed is not None:
                    newcomer, doomed = start(plan, doomed, newcomer=True), None
                    running[newcomer.sentinel] = newcomer
                elif process.exitcode:
                    raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}")
        keys = [key for key in ("result", "recovered in") if server.check([key])]
        return {key: server.get(key).decode() for key in keys}
    finally:
        for process in running.values():
            process.kill()
        server.close()


def start(plan: Plan, rank: int, *, newcomer: bool = False) -> BaseProcess:
    """Start a process of the run; forked from one that has imported everything, so that it comes soon."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dist2", "sklearn.datasets"])
    process = context.Process(target=be_rank, args=(plan, rank, newcomer), name=f"rank {rank}", daemon=True)
    process.start()
    return process


def main() -> int:
    """Train undisturbed and with a death, compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="says who is killed, and when")
    chance = random.Random(parser.parse_args().seed)
    doomed, at = chance.randrange(RANKS), chance.randrange(STEPS // 10, STEPS // 4)
    console.print(f"{RANKS} ranks, {STEPS} steps; rank {doomed} will be killed at step {at}")
    survived, undisturbed = run(doomed, at), run(None, 0)
    with_death, without = json.loads(survived["result"]), json.loads(undisturbed["result"])
    recovered_s = float(survived["recovered in"])
    off = abs(with_death["loss"] / without["loss"] - 1)
    table = Table("check", "value", "limit")
    table.add_row("from the death to the next step", f"{recovered_s * 1e3:.0f} ms", f"{SHRUNK_S:.0f} s")
    table.add_row("loss undisturbed", f"{without['loss']:.6f}", "")
    table.add_row("loss with a death", f"{with_death['loss']:.6f}", f"{TOLERANCE:.0e} off; it is {off:.1e}")
    table.add_row("ranks at the end", str(len(with_death["digests"])), str(RANKS))
    table.add_row("weights on all of them", with_death["digests"][0][:12], "bitwise equal")
    console.print(table)
    same = len(with_death["digests"]) == RANKS and len(set(with_death["digests"])) == 1
    if not (same and recovered_s < SHRUNK_S and off < TOLERANCE):
        print("failed: see the table", file=sys.stderr)
        return 1
    print(f"ok: rank {doomed} died at step {at} and came back, and the loss is that of an undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
