"""``dist2 trace -o job.json URL`` or ``FOLDER``: the last operations of all ranks, for ui.perfetto.dev."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from observability.commands.control_plane import (
    ControlPlane,
    NoAnswerError,
    address,
    end_without_answer,
    write_output,
)
from observability.commands.ending import end_unanswered
from observability.incidents.reading import Incident, NoIncidentError, place_of

LIMIT_S = 60.0
TRACE_S, PARTS_S = 60, 5


@click.command()
@address
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("trace.json"), show_default=True
)
@click.option(
    "--seconds", type=click.IntRange(0, 3600), help="How far back: 60; with --parts for how long: 5."
)
@click.option("--parts", is_flag=True, help="The next seconds, with what each operation did when.")
def trace(
    url: str, output: Path, seconds: int | None, parts: bool, token: str | None, token_file: Path | None
) -> None:
    """Write the last operations of all ranks of a job as one trace.

    URL is that of any control plane of the job, or the folder of an incident, which may be in a zip: its
    ranks wrote the minute before it. Ends with 2 if that control plane does not answer or the folder is no
    incident.
    """
    seconds = seconds or (PARTS_S if parts else TRACE_S)
    plane = None
    try:
        if (place := place_of(url)) is not None:
            body = _of_incident(Incident.read(place))
        else:
            plane = ControlPlane.of(url, token, token_file)
            if parts:
                _record_parts(plane, seconds)
            body = plane.get(f"/trace?seconds={seconds}", LIMIT_S)
        told = json.loads(body)["otherData"]
    except NoIncidentError as error:
        end_without_answer(error)
    except NoAnswerError as error:
        end_unanswered(error, plane)
    except (ValueError, KeyError) as error:
        end_without_answer(NoAnswerError(f"{url.partition('?')[0]} has no trace: {error}"))
    write_output(output, body)
    ranks = len(told["ranks"])
    error_us = max((each["clock_error_ns"] for each in told["ranks"]), default=0) / 1e3
    clocks = f"clocks right within {error_us:.0f} us" if plane else "by the clocks of their hosts"
    click.echo(f"{output}: {ranks} ranks, {clocks}; for ui.perfetto.dev")
    for rank, why in told["missing"].items():
        click.echo(f"rank {rank} is missing: {why}", err=True)
    for each in told["ranks"]:
        if not each["complete"]:
            kept = "has forgotten the earlier operations: DIST2_RECORDER_SIZE keeps more"
            click.echo(f"rank {each['rank']} {kept}", err=True)


def _record_parts(plane: ControlPlane, seconds: int) -> None:
    """Have all ranks record parts, and wait until they have."""
    told = json.loads(plane.get("/acts/record_parts", LIMIT_S, {"seconds": seconds, "everywhere": True}))
    for rank, answer in told["ranks"].items():
        if "error" in answer:
            click.echo(f"rank {rank} records no parts: {answer['error']}", err=True)
    time.sleep(seconds)


def _of_incident(incident: Incident) -> bytes:
    """Return the trace of the ranks that wrote a part; those of several hosts by the clocks of these."""
    from observability.clocks import Offset
    from observability.tracing import Timeline, merged  # with torch

    timelines = [Timeline.read(part["timeline"]) for part in incident.parts.values()]
    aligned = []
    for each in timelines:
        is_alike = each.clock == timelines[0].clock
        aligned.append((each, Offset(0 if is_alike else each.epoch_offset_ns - timelines[0].epoch_offset_ns)))
    silent = {rank: each.silence for rank, each in incident.answers().items() if each.state is None}
    return json.dumps(merged(aligned, silent)).encode()
