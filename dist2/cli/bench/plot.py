"""Draws comparisons: time against size on logarithmic axes, a panel for each operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dist2.cli.bench.comparison import Comparison
from dist2.cli.bench.peers import Peer

COLUMNS = 3


def draw(path: Path, comparisons: Sequence[Comparison], contenders: Sequence[Peer], title: str) -> bool:
    """Draw into a file; its suffix gives the format. Return False without a plot if no case has a size."""
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
