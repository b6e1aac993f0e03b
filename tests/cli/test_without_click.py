"""The help of ``dist2`` in an environment without its extras."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from dist2 import cli


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_the_help_lists_all_commands(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "dist2.cli.app", raising=False)  # imported again
    monkeypatch.setitem(sys.modules, "click", None)
    monkeypatch.setattr(sys, "argv", ["dist2", *arguments])
    cli.main()
    told = capsys.readouterr().out
    for name in ("doctor", "bench", *entry_points(group="dist2.commands").names):
        assert name in told
    assert "pip install 'dist2[control-plane]'" in told


def test_a_command_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dist2.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "click", None)
    monkeypatch.setattr(sys, "argv", ["dist2", "why"])
    with pytest.raises(SystemExit, match=r"pip install 'dist2\[control-plane\]'"):
        cli.main()


def test_the_version_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dist2", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    with_click = capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "dist2.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "click", None)
    cli.main()
    assert capsys.readouterr().out == with_click
