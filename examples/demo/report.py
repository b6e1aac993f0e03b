"""What the demo prints: where to look while it runs, and at the end what its own metrics say."""

from __future__ import annotations

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
    """Where a rank answers, and to whom.

    Attributes:
        url: ``http://127.0.0.1:40123``.
        token: What it asks for.
    """

    url: str
    token: str

    @property
    def page(self) -> str:
        """What to open in a browser."""
        return f"{self.url}/?token={self.token}"

    @property
    def curl(self) -> str:
        """What to type to see the metrics."""
        return f"curl -H 'Authorization: Bearer {self.token}' {self.url}/metrics"


def introduce(console: Console, plane: ControlPlane) -> None:
    """Say where to look while it runs."""
    console.print("[bold]Control plane of rank 0[/] (loopback only, and only with the token)")
    _print_line(console, "  live page  ", plane.page)
    _print_line(console, "  metrics    ", plane.curl)


def conclude(console: Console, planes: Sequence[ControlPlane], result: Result, out: Path) -> None:
    """Print the outcome, read back from every rank's ``/metrics``, and how to look further."""
    scrapes = [read_metrics(plane.url, plane.token) for plane in planes]
    console.print(figures(scrapes, result))
    console.print(by_rank(scrapes))
    console.print("[bold]To look further[/]")
    console.print("  make demo HOLD=600   keeps the control planes up for ten minutes")
    _print_line(console, "  flight recorder      ", f"{out}/flight (read it with torchfrtrace {out}/flight)")
    _print_line(console, "  timeline             ", f"{out}/trace_0.json (open it in Perfetto)")
    console.print("  what happened inside docs/architecture.md, docs/metrics.md")


def figures(scrapes: Sequence[Scrape], result: Result) -> Table:
    """Return the main table; operations, bytes and durations are those of rank 0."""
    mine, slow = scrapes[0], slowest(scrapes)
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
        "slowest rank": f"{slow} (the others waited for it)",
    }
    table = Table("figure", "value", title="Handwritten digits, data-parallel", title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    return table


def by_rank(scrapes: Sequence[Scrape]) -> Table:
    """Return how long each rank spent in `all_reduce`: little means that it came last."""
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


def slowest(scrapes: Sequence[Scrape]) -> int:
    """Return the rank that waited least in `all_reduce`: it arrived last, and the others waited for it."""
    return min(range(len(scrapes)), key=lambda rank: time_inside(scrapes[rank]))


def time_inside(scrape: Scrape) -> float:
    """Return the seconds that a rank spent in `all_reduce`."""
    return scrape.value(f"{DURATION}_sum", op="all_reduce")


def _time(value_s: float) -> str:
    if value_s >= 1:
        return f"{value_s:.2f} s"
    return f"{value_s * 1e3:.2f} ms" if value_s >= 1e-3 else f"{value_s * 1e6:.0f} us"


def _print_line(console: Console, label: str, text: str) -> None:
    """Print something to copy: in one piece, however narrow the terminal."""
    console.print(f"{label}[cyan]{escape(text)}[/]", soft_wrap=True, highlight=False)
