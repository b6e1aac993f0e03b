"""When the parts in C are used."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dist2 import compiled


@pytest.fixture
def built(tmp_path: Path) -> ModuleType:
    """A module whose file is there, with its source beside it."""
    (tmp_path / "part.c").touch()
    (tmp_path / "_part.so").touch()
    module = ModuleType("part")
    module.__file__ = str(tmp_path / "_part.so")
    return module


def set_age(path: Path, seconds: int) -> None:
    os.utime(path, (1_000_000 - seconds, 1_000_000 - seconds))


@pytest.mark.parametrize(("age", "outdated"), [(0, False), (5, False), (-5, True)])
def test_a_source_that_was_changed_since_makes_a_part_outdated(
    built: ModuleType, tmp_path: Path, age: int, outdated: bool
) -> None:
    set_age(tmp_path / "_part.so", 0)
    set_age(tmp_path / "part.c", age)
    assert compiled._is_outdated(built, tmp_path / "part.c") is outdated


def test_the_sources_of_a_part_are_its_own_and_the_shared_headers() -> None:
    names = {source.name for source in compiled._sources_of("_steps", compiled._SOURCE)}
    assert {"names.h", "steps.h", "fences.c"} <= names
    assert "runner.c" not in names


def test_a_part_is_built_anew_after_each_of_the_headers_that_make_it_outdated() -> None:
    root = Path(__file__).parents[3]
    parts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    assert len(parts) == 3
    for part in parts:
        named = {root / each for each in (*part["depends"], *part["sources"])}
        assert named == set(compiled._sources_of(part["name"].rpartition(".")[2], compiled._SOURCE))


def test_where_the_source_is_not_installed_a_part_has_none(tmp_path: Path) -> None:
    assert compiled._sources_of("_steps", tmp_path) == []


def test_what_was_not_built_is_none() -> None:
    assert compiled._found("_nothing") is None


def test_a_part_that_is_older_than_its_source_is_not_used_and_the_remedy_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DIST2_COMPILED", "1")
    monkeypatch.setattr(compiled, "_outdated", [])
    monkeypatch.setattr(compiled, "_is_outdated", lambda module, source: True)
    monkeypatch.setattr(compiled, "records", None)
    monkeypatch.setattr(importlib, "import_module", ModuleType)
    assert compiled._found("_records") is None
    assert "_records in" in compiled.remedy()
    assert compiled.remedy().endswith("compiled are older than their source; install dist2 again")


GROUPS = """
import dist2
from dist2.store import HashStore

for _ in range(2):
    dist2.new_group("socket", store=HashStore(), rank=0, world_size=1).shutdown()
"""


@pytest.mark.skipif(compiled.steps is None, reason="dist2 was built without its parts in C")
def test_a_checkout_that_was_updated_and_not_built_says_so_once_a_process(tmp_path: Path) -> None:
    root = Path(compiled.__file__).parents[2]
    shutil.copytree(root / "dist2", tmp_path / "dist2", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "dist2" / "compiled" / "source" / "names.h").touch()  # which all three are built from
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", GROUPS],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}", "DIST2_COMPILED": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    (line,) = (each for each in done.stderr.splitlines() if "dist2" in each)
    assert line.startswith("the hot path runs in Python: ")
    assert f"_steps, _records, _messages in {tmp_path / 'dist2' / 'compiled'} are older" in line


@pytest.fixture
def untold() -> Iterator[None]:
    """No remedy was logged in this process before the test, and its own log lines are dropped after it."""
    compiled.tell_remedy.cache_clear()
    yield
    compiled.tell_remedy.cache_clear()
    compiled.tell_remedy()


@pytest.mark.parametrize(
    ("missing", "language"),
    [((), "C"), (("records",), "C and Python"), (("steps", "records", "messages"), "Python")],
)
@pytest.mark.usefixtures("untold")
def test_what_is_missing_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: tuple[str, ...], language: str
) -> None:
    monkeypatch.setenv("DIST2_COMPILED", "1")
    for part in ("steps", "records", "messages"):
        monkeypatch.setattr(compiled, part, None if part in missing else ModuleType(part))
    for _ in range(2):
        compiled.tell_remedy()
    assert compiled.language() == language
    lines = [each.getMessage() for each in caplog.records]
    if not missing:
        assert lines == []
        return
    (line,) = lines
    assert f"runs in {language}:" in line
    assert "install dist2 again" in line


@pytest.mark.usefixtures("untold")
def test_what_was_switched_off_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DIST2_COMPILED", "0")
    monkeypatch.setattr(compiled, "steps", None)
    compiled.tell_remedy()
    assert not caplog.records


@pytest.mark.parametrize("value", ["0", "false", "no", "No"])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DIST2_COMPILED", value)
    assert compiled._found("_steps") is None
