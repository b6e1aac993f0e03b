"""Ask `dist2 query`; the queries of the documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner

from observability.commands.query import query

DOCUMENT = (Path(__file__).parents[2] / "docs" / "queries.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)\n```", DOCUMENT, re.DOTALL)


def ask(where: str | Path, sql: str, *options: str) -> list[dict[str, object]]:
    """Return the rows of an answer."""
    ended = CliRunner().invoke(query, [str(where), sql, "--format", "json", *options])
    assert ended.exit_code == 0, (sql, ended.output, ended.stderr)
    rows: list[dict[str, object]] = json.loads(ended.stdout)
    return rows
