"""Fits the choice of algorithms to this machine: see docs/tuning.md.

python benchmarks/tune.py --ranks 4 --out tuning.json
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from crossings import CROSSINGS
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tuner import Finding, Tuner, tuning_of

from dist2.cli.arguments import INTERRUPTED, comma_list, make_folder, number, told, until_ctrl_c
from dist2.cli.bench.sizes import size_text
from dist2.cli.bench.stopping import stop_as_by_ctrl_c
from dist2.errors import InvalidUsageError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option(
    "--only",
    callback=comma_list(each.constant for each in CROSSINGS),
    metavar="NAME,NAME",
    help=f"Of {', '.join(each.constant for each in CROSSINGS)}. Default: all for so many ranks.",
)
@click.option(
    "--budget",
    type=click.FloatRange(1, 600),
    callback=number,
    default=40.0,
    show_default=True,
    help="Seconds that measuring may take.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    default=Path("dist2-tuning.json"),
    show_default=True,
    help="File to write the constants to.",
)
def tune(ranks: int, only: list[str] | None, budget: float, out: Path) -> None:
    """Measure where one algorithm overtakes another on this machine, and store it.

    Groups use the file that DIST2_TUNING names on their rank 0. Run it on a machine that does nothing else.
    Ctrl-C shows and saves the measurements so far; the other constants keep their defaults.
    """
    make_folder(out.parent, "--out")
    console = Console(width=max(100, Console().width))
    with told(InvalidUsageError):
        tuner = Tuner(ranks, budget, only)
    findings: list[Finding] = []
    interrupted = until_ctrl_c(lambda: _measure(tuner, console, findings), lambda: _count(findings) > 0)
    console.print(_table(findings, ranks))
    left = len(tuner.crossings) - _count(findings)
    if left:
        why = "interrupted" if interrupted else "time was up, or groups failed"
        console.print(
            f"{why}: {left} of {len(tuner.crossings)} constants keep their defaults", style="yellow"
        )
    with told(OSError):
        tuning_of(findings, ranks).write(out)
    console.print(
        f"saved; use it with: export DIST2_TUNING={out.absolute()}", highlight=False, soft_wrap=True
    )
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


def _measure(tuner: Tuner, console: Console, into: list[Finding]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # A bar with a thread would disturb the measurements.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("starting ranks", total=tuner.steps)
        progress.refresh()
        step = partial(progress.update, task, advance=1, refresh=True)
        with tuner:
            for crossing in tuner.crossings:
                progress.update(task, description=crossing.constant, refresh=True)
                into.append(tuner.measure(crossing, step))


def _count(findings: Sequence[Finding]) -> int:
    """Return how many constants were measured."""
    return sum(each.value is not None for each in findings)


def _table(findings: Sequence[Finding], ranks: int) -> Table:
    table = Table(title=f"constants for {ranks} ranks", title_justify="left", box=SIMPLE)
    for column in ("constant", "measured with", "over"):
        table.add_column(column)
    for column in ("default", "here"):
        table.add_column(column, justify="right")
    for each in findings:
        crossing = each.crossing
        here = "[yellow]not measured[/]" if each.value is None else size_text(each.value)
        default = size_text(crossing.default(ranks))
        over = "shared memory" if crossing.transport == "auto" else crossing.transport
        table.add_row(crossing.constant, crossing.kind.value, over, default, here)
    return table


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    tune()
