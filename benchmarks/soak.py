"""Soak test: minutes of random operations, groups and faults, every result checked.

    python benchmarks/soak.py --minutes 5 --seed 7
    python benchmarks/soak.py --episodes 40 --seed 7 --transport tcp      # the same, as far as episode 40

Real processes call random collectives and messages of random sizes and types on a group and on random
parts of it. In some episodes one of them is slow, is stopped for a while, calls a different operation,
revokes the group, or is killed. Then the others must detect it and make a working group; a new process takes
the place of a dead one. Each rank computes the expected results from all ranks' inputs by itself. The
episodes depend on the seed alone. The exit code is 1 if a result was wrong, a descriptor stayed open, or
a rank hung.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from soak_plan import FAULTS, Episode, episode
from soak_rank import Account, Setting, serve

from dist2 import TCPStore

EPISODE_S = 60.0
"""A rank that takes longer is stuck."""

console = Console()


class Gone(Exception):  # noqa: N818 - not an error: it may have been told to die
    """A rank's process has ended."""


class Stuck(RuntimeError):  # noqa: N818 - an event
    """A rank failed, died unexpectedly, or does not answer."""


@attrs.define
class Report:
    """Results of a soak.

    Attributes:
        seed, ranks, transport: Arguments to repeat it.
        episodes: Number of completed episodes.
        operations: Operations verified, over all ranks, by name.
        injected: Faults, by name.
        survived: Those after which all ranks had a group that works.
        wrong: Deviations from the expected results.
        leaked: Descriptors that stayed open when all groups were closed, over all ranks.
        most_descriptors: Largest number of descriptors of a rank between episodes.
        recovery_s: From an error to a group that works, for each rank and fault.
        elapsed_s: How long it ran.
    """

    seed: int
    ranks: int
    transport: str
    episodes: int = 0
    operations: Counter[str] = attrs.field(factory=Counter)
    injected: Counter[str] = attrs.field(factory=Counter)
    survived: Counter[str] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    leaked: int = 0
    most_descriptors: int = 0
    recovery_s: list[float] = attrs.field(factory=list)
    elapsed_s: float = 0.0

    @property
    def fine(self) -> bool:
        return not self.wrong and not self.leaked and self.injected == self.survived

    def table(self) -> Table:
        """Return it for people."""
        table = Table("", "", title=f"soak, seed {self.seed}, {self.ranks} ranks, {self.transport}")
        table.add_row("episodes", f"{self.episodes} in {self.elapsed_s:.0f} s")
        table.add_row("operations verified", f"{self.operations.total():,}")
        for name in FAULTS[1:]:
            table.add_row(f"{name}: injected, survived", f"{self.injected[name]}, {self.survived[name]}")
        slowest_s = max(self.recovery_s, default=0.0)
        median_s = statistics.median(self.recovery_s or [0.0])
        table.add_row("error to working group", f"median {median_s * 1e3:.0f} ms, at most {slowest_s:.2f} s")
        table.add_row("wrong results", str(len(self.wrong)))
        table.add_row("descriptors", f"{self.leaked} leaked, at most {self.most_descriptors} open")
        return table


