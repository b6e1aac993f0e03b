"""``dist2 bench``: dist2 beside its peers on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import attrs
import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dist2.cli.arguments import INTERRUPTED, comma_list, make_folder, number, told, until_ctrl_c
from dist2.cli.arguments import sizes as parsed_sizes
from dist2.cli.bench.measuring import Comparison, Contest, Measurement, Plan, compare
from dist2.cli.bench.neighbours import Patience
from dist2.cli.bench.peers import OWN, PEERS, Peer, chosen, missing
from dist2.cli.bench.report import draw, machine, markdown_of, save, table_of, verdict
from dist2.cli.bench.sizes import size_text
from dist2.cli.bench.workloads import BARRIER, BUFFERS, FRESH, LIST_OPERATIONS, OPERATIONS, Case
from dist2.errors import InvalidUsageError
from dist2.runtime.deadline import deadline_in, remaining_s

SIZES = tuple(8 << shift for shift in range(0, 22, 3))
QUICK_SIZES = (8, 64 << 10, 4 << 20)
WIDTH = 144
"""Columns of the table at least, also where the output is no terminal."""

FAILED = 1
"""Exit status where dist2 fails or is wrong; of peers, some lack operations."""
_OP_HELP = f"Of {', '.join(OPERATIONS)}; default: all these. MPI has no {', '.join(LIST_OPERATIONS)}."
_SIZES_HELP = "Such as 8,64KiB,16MiB. Default: 8 bytes to 16 MiB."
_PEERS_HELP = f"Of {', '.join(PEERS)}, or none. Default: all that are installed."


@attrs.frozen
class Settings:
    """The settings of a run, from the command line."""

    operations: Sequence[str]
    sizes: Sequence[int]
    contenders: Sequence[Peer]
    plan: Plan
    shared: bool = False
    budget_s: float = inf

    @property
    def cases(self) -> list[Case]:
        """All, operation by operation; a barrier has no size."""
        return [
            Case(op, nbytes, self.shared)
            for op in self.operations
            for nbytes in ([0] if op == BARRIER else self.sizes)
        ]

    @property
    def title(self) -> str:
        """Title of tables and plots."""
        ranks, buffers = self.plan.world_size, self.plan.buffers
        return (
            f"{ranks} ranks on one host, float32, {buffers} buffers: time a call, and the peers' by dist2's"
        )


@click.command()
@click.option(
    "--op", "operations", callback=comma_list([*OPERATIONS, *LIST_OPERATIONS]), metavar="OP,OP", help=_OP_HELP
)
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--sizes", callback=parsed_sizes, metavar="SIZE,SIZE", help=_SIZES_HELP)
@click.option(
    "--transport",
    callback=comma_list(OWN),
    default="shm,tcp",
    show_default=True,
    metavar="NAME,NAME",
    help="Transports of dist2: shared memory, TCP.",
)
@click.option("--peers", callback=comma_list([*PEERS, "none"]), metavar="NAME,NAME", help=_PEERS_HELP)
@click.option(
    "--buffers",
    type=click.Choice(BUFFERS),
    default=FRESH,
    show_default=True,
    help="Fresh: the ranks rewrite their input before each call. Cold: it is in no cache. Hot: unchanged.",
)
@click.option("--shared", is_flag=True, help="dist2 and Gloo use tensors from dist2.shared_empty.")
@click.option(
    "--own-sessions",
    is_flag=True,
    help="One session a rank of dist2 and Gloo, as under torchrun.",
)
@click.option("--rounds", type=click.IntRange(1), help="Rounds a case. Default: 7; with --quick: 3.")
@click.option(
    "--budget",
    type=click.FloatRange(1),
    callback=number,
    help="Seconds after which the round that is running is the last.",
)
@click.option("--quick", is_flag=True, help="Only all_reduce, three sizes, short rounds.")
@click.option(
    "--quiet",
    type=click.FloatRange(0),
    callback=number,
    default=0.2,
    show_default=True,
    help="Cores that other processes may use before a case counts as disturbed.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often a disturbed case is measured again.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("dist2-bench"),
    show_default=True,
    help="Folder for JSON, tables and plot.",
)
def bench(
    operations: list[str] | None,
    ranks: int,
    sizes: list[int] | None,
    transport: list[str],
    peers: list[str] | None,
    buffers: str,
    shared: bool,
    own_sessions: bool,
    rounds: int | None,
    budget: float | None,
    quick: bool,
    quiet: float,
    retries: int,
    out: Path,
) -> None:
    """Measure dist2 beside Gloo, Open MPI, MPICH and Intel MPI on this machine.

    All take turns, round by round in one run, each with processes of its own; results are checked first.
    Ratios are the peer's time divided by dist2's: above 1, dist2 is faster.
    Ctrl-C shows and saves the measurements so far. Ends with 1 if dist2 fails, or its results are wrong.
    """
    patience = Patience(quiet, retries)
    round_s, rounds = 0.01 if quick else 0.02, rounds or (3 if quick else 7)
    plan = Plan(ranks, rounds, round_s, patience, own_sessions, buffers)
    with told(InvalidUsageError):
        found = chosen([] if peers == ["none"] else peers)
    make_folder(out, "--out")
    settings = Settings(
        operations or (OPERATIONS[:1] if quick else OPERATIONS),
        sizes or (QUICK_SIZES if quick else SIZES),
        [*(OWN[name] for name in transport), *found],
        plan,
        shared,
        budget or inf,
    )
    console = Console(width=max(WIDTH, Console().width))
    if peers is None:
        for peer in missing(found):
            console.print(f"{peer.title} is not here: {peer.install}", style="yellow", markup=False)
    measured: list[Measurement] = []
    interrupted = until_ctrl_c(lambda: _measure(settings, console, measured), lambda: bool(measured))
    comparisons = compare(measured, settings.contenders[0].name, ranks)
    if len(comparisons) < len(settings.cases):
        why, left = "interrupted" if interrupted else "time is up", len(settings.cases) - len(comparisons)
        console.print(f"{why}: {left} of {len(settings.cases)} cases were left out", style="yellow")
    _show(comparisons, settings, console)
    with told(OSError):
        _save(comparisons, settings, out, console)
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    own = {peer.name for peer in OWN.values()}
    if any(each.failure and each.contender in own for each in measured):
        raise click.exceptions.Exit(FAILED)


def _measure(settings: Settings, console: Console, found: list[Measurement]) -> None:
    """Measure, with a progress bar that moves between rounds only: a bar with a thread would disturb them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    deadline_ns = deadline_in(settings.budget_s)
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("starting ranks", total=len(settings.cases))
        progress.refresh()
        with Contest(settings.contenders, settings.plan, deadline_ns) as contest:
            for case in settings.cases:
                if found and not remaining_s(deadline_ns):
                    break
                progress.update(task, description=f"{case.op} {size_text(case.nbytes)}", refresh=True)
                found += contest.measure(case)
                progress.update(task, advance=1, refresh=True)


