"""What becomes of measurements: a table with ratios, a JSON file, a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import torch
from harness import Measurement
from rich.table import Table
from workloads import Case

RESULTS = Path(__file__).parent / "results"


@attrs.frozen
class Comparison:
    """The measurements of one case, against one contender as the peer.

    Attributes:
        case: Which.
        by_name: Contender to what it took.
        peer: The contender that the others are compared with.
    """

    case: Case
    by_name: dict[str, Measurement]
    peer: str

    def ratio(self, name: str) -> float | None:
        """Return how many times faster than the peer a contender is; None if either has no figure."""
        own, other = self.by_name[name].median_s, self.by_name[self.peer].median_s
        return other / own if own and other else None

    def best_ratio(self, name: str) -> float | None:
        """Return the same for the best round of each: what is left where luck is taken out."""
        own, other = self.by_name[name].rounds_s, self.by_name[self.peer].rounds_s
        return min(other) / min(own) if own and other else None

    def is_slower(self, name: str) -> bool:
        """Whether a contender loses to the peer."""
        ratio = self.ratio(name)
        return ratio is not None and ratio < 1


def compare(measurements: Iterable[Measurement], peer: str) -> list[Comparison]:
    """Group measurements by case, in their order."""
    cases: dict[Case, dict[str, Measurement]] = {}
    for each in measurements:
        cases.setdefault(each.case, {})[each.contender] = each
    return [Comparison(case, by_name, peer) for case, by_name in cases.items()]


def table_of(comparisons: Sequence[Comparison], names: Sequence[str], title: str) -> Table:
    """Return a line for each case: medians, and for all but the peer the ratio to it."""
    peer = comparisons[0].peer
    table = Table(title=title, title_justify="left")
    table.add_column("operation")
    table.add_column("bytes", justify="right")
    for name in (peer, *(name for name in names if name != peer)):
        table.add_column(name, justify="right")
        if name != peer:
            table.add_column("ratio", justify="right")
    before = ""
    for each in comparisons:
        row = [each.case.op if each.case.op != before else "", size_text(each.case.nbytes)]
        before = each.case.op
        row.append(time_text(each.by_name[peer]))
        for name in names:
            if name != peer:
                row += [time_text(each.by_name[name]), _ratio_text(each, name)]
        table.add_row(*row)
    return table


def markdown_of(comparisons: Sequence[Comparison], name: str) -> str:
    """Return a contender's medians as a table for a document: operations down, sizes across."""
    sizes = sorted({each.case.nbytes for each in comparisons if each.case.nbytes})
    cells = {(each.case.op, each.case.nbytes): each for each in comparisons}
    lines = [
        f"| {name} | " + " | ".join(f"{size_text(size)}" for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for op in dict.fromkeys(each.case.op for each in comparisons):
        row = [cells.get((op, size)) for size in (sizes if (op, 0) not in cells else [0])]
        texts = [_markdown_cell(each, name) if each else "" for each in row]
        lines.append(f"| `{op}` | " + " | ".join(texts + [""] * (len(sizes) - len(texts))) + " |")
    return "\n".join(lines) + "\n"


def _markdown_cell(comparison: Comparison, name: str) -> str:
    own, ratio = time_text(comparison.by_name[name]), comparison.ratio(name)
    if ratio is None or name == comparison.peer:
        return own
    text = f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"
    return f"{own} ({text})" if ratio >= 1 else f"{own} (**{text}**)"


def size_text(nbytes: int) -> str:
    """Return ``8``, ``64 KiB``, ``16 MiB``."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return str(nbytes)


def time_text(measurement: Measurement) -> str:
    """Return a median in microseconds or milliseconds, or a dash."""
    if measurement.median_s is None:
        return "-"
    micros = measurement.median_s * 1e6
    return f"{micros:.1f} us" if micros < 1000 else f"{micros / 1000:.2f} ms"


def _ratio_text(comparison: Comparison, name: str) -> str:
    ratio = comparison.ratio(name)
    if comparison.by_name[name].failure is not None:
        return "[red]failed[/]"
    if ratio is None:
        return ""
    return f"[red]{ratio:.2f} slower[/]" if ratio < 1 else f"{ratio:.1f}x"


def machine() -> dict[str, Any]:
    """Describe what it was measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def save(name: str, measurements: Sequence[Measurement], settings: dict[str, Any]) -> Path:
    """Write the measurements with all their rounds; return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "measurements": [{**attrs.asdict(each), "median_s": each.median_s} for each in measurements],
    }
    path.write_text(json.dumps(document, indent=1))
    return path


def save_markdown(name: str, comparisons: Sequence[Comparison], names: Sequence[str]) -> Path:
    """Write every contender's table for a document; return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join(markdown_of(comparisons, each) for each in names))
    return path


def plot(name: str, comparisons: Sequence[Comparison], names: Sequence[str], title: str) -> Path:
    """Draw time against size, a panel an operation; return the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(each.case.op for each in comparisons if each.case.nbytes))
    columns = min(4, len(ops))
    rows = -(-len(ops) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(ops) :]:
        axis.axis("off")
    for axis, op in zip(axes.flat, ops, strict=False):
        cells = [each for each in comparisons if each.case.op == op]
        for contender in names:
            points = [(each.case.nbytes, each.by_name[contender].median_s) for each in cells]
            known = [(nbytes, 1e6 * median) for nbytes, median in points if median is not None]
            if known:
                axis.plot(*zip(*known, strict=True), marker="o", markersize=3, label=contender)
        axis.set(title=op, xlabel="bytes", ylabel="microseconds", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
