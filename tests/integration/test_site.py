"""The documentation as a site: built without a warning, with every public name in the reference."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.programs import run

import dist2
import observability

MISSING = [
    name for name in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers") if not find_spec(name)
]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (extra `docs`)")


@pytest.mark.slow
def test_the_site_builds_and_documents_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    ended = run(command, timeout_s=50.0, variables={"NO_MKDOCS_2_WARNING": "1"})
    assert ended.code == 0, ended
    pages = [path.read_text() for path in (tmp_path / "reference").glob("*.html")]
    documented = {name for page in pages for name in re.findall(r'id="([\w.]+)"', page)}
    last = {name.rpartition(".")[2] for name in documented}
    assert not set(dist2.__all__) - {"ReduceOp"} - last  # torch's class, in words
    assert not set(observability.__all__) - last
    operations = ["all_reduce", "barrier", "recv", "isend", "recv_object", "split_by", "agree", "shutdown"]
    assert not set(operations) - last
