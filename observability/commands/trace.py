"""``dist2 trace -o job.json URL``: the last operations of all ranks, as one file for ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path

import click

from observability.commands.control_plane import ControlPlane, NoAnswerError, address, end_without_answer

LIMIT_S = 60.0


@click.command()
@address
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("trace.json"), show_default=True
)
@click.option("--seconds", default=60, show_default=True, help="How far back.")
def trace(url: str, output: Path, seconds: int, token: str | None, token_file: Path | None) -> None:
    """Write the last operations of all ranks of a job as one trace.

    URL is that of any control plane of the job. Ends with 2 if that control plane does not answer.
    """
    try:
        body = ControlPlane.of(url, token, token_file).get(f"/trace?seconds={seconds}", LIMIT_S)
        told = json.loads(body)["otherData"]
    except NoAnswerError as error:
        end_without_answer(error)
    except (ValueError, KeyError) as error:
        end_without_answer(NoAnswerError(f"{url.partition('?')[0]} has no trace: {error}"))
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
