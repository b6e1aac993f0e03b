"""Runs the code cells of a notebook in one namespace; prints the output of each as a line of JSON.

python tests/support/notebook.py NOTEBOOK
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, (source, _) in enumerate(code_cells(Path(sys.argv[1]))):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(source, f"<cell {number}>", "exec"), namespace)
        print(json.dumps(output.getvalue()), flush=True)


def code_cells(notebook: Path) -> list[tuple[str, str]]:
    """Return the source and the saved output of each code cell."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    return [
        ("".join(cell["source"]), "".join(line for each in cell["outputs"] for line in each["text"]))
        for cell in cells
    ]


if __name__ == "__main__":
    main()
