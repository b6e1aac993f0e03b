"""``dist2 why URL``: the diagnosis of a job in a terminal, from any of its control planes."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

import click

from dist2.errors import Dist2Error
from observability.client import Asker
from observability.job.gathering import RANK_S

NOTHING_WRONG, TROUBLE, NO_ANSWER = 0, 1, 2
"""Exit statuses of the command."""

FRAMES = 12
LIMIT_S = 30.0


@click.command()
@click.argument("url")
@click.option("--token", help="Server.token; by default that in URL, or the one derived from DIST2_SECRET.")
@click.option(
    "--after", "after_s", default=1.0, show_default=True, help="Leave out younger operations; seconds."
)
@click.option(
    "--limit", "limit_s", default=RANK_S, show_default=True, help="A rank may take so many seconds."
)
@click.option("--stacks/--no-stacks", default=True, help="Show the main threads of the ranks concerned.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer of /desync as it is.")
def why(url: str, token: str | None, after_s: float, limit_s: float, stacks: bool, as_json: bool) -> None:
    """Name the ranks that a job waits for, and their positions.

    URL is that of any control plane of the job. Ends with 0 if nothing is wrong, 1 if something is, and 2
    if that control plane does not answer.
    """
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}"
    token = token or next(iter(parse_qs(parts.query).get("token", [])), None)
    try:
        asker, limit = Asker(), f"limit_ms={round(limit_s * 1000)}"
        found = _get(asker, f"{base}/desync?after_ms={round(after_s * 1000)}&{limit}", token)
        if as_json:
            click.echo(json.dumps(found, indent=1))
        else:
            _show(found)
            if stacks and found["culprits"]:
                _show_stacks(_get(asker, f"{base}/stacks?{limit}", token), found["culprits"])
    except (HTTPError, OSError, Dist2Error, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()
        click.echo(f"{base} does not say: {error}; ask another rank's control plane", err=True)
        sys.exit(NO_ANSWER)
    sys.exit(TROUBLE if found["verdict"] else NOTHING_WRONG)


def _get(asker: Asker, url: str, token: str | None) -> Any:
    return json.loads(asker.ask(url, token, timeout_s=LIMIT_S))


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


def _show_stacks(found: dict[str, Any], ranks: list[int]) -> None:
    for each in found["ranks"]:
        if each["rank"] not in ranks:
            continue
        if each["threads"] is None:
            click.echo(f"Rank {each['rank']}: {each['silence']}")
            for thread in (each["process"] or {}).get("threads", [])[:FRAMES]:
                click.echo(f"  thread {thread['name']}: state {thread['state']} {thread['wchan']}".rstrip())
            continue
        for thread in each["threads"]:
            if thread["main"]:
                click.echo(f"Rank {each['rank']}, {thread['name']}, innermost call first:")
                for frame in thread["frames"][:FRAMES]:
                    click.echo(f"  {frame['file']}:{frame['line']} in {frame['name']}")
