"""``dist2 ps``: the jobs of this user on this host that have control planes, and what ended jobs left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.table import Table

from dist2.runtime.config import Config
from observability.client import Asker
from observability.commands.control_plane import ControlPlane, NoAnswerError
from observability.incidents.folders import created, newest, root_of
from observability.incidents.reading import Incident, NoIncidentError
from observability.token_files import ControlPlaneFile, control_planes

LIMIT_S = 2.0
ASKED = 4
"""Control planes of a job that are asked for its state, until one answers."""

INCIDENTS = 5
"""Incidents that are shown, the newest first."""
STATE = 80
"""Longer states, as of a job that ended with an error, are cut off in the table: the page follows them."""
WIDEST = 10_000
READ_BYTES = 32 << 20
"""Larger incidents are not read to list them."""


@attrs.frozen
class Listed:
    """A job.

    Attributes:
        name: Of the group that its control planes were started with.
        ranks: Number of its ranks.
        program: Its program.
        state: ``ok``, ``waits for rank 2 for 3 s``, ``broken``, or ``no answer``.
        url: Of its page.
        token: The token of that.
    """

    name: str
    ranks: int
    program: str
    state: str
    url: str
    token: str = attrs.field(repr=False)


@click.command()
@click.option("--links", is_flag=True, help="Show the links for a browser, which contain the tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON, without tokens.")
def ps(links: bool, as_json: bool) -> None:
    """List the jobs of this user on this host that have a control plane, and their states.

    A job has one if its program calls observability.start, or with DIST2_CONTROL_PLANE=1, or under
    python -m dist2.run --page. Below are the latest incidents, which outlive their jobs.
    """
    found = jobs(control_planes())
    if as_json:
        click.echo(json.dumps([attrs.asdict(each, filter=_not_secret) for each in found], indent=1))
        return
    if not found:
        click.echo("No running job of this user has a control plane on this host (DIST2_CONTROL_PLANE=1).")
    table = Table("job", "ranks", "program", "state", "page", box=None)
    for each in found:
        url = f"{each.url}/#token={each.token}" if links else each.url
        state = each.state if len(each.state) <= STATE else f"{each.state[: STATE - 1]}…"
        table.add_row(each.name, str(each.ranks), each.program, state, url)
    left = Table("incident of", "age", "culprits", "dist2 why", box=None)
    for path in latest_incidents()[:INCIDENTS]:
        left.add_row(*_row(path))
    # Links and paths are to be copied: a table would cut them off at the width of the terminal.
    console = Console(width=WIDEST, soft_wrap=True, highlight=False, markup=False)
    for each_table in (table, left):
        if each_table.row_count:
            console.print(each_table)


def latest_incidents() -> list[Path]:
    """Return the folders of incidents of this user's jobs here, the newest first."""
    root = root_of(Config.from_environment())
    return [] if root is None else newest(root)


def age_of(path: Path) -> str:
    """Return how old an incident is, in words."""
    age_s = max(time.time() - created(path), 0.0)
    for unit, seconds in (("day", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            count = int(age_s / seconds)
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''}"
    return f"{age_s:.0f} s"


def _row(path: Path) -> tuple[str, str, str, str]:
    try:
        is_large = sum(each.lstat().st_size for each in path.iterdir()) > READ_BYTES
        incident = Incident.read(path)
        culprits = [] if is_large else incident.desync()["culprits"]
    except (NoIncidentError, OSError):  # of another version, or removed meanwhile
        return "?", age_of(path), "", str(path)
    named = f"rank {', '.join(map(str, culprits[:4]))}" if culprits else ""
    return str(incident.head["name"]), age_of(path), named, str(path)


def jobs(planes: Iterable[ControlPlaneFile]) -> list[Listed]:
    """Return the jobs of control planes, with their states now."""
    planes = list(planes)
    # The ranks of a launcher's page are known by their meeting before the page has learnt their uid.
    pages = {each.job.meeting: each.url for each in planes if each.job.rank < 0 and each.job.meeting}
    by_job: dict[str, list[ControlPlaneFile]] = {}
    for each in planes:
        key = pages.get(each.job.meeting) or each.job.uid or each.url
        by_job.setdefault(key, []).append(each)
    found = []
    for members in by_job.values():
        members.sort(key=lambda each: each.job.rank)  # the page of a launcher is first: it outlives the ranks
        first = members[0]
        job = first.job if first.job.uid else members[-1].job
        found.append(Listed(job.name, job.world_size, job.program, _state(members), first.url, first.token))
    return sorted(found, key=lambda each: (each.name, each.url))


def _state(members: list[ControlPlaneFile]) -> str:
    """Return the state of a job in a few words."""
    for each in members[:ASKED]:
        try:
            plane = ControlPlane(each.url, each.token, Asker())
            job = plane.get_json("/job", LIMIT_S)
            if job.get("headline"):
                return str(job["headline"])
            if waits := _waits(job):
                return waits
            states = {rank["state"] for rank in job["ranks"]}
            return next((state for state in ("broken", "waiting", "silent") if state in states), "ok")
        except NoAnswerError:
            continue
    return "no answer"


def _waits(found: Mapping[str, Any]) -> str:
    """Return which ranks an operation waits for, and how long; empty if none does."""
    if not found["culprits"]:
        return ""
    ranks = f"rank {', '.join(map(str, found['culprits'][:4]))}"
    ages = [each["age_s"] for each in found["waiting"]]
    return f"waits for {ranks} for {max(ages):.0f} s" if ages else f"in trouble: {ranks}"


def _not_secret(attribute: attrs.Attribute[object], value: object) -> bool:
    return attribute.name != "token"
