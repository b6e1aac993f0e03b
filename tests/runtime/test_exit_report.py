"""The error that ended a rank, in a file for the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist2.errors import GroupAbortedError
from dist2.runtime.exit_report import VARIABLE, latest_incident, note_incident, read_report, report


def test_the_launcher_hears_the_notes_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "error.json"))
    error = GroupAbortedError("group 'training' was aborted in this process")
    error.add_note("DIST2_ON_HANG=abort, as the job waited: rank 2 sleeps")
    report(error)
    read = read_report(tmp_path / "error.json")
    assert read is not None
    assert read.words == (
        "GroupAbortedError: group 'training' was aborted in this process; "
        "DIST2_ON_HANG=abort, as the job waited: rank 2 sleeps"
    )


def test_the_launcher_knows_the_latest_incident_of_ranks_that_report_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have handled it and end by `sys.exit`, or were killed."""
    paths = [tmp_path / f"rank-{rank}.json" for rank in range(4)]
    assert latest_incident(paths) == ""
    for rank, folder in enumerate(("/incidents/old", "/incidents/new", "")):
        monkeypatch.setenv(VARIABLE, str(paths[rank]))
        note_incident("/incidents/taken back")
        note_incident(folder)
        os.utime(f"{paths[rank]}.incident", (rank, rank))
    assert latest_incident(paths) == "/incidents/new"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "rank-0.json"))
    note_incident("/incidents/new")
