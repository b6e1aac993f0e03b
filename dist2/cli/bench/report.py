"""Output of comparisons: a table for the terminal, tables for a document, a JSON file, plots."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.box import SIMPLE
from rich.table import Table

from dist2.cli.bench.measuring import Comparison, Measurement
from dist2.cli.bench.peers import Peer
from dist2.cli.bench.sizes import rate_text, ratio_text, size_text, time_text
from dist2.cli.bench.workloads import Case

FORMAT = 1
COLUMNS = 3
"""Columns of panels in a plot: a panel for each operation."""


def table_of(comparisons: Sequence[Comparison], contenders: Sequence[Peer], title: str) -> Table:
    """Return a line for each case: the first contender's figures, and of the others time and ratio."""
    subject, *others = contenders
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("operation", no_wrap=True)
    for column in ("bytes", subject.title, "algbw", "busbw", *(f"{peer.title}, ratio" for peer in others)):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for each in comparisons:
        row = ["" if each.case.op == before else each.case.op]
        row += [size_text(each.case.nbytes) if each.case.nbytes else "", _time(each, subject)]
        row += [
            rate_text(each.algorithm_bandwidth(subject.name)),
            rate_text(each.bus_bandwidth(subject.name)),
        ]
        for peer in others:
            row.append(f"{_time(each, peer)} {_ratio(each, peer)}")
        table.add_row(*row)
        before = each.case.op
    return table


def _time(comparison: Comparison, peer: Peer) -> str:
    found = comparison.by_name[peer.name]
    return "[red]failed[/]" if found.failure else time_text(found.median_s)


def _ratio(comparison: Comparison, peer: Peer) -> str:
    ratio = comparison.ratio(peer.name)
    if ratio is None:
        return ""
    text = f"{ratio_text(ratio):>6}"
    return text if ratio >= 1 else f"[red]{text}[/]"


def verdict(comparisons: Sequence[Comparison], peer: Peer) -> str:
    """Say against one peer how often the subject is ahead, and where it is not."""
    ratios = [(each, each.ratio(peer.name)) for each in comparisons]
    known = [(each, ratio) for each, ratio in ratios if ratio is not None]
    lost: dict[str, list[str]] = {}
    for each, ratio in known:
        if ratio < 1:
            lost.setdefault(each.case.op, []).append(size_text(each.case.nbytes) if each.case.nbytes else "")
    count = len(known) - sum(map(len, lost.values()))
    text = f"ahead of {peer.title} in {count} of {len(known)} cases"
    where = "; ".join(f"{op} {', '.join(sizes)}".rstrip() for op, sizes in lost.items())
    return f"{text}; behind at {where}" if lost else text


def markdown_of(comparisons: Sequence[Comparison], contenders: Sequence[Peer]) -> str:
    """Return tables for a document, one an operation: sizes down, contenders across."""
    return "\n".join(
        f"**`{op}`**\n\n{_markdown_table([each for each in comparisons if each.case.op == op], contenders)}"
        for op in dict.fromkeys(each.case.op for each in comparisons)
    )


def _markdown_table(comparisons: Sequence[Comparison], contenders: Sequence[Peer]) -> str:
    subject, *others = contenders
    head = ["bytes", subject.title, "busbw", *(peer.title for peer in others)]
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for each in comparisons:
        cells = [size_text(each.case.nbytes) if each.case.nbytes else "", time_text(each.own.median_s)]
        cells.append(rate_text(each.bus_bandwidth(subject.name)))
        for peer in others:
            ratio, time = each.ratio(peer.name), time_text(each.by_name[peer.name].median_s)
            mark = "**" if ratio is not None and ratio < 1 else ""
            cells.append(time if ratio is None else f"{time} ({mark}{ratio_text(ratio)}{mark})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """Describe the machine of the measurements."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(
    path: Path, comparisons: Sequence[Comparison], contenders: Sequence[Peer], settings: Mapping[str, Any]
) -> None:
    """Write every figure, with all rounds, as JSON."""
    document = {
        "format": FORMAT,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": dict(settings),
        "contenders": [attrs.asdict(peer) for peer in contenders],
        "cases": [_case_document(each, contenders) for each in comparisons],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def load(path: Path) -> tuple[list[Comparison], list[Peer]]:
    """Read a file that `save` wrote; return its comparisons, and its contenders in their order.

    Raises:
        ValueError: It is no such file.
    """
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is no benchmark of format {FORMAT}")
    contenders = [Peer(**each) for each in document["contenders"]]
    found = []
    for each in document["cases"]:
        case = Case(each["op"], each["nbytes"], each["shared"])
        by_name = {
            name: Measurement(
                case, name, tuple(figures["rounds_s"]), figures["failure"], each["foreign_cores"]
            )
            for name, figures in each["contenders"].items()
        }
        world_size = document["settings"]["world_size"]
        found.append(Comparison(case, by_name, contenders[0].name, world_size))
    return found, contenders


def _case_document(comparison: Comparison, contenders: Sequence[Peer]) -> dict[str, Any]:
    found = {}
    for name in (peer.name for peer in contenders):
        measurement = comparison.by_name[name]
        found[name] = {
            "median_s": measurement.median_s,
            "rounds_s": measurement.rounds_s,
            "algbw": comparison.algorithm_bandwidth(name),
            "busbw": comparison.bus_bandwidth(name),
            "ratio": comparison.ratio(name),
            "failure": measurement.failure,
        }
    return {
        "op": comparison.case.op,
        "nbytes": comparison.case.nbytes,
        "shared": comparison.case.shared,
        "foreign_cores": comparison.own.foreign_cores,
        "contenders": found,
    }


def draw(path: Path, comparisons: Sequence[Comparison], contenders: Sequence[Peer], title: str) -> bool:
    """Draw time against size, on logarithmic axes, into a file; its suffix gives the format.

    Returns:
        Whether a plot was drawn: some case has a size.
    """
    from matplotlib.figure import Figure

    ops = list(dict.fromkeys(each.case.op for each in comparisons if each.case.nbytes))
    if not ops:
        return False
    columns = min(COLUMNS, len(ops))
    rows = -(-len(ops) // columns)
    figure = Figure(figsize=(4 * columns, 2.8 * rows + 0.6))
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, op in zip(axes, ops, strict=False):
        cells = [each for each in comparisons if each.case.op == op]
        for peer in contenders:
            points = [(each.case.nbytes, each.by_name[peer.name].median_s) for each in cells]
            known = [(nbytes, median * 1e6) for nbytes, median in points if median is not None]
            if known:
                width = 2.0 if peer is contenders[0] else 1.0
                axis.plot(*zip(*known, strict=True), marker="o", markersize=3, lw=width, label=peer.title)
        axis.set(title=op, xlabel="bytes", ylabel="microseconds", xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    for axis in list(axes)[len(ops) :]:
        axis.axis("off")
    next(iter(figure.axes)).legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return True
