"""``dist2 trace -o job.json URL``: the last operations of all ranks, as one file for ui.perfetto.dev."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

import click

from dist2.errors import Dist2Error
from observability.client import fetch

NO_ANSWER = 2
"""Exit status without a trace."""

LIMIT_S = 60.0


@click.command()
@click.argument("url")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("trace.json"), show_default=True
)
@click.option("--seconds", default=60, show_default=True, help="How far back.")
@click.option("--token", help="Server.token; by default that in URL, or derived from DIST2_SECRET.")
def trace(url: str, output: Path, seconds: int, token: str | None) -> None:
    """Write the last operations of all ranks of a job as one trace.

    URL is that of any control plane of the job. Ends with 2 if that does not answer.
    """
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}"
    token = token or next(iter(parse_qs(parts.query).get("token", [])), None)
    try:
        body = fetch(f"{base}/trace?seconds={seconds}", token, timeout_s=LIMIT_S)
        told = json.loads(body)["otherData"]
    except (HTTPError, OSError, Dist2Error, ValueError, KeyError) as error:
        if isinstance(error, HTTPError):
            error.close()
        click.echo(f"{base} has no trace: {error}", err=True)
        sys.exit(NO_ANSWER)
    output.write_bytes(body)
    error_us = max((each["clock_error_ns"] for each in told["ranks"]), default=0) / 1e3
    ranks = len(told["ranks"])
    click.echo(f"{output}: {ranks} ranks, clocks right within {error_us:.0f} us; for ui.perfetto.dev")
    for rank, why in told["missing"].items():
        click.echo(f"rank {rank} is missing: {why}", err=True)
    for each in told["ranks"]:
        if not each["complete"]:
            kept = "has forgotten the earlier operations: DIST2_RECORDER_SIZE keeps more"
            click.echo(f"rank {each['rank']} {kept}", err=True)
