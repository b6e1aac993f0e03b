"""Plots of measurements: time against size, a panel for each question, a line for each contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS = 3

Points = Sequence[tuple[int, float]]
"""Bytes and seconds."""


def draw(path: Path, title: str, panels: Mapping[str, Mapping[str, Points]]) -> None:
    """Draw panels into a file; its suffix gives the format.

    Args:
        panels: By name, the points of each contender; the first one's line is the broadest.
    """
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows + 0.6))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, lines) in zip(axes, panels.items(), strict=False):
        for turn, (contender, points) in enumerate(lines.items()):
            sizes = [nbytes for nbytes, _ in points]
            times_us = [1e6 * seconds for _, seconds in points]
            axis.plot(sizes, times_us, marker="o", markersize=3, lw=1.0 if turn else 2.0, label=contender)
        axis.set(title=name, xlabel="bytes", ylabel="microseconds", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
