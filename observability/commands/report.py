"""``dist2 report FOLDER``: an incident as one page of HTML, to attach to a ticket."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import click

from observability.commands.control_plane import end_without_answer, write_output
from observability.incidents.reading import Incident, NoIncidentError, place_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ccc; vertical-align: top }
.bad { color: #a40000; font-weight: 600 }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { overflow-x: auto; background: #f4f4f4; padding: .6rem }
"""
FRAMES = 64
MOST_RANKS = 256
"""Ranks that are shown: the culprits first."""


@click.command()
@click.argument("folder")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True
)
def report(folder: str, output: Path) -> None:
    """Write an incident as one page that loads nothing, to attach to a ticket.

    FOLDER is that of the incident, which may be in a zip. Ends with 2 if it is none.
    """
    try:
        place = place_of(folder)
        if place is None:
            raise NoIncidentError(f"{folder} is a URL: a report is of an incident: its folder is in the log")
        incident = Incident.read(place)
    except NoIncidentError as error:
        end_without_answer(error)
    write_output(output, page_of(incident).encode(errors="replace"))
    click.echo(f"{output}: {len(incident.parts)} parts of ranks")


def page_of(incident: Incident) -> str:
    """Return the page of an incident."""
    found, rows, head = incident.desync(), incident.stacks(), incident.head
    culprits = set(found["culprits"])
    rows.sort(key=lambda row: (row["rank"] not in culprits, row["rank"]))
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(head["at_s"]))
    title = f"Incident of {head['name']}, {at}"
    named = ", ".join(map(str, sorted(culprits))) or "none is named"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Culprits: <span class=bad>{named}</span>. Folder: <code>{escape(incident.path.name)}</code></p>",
        _list("Verdict", found["verdict"]),
        _list("Operations that wait", [each["sentence"] for each in found["waiting"]]),
        _list("Chains", found["chains"]),
        "<h2>Ranks</h2>",
        _table(("rank", "state", "last operation", "main thread", "process"), _ranks(incident, culprits)),
        "<h2>Stacks</h2>",
        *(_stack(row, row["rank"] in culprits) for row in rows[:MOST_RANKS]),
        "<h2>Errors</h2>",
        *_errors(incident),
        "<h2>Environment</h2>",
        *_environments(incident),
    ]
    content = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{content}\n</body></html>\n"
    )


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>" if items else ""


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _ranks(incident: Incident, culprits: set[int]) -> Iterable[tuple[str, ...]]:
    ranks = sorted(incident.job()["ranks"], key=lambda row: (row["rank"] not in culprits, row["rank"]))
    for row in ranks[:MOST_RANKS]:
        if row["state"] == "silent":
            yield str(row["rank"]), "silent", "", row["silence"], ""
            continue
        last = [group["last"] for group in row["groups"] if group["last"]]
        told = f"{last[0]['call']} #{last[0]['seq']}, {last[0]['state']}" if last else ""
        yield str(row["rank"]), row["state"], told, row["main"]["place"], f"{row['host']}:{row['pid']}"


def _stack(row: dict[str, Any], is_open: bool) -> str:
    """Return the threads of a rank, the main thread first."""
    lines: list[str] = [] if row["threads"] else [row["silence"]]
    for thread in sorted(row["threads"] or (), key=lambda each: not each["main"]):
        frames = thread["frames"][:FRAMES]
        lines.append(f"Thread {thread['name']}")
        lines += [f"  {each['file']}:{each['line']} in {each['name']}" for each in frames]
    for thread in (row["process"] or {}).get("threads", ()):
        lines.append(f"  thread {thread['name']}: state {thread['state']} {thread['wchan']}")
    return _details(f"rank {row['rank']}", "\n".join(lines), is_open)


def _errors(incident: Incident) -> Iterable[str]:
    for rank, part in incident.failures.items():
        error = part["error"]
        text = part["why"] if error is None else error["traceback"]
        yield _details(f"rank {rank}: {part['why']}", text)


def _details(title: str, text: str, is_open: bool = False) -> str:
    shown = " open" if is_open else ""
    return f"<details{shown}><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _environments(incident: Incident) -> Iterable[str]:
    for rank, part in list(incident.parts.items())[:MOST_RANKS]:
        told = {name: part[name] for name in ("program", "versions", "kernel", "environment")}
        yield _details(f"rank {rank}", json.dumps(told, indent=1))