class Slot:
    """One process of the soak."""

    def __init__(self, setting: Setting, number: int) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["dist2", "soak_rank"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, setting, number), daemon=True)
        self.process.start()
        theirs.close()

    def take(self) -> tuple[str, object]:
        """Return the next thing that it says.

        Raises:
            Gone: It will say no more.
        """
        try:
            kind, what = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Gone from None
        return kind, what

    def end(self) -> None:
        """Stop it, if it has not ended."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class Soak:
    """Plays episodes on processes that it starts.

    Args:
        setting: Of the run.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._slots = [Slot(setting, number) for number in range(setting.ranks)]
        self._merges = 0
        self.report = Report(setting.seed, setting.ranks, setting.transport)

    def found(self) -> None:
        """Make the first group."""
        self._order("found")

    def play(self, drawn: Episode) -> None:
        """Play an episode; replace a rank that dies in it.

        Raises:
            Stuck: It cannot go on.
        """
        report = self.report
        if drawn.fault != "none":
            report.injected[drawn.fault] += 1
        dies = drawn.victim if drawn.fault == "death" else None
        for slot, account in self._order(drawn, dies).items():
            assert isinstance(account, Account)
            report.operations += account.operations
            report.wrong += [f"episode {drawn.number}, slot {slot}: {text}" for text in account.wrong]
            report.most_descriptors = max(report.most_descriptors, account.descriptors)
            if account.left_s:
                report.recovery_s.append(account.left_s)
        if dies is not None:
            self._slots[dies].end()
            self._slots[dies] = Slot(self._setting, dies)
            self._merges += 1
            self._order(f"merge/{self._merges}")
        if drawn.fault != "none":
            report.survived[drawn.fault] += 1
        report.episodes += 1

    def finish(self) -> None:
        """Close all groups, and count the resources that remain."""
        left = [count for count in self._order("end").values() if isinstance(count, int)]
        self.report.leaked = sum(left)
        for slot in self._slots:
            slot.pipe.send(None)
            slot.process.join()

    def end(self) -> None:
        """Stop all processes."""
        for slot in self._slots:
            slot.end()

    def _order(self, order: Episode | str, dies: int | None = None) -> dict[int, object]:
        """Send an order to all slots; return the answer of each, except for the one that dies."""
        for slot in self._slots:
            slot.pipe.send(order)
        answers: dict[int, object] = {}
        awaited = dict(enumerate(self._slots))
        deadline = time.monotonic() + EPISODE_S
        while awaited:
            pipes: dict[Connection, int] = {slot.pipe: number for number, slot in awaited.items()}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Stuck(f"{order}: slot(s) {sorted(awaited)} do not come back")
            for number in [pipes[pipe] for pipe in ready if isinstance(pipe, Connection)]:
                try:
                    kind, what = awaited[number].take()
                except Gone:
                    if number != dies:
                        raise Stuck(f"{order}: slot {number} died") from None
                    del awaited[number]
                    continue
                if kind == "failed":
                    raise Stuck(f"{order}: slot {number}: {what}")
                if kind == "note":
                    assert isinstance(order, Episode)
                    self._resume(number, order.pause_s)
                    continue
                answers[number] = what
                del awaited[number]
        return answers

    def _resume(self, number: int, pause_s: float) -> None:
        """Let a process that stops itself go on, a little later."""
        pid = self._slots[number].process.pid
        assert pid is not None  # it was started
        status = Path(f"/proc/{pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        time.sleep(pause_s)
        os.kill(pid, signal.SIGCONT)


def run(setting: Setting, seconds: float, episodes: int) -> Report:
    """Play episodes until the time is up, or a number of them; return the report."""
    soak = Soak(setting)
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        soak.found()
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=seconds)
            number = 0
            while number < episodes and time.monotonic() - start < seconds:
                soak.play(episode(setting.seed, number, setting.ranks))
                number += 1
                total, faults = soak.report.operations.total(), soak.report.survived.total()
                text = f"{number} episodes, {total:,} operations, {faults} faults"
                progress.update(task, completed=time.monotonic() - start, description=text)
        soak.finish()
    except Stuck as error:
        soak.report.wrong.append(str(error))
    finally:
        soak.end()
    soak.report.elapsed_s = time.monotonic() - start
    return soak.report


def main() -> int:
    """Soak, print and write the report, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=sys.maxsize, help="end after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto")
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    options = parser.parse_args()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setting = Setting(server.port, options.seed, options.ranks, options.transport)
    report = run(setting, 60 * options.minutes, options.episodes)
    server.close()
    console.print(report.table())
    for text in report.wrong[:20]:
        console.print(text, style="red", markup=False, highlight=False)
    if options.out is not None:
        options.out.write_text(json.dumps({**attrs.asdict(report), "fine": report.fine}, indent=2))
    return 0 if report.fine else 1


if __name__ == "__main__":
    sys.exit(main())
