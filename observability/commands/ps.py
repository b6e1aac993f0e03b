"""``dist2 ps``: the jobs of this user on this host that have control planes."""

from __future__ import annotations

import json
from collections.abc import Iterable

import attrs
import click
from rich.console import Console
from rich.table import Table

from observability.client import Asker
from observability.commands.control_plane import ControlPlane, NoAnswerError
from observability.token_files import ControlPlaneFile, control_planes

LIMIT_S = 2.0
ASKED = 4
"""Control planes of a job that are asked for its state, until one answers."""


@attrs.frozen
class Listed:
    """A job.

    Attributes:
        name: Of the group that its control planes were started with.
        ranks: Number of its ranks.
        program: Its program.
        state: ``ok``, ``waits for rank 2``, ``broken``, or ``no answer``.
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
    python -m dist2.run --page.
    """
    found = jobs(control_planes())
    if as_json:
        click.echo(json.dumps([attrs.asdict(each, filter=_not_secret) for each in found], indent=1))
        return
    if not found:
        click.echo("No job of this user has a control plane on this host: set DIST2_CONTROL_PLANE=1.")
        return
    table = Table("job", "ranks", "program", "state", "page", box=None)
    for each in found:
        url = f"{each.url}/#token={each.token}" if links else each.url
        table.add_row(each.name, str(each.ranks), each.program, each.state, url)
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


def jobs(planes: Iterable[ControlPlaneFile]) -> list[Listed]:
    """Return the jobs of control planes, with their states now."""
    by_job: dict[str, list[ControlPlaneFile]] = {}
    for each in planes:
        by_job.setdefault(each.job.uid or each.url, []).append(each)
    found = []
    for members in by_job.values():
        members.sort(key=lambda each: each.job.rank)  # the page of a launcher is first: it outlives the ranks
        first = members[0]
        job = first.job
        found.append(Listed(job.name, job.world_size, job.program, _state(members), first.url, first.token))
    return sorted(found, key=lambda each: (each.name, each.url))


def _state(members: list[ControlPlaneFile]) -> str:
    """Return the state of a job in a few words."""
    for each in members[:ASKED]:
        try:
            job = ControlPlane(each.url, each.token, Asker()).get_json("/job", LIMIT_S)
        except NoAnswerError:
            continue
        if job.get("headline"):
            return str(job["headline"])
        if job["culprits"]:
            return f"waits for rank {', '.join(map(str, job['culprits'][:4]))}"
        states = {rank["state"] for rank in job["ranks"]}
        return next((state for state in ("broken", "waiting", "silent") if state in states), "ok")
    return "no answer"


def _not_secret(attribute: attrs.Attribute[object], value: object) -> bool:
    return attribute.name != "token"
