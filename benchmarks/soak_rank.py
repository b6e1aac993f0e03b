"""One rank of a soak: obeys the driver, checks every result itself, and survives."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import torch
from soak_calls import CALLS
from soak_plan import Episode

import dist2
from dist2 import Dist2Error, MismatchError, PeerLostError, PrefixStore, ProcessGroup, TCPStore

OPERATION_S = 15.0
SETTLE_S = 8.0

ENDED = ("death", "mismatch", "revoke")
"""Faults that break the group."""


@attrs.frozen
class Setting:
    """Settings that all ranks of a soak share.

    Attributes:
        port: Of the store, which the driver serves.
        seed: Of the run.
        ranks: How many there are.
        transport: Option of the groups.
    """

    port: int
    seed: int
    ranks: int
    transport: str


@attrs.define
class Account:
    """Results of a rank in an episode.

    Attributes:
        operations: How many operations were verified, by name.
        wrong: Deviations from the expected results.
        descriptors: How many are open now.
        left_s: From a fault to a working group; 0 where nothing broke.
    """

    operations: Counter[str] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    descriptors: int = 0
    left_s: float = 0.0


class Rank:
    """A member of the current group.

    Args:
        setting: Of the run.
        slot: Its number among the processes; that of its rank, too.
    """

    def __init__(self, setting: Setting, slot: int) -> None:
        self._setting = setting
        self._slot = slot
        self._store = TCPStore("127.0.0.1", setting.port, timeout=timedelta(seconds=OPERATION_S))
        self._pg: ProcessGroup | None = None
        self._at_first = self._warm_up()

    # Groups

    def _warm_up(self) -> int:
        """Do once everything that opens a lasting descriptor; return the number of descriptors then."""
        self._store.add("warm", 1)
        alone = self._alone()
        alone.all_reduce(torch.ones(1), async_op=True).wait()
        alone.shutdown()
        return descriptors()

    def found(self) -> None:
        """Make the first group."""
        setting = self._setting
        self._pg = dist2.new_group(
            "socket",
            OPERATION_S,
            store=PrefixStore("first", self._store),
            rank=self._slot,
            world_size=setting.ranks,
            transport=setting.transport,
        )

    def merge(self, name: str) -> None:
        """Make one group of the survivors and the newcomers, each at its own rank again."""
        before, size = self._pg or self._alone(), self._setting.ranks
        merged = before.merge_remote_group(PrefixStore(name, self._store), size, OPERATION_S)
        slots = torch.empty(size, dtype=torch.int64)
        merged.all_gather_single(slots, torch.tensor([self._slot]))
        ordered = merged.split(slots.argsort().tolist())
        assert ordered is not None  # it is of all ranks
        ordered.barrier()
        for group in (before, merged):
            group.abort()
        self._pg = ordered

    def _alone(self) -> ProcessGroup:
        transport = self._setting.transport
        store = dist2.HashStore()
        return dist2.new_group("socket", OPERATION_S, store=store, rank=0, world_size=1, transport=transport)

    def end(self) -> int:
        """Close everything; return how many descriptors are open then that were not at the start."""
        if self._pg is not None:
            self._pg.barrier()
            self._pg.shutdown()
            self._pg = None
        deadline = time.monotonic() + SETTLE_S
        while (more := descriptors() - self._at_first) > 0 and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        return max(0, more)

    # Episodes

    def play(self, episode: Episode, note: Callable[[str], None]) -> Account:
        """Run an episode, with its fault if it happens to this rank, and survive it."""
        pg = self._pg
        assert pg is not None  # `found` or `merge` came first
        account = Account()
        part = pg.split(episode.parts[0]) or pg.split(episode.parts[1])
        assert part is not None  # every rank is in one
        try:
            self._steps(episode, pg, part, account, note)
        except Dist2Error as error:
            self._judge(episode, error, account)
            start = time.monotonic()
            part.abort()
            self._recover(episode, pg)
            account.left_s = time.monotonic() - start
        else:
            part.shutdown()
            if episode.fault in ENDED:
                account.wrong.append(f"nothing broke at {episode.fault}")
        gc.collect()
        account.descriptors = descriptors()
        return account

    def _steps(
        self,
        episode: Episode,
        pg: ProcessGroup,
        part: ProcessGroup,
        account: Account,
        note: Callable[[str], None],
    ) -> None:
        for number, step in enumerate(episode.steps):
            if number == episode.at and pg.rank() == episode.victim:
                self._suffer(episode, pg, note)
            group = pg if step.everybody else part
            if not CALLS[step.name](group, step):
                account.wrong.append(f"{step} on rank {group.rank()} of {group.size()}")
            account.operations[step.name] += 1
        if pg.rank() == episode.victim:
            if episode.at == len(episode.steps):
                self._suffer(episode, pg, note)
            if episode.fault == "death":
                threading.Event().wait()  # it comes in a moment
        pg.barrier()

    def _suffer(self, episode: Episode, pg: ProcessGroup, note: Callable[[str], None]) -> None:
        match episode.fault:
            case "delay":
                time.sleep(episode.pause_s)
            case "pause":
                note("pause")  # the driver goes on with it
                os.kill(os.getpid(), signal.SIGSTOP)
            case "death":
                kill = partial(os.kill, os.getpid(), signal.SIGKILL)
                if episode.number % 2:  # perhaps inside an operation
                    threading.Timer(episode.pause_s / 10, kill).start()
                else:
                    kill()
            case "mismatch":
                pg.all_reduce(torch.ones(3, dtype=torch.int16))
            case "revoke":
                pg.revoke()

    def _judge(self, episode: Episode, error: Dist2Error, account: Account) -> None:
        """Note an error that the fault does not explain."""
        told = {
            "death": (PeerLostError,),
            # The first rank that learns of it leaves its part of the group, which its members notice.
            "mismatch": (MismatchError, PeerLostError),
            "revoke": (dist2.GroupRevokedError, PeerLostError),
        }
        if not isinstance(error, told.get(episode.fault, ())):
            account.wrong.append(f"{type(error).__name__} after {episode.fault}: {error}")

    def _recover(self, episode: Episode, pg: ProcessGroup) -> None:
        if episode.fault == "death":
            left = pg.shrink()
        else:
            whole = pg.split(range(pg.size()))
            assert whole is not None  # it is of all ranks
            left = whole
        left.barrier()
        pg.abort()
        self._pg = left


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def serve(pipe: Connection, setting: Setting, slot: int) -> None:
    """Obey the driver until it stops this rank."""
    torch.set_num_threads(1)
    rank = Rank(setting, slot)
    while (order := pipe.recv()) is not None:
        try:
            answer: object = None
            if isinstance(order, Episode):
                answer = rank.play(order, lambda text: pipe.send(("note", text)))
            elif order == "found":
                rank.found()
            elif order == "end":
                answer = rank.end()
            else:
                rank.merge(order)
        except Exception as error:  # noqa: BLE001 - told to the driver, which gives up
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
            return
        pipe.send(("done", answer))
