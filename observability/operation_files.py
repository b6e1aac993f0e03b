"""The files of operation logs as tables for SQL.

DuckDB reads the files itself, as there may be millions of rows. This module imports no torch, so that
`dist2 query` starts at once.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

CALLS = ".calls.csv"
OPERATIONS = ".operations.csv"
"""Suffixes of the two files of a segment."""
Folder = Path | zipfile.Path
UNREADABLE = (OSError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What a file of a folder raises that cannot be read; in a zip, which may be broken or have a password."""

_CALL_COLUMNS = (
    "{'call': 'BIGINT', 'rank': 'BIGINT', 'host': 'VARCHAR', 'pid': 'BIGINT', 'uid': 'VARCHAR', "
    "'group_name': 'VARCHAR', 'group_rank': 'BIGINT', 'ranks': 'VARCHAR', 'op': 'VARCHAR', "
    "'text': 'VARCHAR', 'bytes': 'BIGINT'}"
)
_OPERATION_COLUMNS = (
    "{'call': 'BIGINT', 'seq': 'BIGINT', 'called_us': 'BIGINT', 'queued_ns': 'BIGINT', "
    "'duration_ns': 'BIGINT', 'error': 'VARCHAR'}"
)
_READ = """
CREATE OR REPLACE TEMP TABLE {name} AS
SELECT *, regexp_replace(parse_filename(filename), '{suffix}$', '') AS segment
FROM read_csv(?, columns = {columns}, header = false, delim = ',', quote = '"',
              escape = '"', auto_detect = false, ignore_errors = true, filename = true)
"""
_TABLES = """
INSERT INTO operations BY NAME
SELECT rank, group_name, uid, op, seq, if(error IS NULL, 'completed', 'failed') AS state, text AS call, bytes,
       called_us / 1e6 AS called_s, duration_ns / 1e9 AS duration_s, queued_ns / 1e9 AS queued_s, error
FROM logged JOIN calls USING (segment, call);
INSERT INTO ranks BY NAME SELECT DISTINCT rank, host, pid FROM calls ORDER BY rank, pid;
INSERT INTO groups BY NAME
SELECT rank, group_name, uid, any_value(group_rank) AS group_rank, any_value(ranks) AS ranks,
       max(seq) AS begun, arg_max(op, called_us) AS last_op, arg_max(seq, called_us) AS last_seq,
       count(*) AS operations, sum(bytes)::BIGINT AS bytes
FROM logged JOIN calls USING (segment, call) GROUP BY rank, group_name, uid;
INSERT INTO failures BY NAME
SELECT rank, group_name, text AS call, split_part(error, ': ', 1) AS error,
       substr(error, strpos(error, ': ') + 2) AS message
FROM logged JOIN calls USING (segment, call) WHERE error IS NOT NULL;
INSERT INTO events BY NAME
SELECT called_us / 1e6 AS at_s, 'WARNING' AS level, rank,
       seq || ' operations are missing in the log of process ' || pid || ' of ' || host AS message
FROM logged JOIN (SELECT segment, min(rank) AS rank, any_value(pid) AS pid, any_value(host) AS host
                  FROM calls GROUP BY segment) USING (segment) WHERE call IS NULL
"""


def is_operation_log(folder: Folder) -> bool:
    """Return whether a folder has the files of an operation log."""
    return any(each.name.endswith(OPERATIONS) for each in folder.iterdir())


def fill_from_log(database: DuckDBPyConnection, folder: Folder) -> None:
    """Insert the rows of an operation log into the tables of `observability.job.tables`.

    Args:
        database: It has these tables, empty.
        folder: The log: that of one process, or of all of a job; perhaps in a zip.

    Raises:
        OSError, RuntimeError, zipfile.BadZipFile, zlib.error: As `UNREADABLE`.
    """
    import duckdb

    with _unpacked(folder) as path:
        names = {each.name for each in path.iterdir()}
        segments = sorted(
            name.removesuffix(CALLS)
            for name in names
            if name.endswith(CALLS) and f"{name.removesuffix(CALLS)}{OPERATIONS}" in names
        )
        try:
            _read(database, path, segments)
        except duckdb.IOException:  # a process that runs has removed its oldest segment meanwhile
            try:
                _read(database, path, _without_oldest(segments))
            except duckdb.IOException as error:
                raise OSError(str(error).partition("\n")[0]) from error
    database.execute(_TABLES)


def _read(database: DuckDBPyConnection, path: Path, segments: list[str]) -> None:
    """Read the files of segments into tables; the operations first, as their calls are written before them.

    Raises:
        duckdb.IOException: A file cannot be read.
    """
    for name, suffix, columns in (
        ("logged", OPERATIONS, _OPERATION_COLUMNS),
        ("calls", CALLS, _CALL_COLUMNS),
    ):
        files = [str(path / f"{segment}{suffix}") for segment in segments]
        database.execute(_READ.format(name=name, suffix=suffix, columns=columns), [files])


def _without_oldest(segments: list[str]) -> list[str]:
    """Return the segments without the oldest of each process that has others: those are the next to go."""
    of_process: dict[str, list[str]] = defaultdict(list)
    for segment in segments:
        of_process[segment.rpartition("-")[0]].append(segment)
    return [segment for some in of_process.values() for segment in some[len(some) > 1 :]]


@contextmanager
def _unpacked(folder: Folder) -> Iterator[Path]:
    """Yield a folder whose files DuckDB can read: of a zip, one with the files of the log."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as path:
        for each in folder.iterdir():
            if each.name.endswith((CALLS, OPERATIONS)):
                with each.open("rb") as source, Path(path, each.name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        yield Path(path)
