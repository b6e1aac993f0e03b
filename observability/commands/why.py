"""``dist2 why URL`` or ``FOLDER``: the diagnosis of a job in a terminal, live or from an incident."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from dist2.cli.arguments import number
from observability.commands.control_plane import ControlPlane, NoAnswerError, address, end_without_answer
from observability.commands.ending import end_unanswered
from observability.incidents.reading import Incident, NoIncidentError, failed, place_of
from observability.job.answer import RANK_S

NOTHING_WRONG, TROUBLE = 0, 1
"""Exit statuses of the command, beside `NO_ANSWER`."""

FRAMES = 12


@click.command()
@address
@click.option(
    "--after",
    "after_s",
    type=click.FloatRange(0, 3600),
    callback=number,
    default=1.0,
    show_default=True,
    help="Leave out younger operations; seconds.",
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(0, 10),
    callback=number,
    default=RANK_S,
    show_default=True,
    help="A rank may take so many seconds.",
)
@click.option("--stacks/--no-stacks", default=True, help="Show the main threads of the ranks concerned.")
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as /desync has it.")
def why(
    url: str,
    token: str | None,
    token_file: Path | None,
    after_s: float,
    limit_s: float,
    stacks: bool,
    as_json: bool,
) -> None:
    """Name the ranks that a job waits for, and their positions.

    URL is that of any control plane of the job, or the folder of an incident, which may be in a zip. Ends
    with 0 if nothing is wrong, 1 if something is, and 2 if that control plane does not answer or the folder
    is no incident.
    """
    plane = None
    try:
        if (folder := place_of(url)) is not None:
            incident = Incident.read(folder)
            found, rows = incident.desync(), incident.stacks
        else:
            plane, limit = ControlPlane.of(url, token, token_file), f"limit_ms={round(limit_s * 1000)}"
            found = plane.get_json(f"/desync?after_ms={round(after_s * 1000)}&{limit}")
            found["verdict"] = found["verdict"] or _broken(plane.get_json("/job"))

            def rows() -> list[dict[str, Any]]:
                ranks: list[dict[str, Any]] = plane.get_json(f"/stacks?{limit}")["ranks"]
                return ranks

        if as_json:
            click.echo(json.dumps(found, indent=1))
        else:
            _show(found)
            if stacks and found["culprits"]:
                _show_stacks(rows(), found["culprits"])
    except NoIncidentError as error:
        end_without_answer(error)
    except NoAnswerError as error:
        end_unanswered(error, plane)
    sys.exit(TROUBLE if found["verdict"] else NOTHING_WRONG)


def _broken(job: dict[str, Any]) -> list[str]:
    """Return the failures of ranks with a group of no use: they may all have left the operation by now."""
    broken = [rank for rank in job["ranks"] if rank["state"] == "broken" and rank["failures"]]
    newest = {rank["rank"]: rank["failures"][0] for rank in broken}
    return failed({rank: f"{each['error']}: {each['message']}" for rank, each in newest.items()})


def _show(found: dict[str, Any]) -> None:
    if not found["verdict"]:
        click.echo(f"Nothing waits ({found['took_s']:.1f} s to ask all ranks).")
        return
    for title, lines in (
        ("Verdict", found["verdict"]),
        ("Operations that wait", [each["sentence"] for each in found["waiting"]]),
        ("Chains", found["chains"]),
    ):
        if lines:
            click.echo(f"{title}:")
            for line in lines:
                click.echo(f"  {line}")


def _show_stacks(rows: list[dict[str, Any]], ranks: list[int]) -> None:
    for each in rows:
        if each["rank"] not in ranks:
            continue
        if each["silence"]:
            click.echo(f"Rank {each['rank']}: {each['silence']}")
        if each["threads"] is None:
            for thread in (each["process"] or {}).get("threads", [])[:FRAMES]:
                click.echo(f"  thread {thread['name']}: state {thread['state']} {thread['wchan']}".rstrip())
            continue
        for thread in each["threads"]:
            if thread["main"]:
                click.echo(f"Rank {each['rank']}, {thread['name']}, innermost call first:")
                for frame in thread["frames"][:FRAMES]:
                    click.echo(f"  {frame['file']}:{frame['line']} in {frame['name']}")
