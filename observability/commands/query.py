"""``dist2 query URL`` or ``FOLDER`` ``"select ..."``: SQL over all ranks of a job, by DuckDB."""

from __future__ import annotations

import csv
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from observability.commands.control_plane import ControlPlane, NoAnswerError, address, end_without_answer
from observability.commands.ending import end_unanswered
from observability.incidents.reading import Incident, NoIncidentError, place_of
from observability.job.tables import TABLES, Row, tables_of
from observability.operation_files import UNREADABLE, Folder, fill_from_log, is_operation_log

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

WRONG_QUERY = 1
ASKED_AT_A_TIME = 16
SECONDS = 60
LIMIT_S = 20.0
UNLIMITED = 1 << 20
"""Columns of an output that is no terminal: a row is a line, with all of its values."""


@click.command()
@address
@click.argument("sql", required=False)
@click.option(
    "--seconds",
    type=click.IntRange(0, 3600),
    default=SECONDS,
    show_default=True,
    help="Operations of a live job: how far back.",
)
@click.option(
    "--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True
)
def query(
    url: str, sql: str | None, token: str | None, token_file: Path | None, seconds: int, form: str
) -> None:
    """Ask all ranks of a job, an incident, or an operation log, by SQL.

    The query reads these tables only, no files and no network: ``--format csv`` is for other programs.

    URL is that of any control plane of the job, or the folder of an incident or of an operation log, which
    may be in a zip; without SQL, the tables are listed. Ends with 1 if the query is wrong, and 2 if there is
    no answer.
    """
    if sql is None or not sql.strip():
        for name, columns in TABLES.items():
            click.echo(f"{name}({', '.join(columns)})")
        return
    try:
        import duckdb
    except ModuleNotFoundError:
        end_without_answer(NoAnswerError("queries need duckdb: pip install 'dist2[query]'"))
    plane = None
    try:
        folder = place_of(url)
        log = folder if folder is not None and is_operation_log(folder) else None
        if log is not None:
            rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        elif folder is not None:
            rows = _of_incident(folder)
        else:
            plane = ControlPlane.of(url, token, token_file)
            rows = _of_job(plane, seconds)
    except NoIncidentError as error:
        end_without_answer(error)
    except NoAnswerError as error:
        end_unanswered(error, plane)
    except OSError as error:  # a folder of another user
        end_without_answer(NoAnswerError(f"{url}: {error}"))
    with duckdb.connect() as database:
        fill(database, rows)
        if log is not None:
            try:
                fill_from_log(database, log)
            except UNREADABLE as error:
                end_without_answer(NoAnswerError(f"{url}: {error}"))
        database.execute("SET enable_external_access = false; SET lock_configuration = true")
        try:
            with _ended_by_ctrl_c():
                found = database.execute(sql)
                names = [str(column[0]) for column in found.description or ()]
                _show(names, found.fetchall(), form)
        except duckdb.Error as error:
            click.echo(str(error), err=True)
            sys.exit(WRONG_QUERY)


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """End the process at once at Ctrl-C, which DuckDB notices minutes later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def fill(database: DuckDBPyConnection, rows: dict[str, list[Row]]) -> None:
    """Make the tables.

    Args:
        database: An empty one.
        rows: By table, as `tables_of` returns them.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, columns in TABLES.items():
            path = Path(folder, f"{name}.json")
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[name]))
            typed = ", ".join(f"'{column}': '{kind}'" for column, kind in columns.items())
            read = f"read_json('{path}', format = 'newline_delimited', columns = {{{typed}}})"
            database.execute(f"CREATE TABLE {name} AS SELECT * FROM {read}")


def _of_incident(path: Folder) -> dict[str, list[Row]]:
    incident = Incident.read(path)
    timelines = [part["timeline"] for part in incident.parts.values()]
    rows = tables_of(incident.job(), incident.stacks(), timelines, None)
    for rank, part in incident.failures.items():  # the errors that ended operations and ranks
        if part["error"] is not None:
            error, message = part["error"]["type"], part["error"]["message"]
            rows["failures"].append({"rank": rank, "error": error, "message": message})
    return rows


def _of_job(plane: ControlPlane, seconds: int) -> dict[str, list[Row]]:
    job = plane.get_json("/job")
    if job.get("ended"):
        raise NoAnswerError("the ranks have ended")
    urls = [rank["url"] or plane.base for rank in job["ranks"] if rank["state"] != "silent"]

    def ask(url: str) -> dict[str, Any] | None:
        try:
            return plane.at(url).get_json(f"/timeline?ms={seconds * 1000}", LIMIT_S)
        except NoAnswerError as error:  # the other ranks are there
            click.echo(f"without the operations of a rank: {error}", err=True)
            return None

    with ThreadPoolExecutor(ASKED_AT_A_TIME) as pool:
        timelines = [each for each in pool.map(ask, urls) if each is not None]
    stacks = plane.get_json("/stacks")["ranks"]
    return tables_of(job, stacks, timelines, plane.get_json("/stragglers", LIMIT_S))


def _show(names: Sequence[str], rows: Sequence[Iterable[Any]], form: str) -> None:
    if form == "json":
        click.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1, default=str))
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerows([names, *rows])
    else:
        table = Table(box=None)
        for name in names:  # what does not fit the terminal is folded, not cut off
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*("" if value is None else _text(value) for value in row))
        console = Console(soft_wrap=True, highlight=False, markup=False)
        if not console.is_terminal:
            console.width = UNLIMITED
        with console.capture() as captured:
            console.print(table)
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _text(value: object) -> str:
    digits = ".6g" if isinstance(value, float) and abs(value) < 1e6 else ".3f"  # of a time: milliseconds
    text = format(value, digits) if isinstance(value, float) else str(value)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
