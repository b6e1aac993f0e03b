"""The core alone, in C: its self-tests, as `make core-test` runs them, under the cheapest sanitizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.programs import ROOT, run


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_core_works_without_python(tmp_path: Path) -> None:
    core, program = ROOT / "dist2" / "core", tmp_path / "selftest"
    flags = [
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=undefined",
        "-fno-sanitize-recover",
        "-Wl,--wrap=sched_yield",
    ]
    made = run(["cc", *flags, f"-I{core}", *sorted(core.glob("*.c")), "-o", program, "-lpthread"])
    assert made.code == 0, made
    assert "Python.h" not in "".join(each.read_text() for each in core.iterdir())
    ended = run([program])
    assert (ended.code, ended.output) == (0, "core: 0 failures\n"), ended
