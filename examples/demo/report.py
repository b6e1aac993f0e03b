"""Output of the demo: the addresses of its control plane, and at the end the figures of its metrics."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from observability import Scrape, read_metrics

if TYPE_CHECKING:
    from rank import Result

DURATION = "dist2_operation_duration_seconds"


@attrs.frozen
class ControlPlane:
    """Address of a rank's control plane.

    Attributes:
        url: ``http://127.0.0.1:40123``.
        token: The bearer token that it requires.
    """

    url: str
    token: str

    @property
    def page(self) -> str:
        """The address for a browser."""
        return f"{self.url}/#token={self.token}"

    @property
    def curl(self) -> str:
        """The command that prints the metrics."""
        return f"curl -H 'Authorization: Bearer {self.token}' {self.url}/metrics"


def introduce(console: Console, plane: ControlPlane) -> None:
    """Print the addresses of a control plane."""
    console.print("[bold]Control plane of rank 0[/] (loopback only, and only with the token)")
    _print_line(console, "  live page  ", plane.page)
    _print_line(console, "  metrics    ", plane.curl)


def conclude(
    console: Console,
    planes: Sequence[ControlPlane],
    result: Result,
    waiting_s: Sequence[Sequence[float]],
    out: Path,
) -> None:
    """Print the outcome, with the figures of every rank's ``/metrics``, and the files for a closer look."""
    scrapes = [read_metrics(plane.url, plane.token) for plane in planes]
    console.print(figures(scrapes, result, slowest(waiting_s, result.elapsed_s)))
    console.print(by_rank(scrapes))
    console.print("[bold]To look further[/]")
    console.print("  make demo HOLD=600   keeps the control planes up for ten minutes")
    _print_line(console, "  flight recorder      ", f"{out}/flight, read by torchfrtrace: {analysis(out)}")
    _print_line(console, "  timeline             ", f"{out}/trace_0.json (open it in Perfetto)")
    console.print("  how it works         docs/architecture.md, docs/metrics.md")


def analysis(out: Path) -> str:
    """Return the findings of torch's analyser of flight recorders for the dumps of all ranks."""
    analyser = Path(sys.executable).with_name("torchfrtrace")
    if not analyser.exists():
        return "not installed with this torch"
    command = [str(analyser), str(out / "flight"), "-o", str(out / "torchfrtrace.pickle")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "tabulate" not in line]
    if ended.returncode:
        return f"it failed: {lines[-1] if lines else ended.returncode}"
    return "; ".join(lines) or "all recorded collectives match, no rank is missing"


def figures(scrapes: Sequence[Scrape], result: Result, slow: str) -> Table:
    """Return the main table; operations, bytes and durations are those of rank 0."""
    mine = scrapes[0]
    same = len(set(result.digests)) == 1
    weights = f"bitwise the same on {len(scrapes)} ranks" if same else "[red]differ between ranks[/]"
    pace = result.steps / result.elapsed_s
    ended, failed = mine.value("dist2_operations_total"), mine.value("dist2_errors_total")
    rows = {
        "test accuracy": f"{result.accuracy:.1%}",
        "weights": f"{weights} (sha256 {result.digests[0][:12]}…)",
        "steps/s": f"{pace:.0f} ({result.steps} in {result.elapsed_s:.1f} s)",
        "collectives": f"{ended:,.0f}, {failed:.0f} failed",
        "payload": f"{mine.value('dist2_bytes_total') / 2**20:,.1f} MiB",
        "all_reduce p50": _time(mine.quantile(0.5, op="all_reduce")),
        "all_reduce p99": _time(mine.quantile(0.99, op="all_reduce")),
        "slowest rank": slow,
    }
    table = Table("figure", "value", title="Handwritten digits, data-parallel", title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    return table


def by_rank(scrapes: Sequence[Scrape]) -> Table:
    """Return the time of each rank in `all_reduce`: a rank that arrives last spends the least."""
    table = Table(title="all_reduce by rank", title_justify="left")
    for heading in ("rank", "calls", "p50", "p99", "time inside"):
        table.add_column(heading, justify="right")
    for rank, scrape in enumerate(scrapes):
        table.add_row(
            str(rank),
            f"{scrape.value(f'{DURATION}_count', op='all_reduce'):,.0f}",
            _time(scrape.quantile(0.5, op="all_reduce")),
            _time(scrape.quantile(0.99, op="all_reduce")),
            _time(time_inside(scrape)),
        )
    return table


def slowest(waiting_s: Sequence[Sequence[float]], elapsed_s: float) -> str:
    """Return the rank that the others waited for, unless noise explains it.

    A rank is named if it spent the least time in `all_reduce` in so many epochs that equally fast ranks would
    do so in less than one run in a thousand, and if the others waited for a twentieth of the training.

    Args:
        waiting_s: For each rank, the time in `all_reduce` of each epoch.
        elapsed_s: Duration of the training.
    """
    ranks, epochs = len(waiting_s), len(waiting_s[0])
    last = Counter(min(range(ranks), key=lambda rank: waiting_s[rank][epoch]) for epoch in range(epochs))
    rank, times = last.most_common(1)[0]
    share = 1 / ranks
    chance = ranks * sum(
        math.comb(epochs, k) * share**k * (1 - share) ** (epochs - k) for k in range(times, epochs + 1)
    )
    total_s = [sum(each) for each in waiting_s]
    waited_s = min((other for one, other in enumerate(total_s) if one != rank), default=0.0) - total_s[rank]
    if chance < 1e-3 and waited_s > elapsed_s / 20:
        return f"{rank}, last in {times} of {epochs} epochs: the others waited {_time(waited_s)} for it"
    return "none stands out"


def time_inside(scrape: Scrape) -> float:
    """Return the seconds that a rank spent in `all_reduce`."""
    return scrape.value(f"{DURATION}_sum", op="all_reduce")


def _time(value_s: float) -> str:
    if value_s >= 1:
        return f"{value_s:.2f} s"
    return f"{value_s * 1e3:.2f} ms" if value_s >= 1e-3 else f"{value_s * 1e6:.0f} us"


def _print_line(console: Console, label: str, text: str) -> None:
    """Print something to copy: in one piece, also on a narrow terminal."""
    console.print(f"{label}[cyan]{escape(text)}[/]", soft_wrap=True, highlight=False)
