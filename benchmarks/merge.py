"""Makes the tables and the plot of docs/performance.md from the JSON files of several ``dist2 bench`` runs.

    dist2 bench --op all_reduce --out a && dist2 bench --op barrier --out b
    python benchmarks/merge.py a/2-ranks.json b/2-ranks.json --plot docs/inside-a-host-2.png

All runs must have had the same contenders. A case that was measured twice counts as in the last file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from dist2.cli.bench.measuring import Comparison
from dist2.cli.bench.report import draw, load, markdown_of, verdict
from dist2.cli.bench.workloads import LIST_OPERATIONS, OPERATIONS, Case


def main() -> None:
    """Merge, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, help="file to draw into")
    parser.add_argument("--tables", type=Path, help="file to write the tables into; default: print them")
    options = parser.parse_args()
    by_case: dict[Case, Comparison] = {}
    contenders = None
    for path in options.files:
        comparisons, found = load(path)
        if contenders not in (None, found):
            parser.error(f"{path} has other contenders than the files before")
        contenders = found
        by_case |= {each.case: each for each in comparisons}
    assert contenders is not None
    order = [*OPERATIONS, *LIST_OPERATIONS]
    merged = sorted(by_case.values(), key=lambda each: (order.index(each.case.op), each.case.nbytes))
    tables = markdown_of(merged, contenders)
    if options.tables is None:
        print(tables)
    else:
        options.tables.write_text(tables)
    console = Console(stderr=True, width=200)
    for peer in contenders[1:]:
        console.print(verdict(merged, peer), highlight=False)
    worst = max(each.own.foreign_cores for each in merged)
    console.print(f"other processes kept {worst:.2f} cores busy in the worst case", highlight=False)
    if options.plot is not None:
        draw(options.plot, merged, contenders, f"{merged[0].world_size} ranks on one host, float32")


if __name__ == "__main__":
    main()
