"""Protection from interruptions does not hang on names: with modules moved and renamed it is the same.

Compiled modules, and what these import, cannot be renamed without a compiler: they stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.programs import ROOT, run
from support.renamed_copy import Move, moved_copy

pytestmark = pytest.mark.alone

EXPECTED = {
    **{f"wait: {name}": True for name in ("all_reduce", "async", "recv")},
    "wait: store": False,
    **{f"run: {name}": True for name in ("in_python", "from_python_to_c", "message")},
    "closed": {
        **dict.fromkeys(("closed0", "closed1"), "MainThread"),
        **{name: f"dist2-abort-{name}" for name in ("closed2", "closed3")},
    },
    "refused": "refused",
    "lines": [True, True, True],
    "forked": "forbidden",
}
"""The findings of `interrupted_program`: whether Ctrl-C is deferred, and the end of groups."""


@pytest.mark.parametrize(
    "is_moved",
    [pytest.param(False, marks=pytest.mark.exhaustive, id="as_it_is"), pytest.param(True, id="moved")],
)
def test_interruptions_are_safe_whatever_modules_are_called(is_moved: bool, tmp_path: Path) -> None:
    where = moved_copy(tmp_path / "copy") if is_moved else ROOT
    command = [
        sys.executable,
        "-W",
        "always::ResourceWarning",
        ROOT / "tests" / "support" / "interrupted_program.py",
        tmp_path,
    ]
    ended = run(command, variables={"PYTHONPATH": str(where)})
    assert ended.code == 0, ended
    found, where_from, *at_exit = ended.output.splitlines()
    assert json.loads(found) == EXPECTED, ended
    assert where_from.startswith(str(where)), ended
    assert at_exit == ["MainThread"], ended
    assert ended.errors.count("was never closed") == 1, ended


def test_imports_are_rewritten() -> None:
    move = Move({"dist2.a": "dist2.in.b", "watch": "see"})
    source = (
        "from dist2 import a, c as d\nif x:\n    from dist2.a.f import (\n        g,\n    )\n"
        "from dist2.a import *\nimport watch as w\nimport os\n"
    )
    assert move.rewritten(source).splitlines() == [
        "from dist2.in import b as a",
        "from dist2 import c as d",
        "if x:",
        "    from dist2.in.b.f import g as g",
        "from dist2.in.b import *",
        "import see as w",
        "import os",
    ]
    with pytest.raises(ValueError, match=r"import dist2\.a: give it a name"):
        move.rewritten("import dist2.a\n")
