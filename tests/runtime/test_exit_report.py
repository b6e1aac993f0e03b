"""The error that ended a rank, in a file for the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist2.errors import GroupAbortedError
from dist2.runtime.exit_report import VARIABLE, read_report, report


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
