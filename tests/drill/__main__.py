"""The whole matrix of deaths: every operation x phase x number of ranks x transport, with real processes.

    PYTHONPATH=tests python -m drill --ranks 2 4 8

In each cell one rank is killed. Every survivor must get an error that names it, within a second, twice, agree
with the others on it, and continue in a smaller group. Prints for each operation the longest time from a
death to the error on a survivor, and exits with 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from dist2.cli.bench.stopping import stop_as_by_ctrl_c
from drill.cells import FaultCell, Performance
from drill.crew import Crew, Told
from drill.operations import OPERATIONS

PHASES = ("before", "during", "between")
TRANSPORTS = ("shm", "tcp")
LIMIT_S = 40.0

Column = tuple[int, str]
"""How many ranks, and the transport."""


@attrs.define
class Figures:
    """Longest times from a death to an error, by operation and column."""

    worst_s: dict[tuple[str, Column], float] = attrs.field(factory=dict)
    failed: list[str] = attrs.field(factory=list)
    cells: int = 0

    def add(self, cell: FaultCell, transport: str, told: Sequence[Told]) -> None:
        """Note the outcome of a cell."""
        self.cells += 1
        for role, each in enumerate(told):
            if each.outcome != ("died" if role in cell.dies else "done"):
                self.failed.append(f"{cell} over {transport}, rank {role}: {each}")
            elif isinstance(each.answer, float):
                key = (cell.operation, (cell.roles, transport))
                self.worst_s[key] = max(self.worst_s.get(key, 0.0), each.answer)

    def table(self, columns: Sequence[Column]) -> Iterator[str]:
        """Yield the lines of a table in Markdown, in milliseconds."""
        yield "| operation | " + " | ".join(f"{ranks} ranks, {name}" for ranks, name in columns) + " |"
        yield "|---" * (1 + len(columns)) + "|"
        for operation in OPERATIONS:
            figures = [self.worst_s.get((operation, column)) for column in columns]
            cells = ("" if worst is None else f"{1000 * worst:.0f} ms" for worst in figures)
            yield f"| {operation} | " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    given = parser.parse_args()
    os.environ["DIST2_INCIDENTS"] = "0"  # the thread that looks for waits stays until its process ends
    columns = [(ranks, transport) for ranks in given.ranks for transport in given.transports]
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="dist2-drill-") as folder:
        crew = Crew(Path(folder))
        try:
            for ranks, transport in columns:
                for nth, operation in enumerate(given.operations):
                    for phase in PHASES:
                        cell = FaultCell(operation, phase, "sigkill", (nth + figures.cells) % ranks, ranks)
                        path = Path(folder) / f"store-{figures.cells}"
                        told = crew.run(Performance(cell, transport, path), ranks, LIMIT_S)
                        figures.add(cell, transport, told)
        finally:
            crew.end()
    print("\n".join(figures.table(columns)))
    print(f"{figures.cells} cells, {len(figures.failed)} failures, ", end="")
    print(f"longest from a death to an error: {1000 * max(figures.worst_s.values(), default=0):.0f} ms")
    print("\n".join(figures.failed))
    return bool(figures.failed)


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    sys.exit(main())