def _show(comparisons: Sequence[Comparison], settings: Settings, console: Console) -> None:
    about = machine()
    console.print(
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}",
        highlight=False,
    )
    foreign = max(each.own.foreign_cores for each in comparisons)
    console.print(f"other processes kept {foreign:.2f} cores busy in the worst case", highlight=False)
    console.print(table_of(comparisons, settings.contenders, settings.title))
    for peer in settings.contenders[1:]:
        console.print(verdict(comparisons, peer), highlight=False)
    failures = {
        (name, each.failure)
        for comparison in comparisons
        for name, each in comparison.by_name.items()
        if each.failure
    }
    for name, failure in sorted(failures):
        console.print(f"{name}: {failure}", style="red", markup=False, highlight=False)


def _save(comparisons: Sequence[Comparison], settings: Settings, out: Path, console: Console) -> None:
    name = f"{settings.plan.world_size}-ranks{'-shared' if settings.shared else ''}"
    save(out / f"{name}.json", comparisons, settings.contenders, attrs.asdict(settings.plan))
    (out / f"{name}.md").write_text(markdown_of(comparisons, settings.contenders))
    saved = [f"{name}.json", f"{name}.md"]
    if draw(out / f"{name}.png", comparisons, settings.contenders, settings.title):
        saved.append(f"{name}.png")
    console.print(f"saved {', '.join(saved)} in {out}", highlight=False)
