"""The documentation as a site: built without a warning, with every public name in the reference."""

from __future__ import annotations

import re
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
    check_site(tmp_path)
    pages = [path.read_text() for path in (tmp_path / "reference").glob("*.html")]
    documented = {name for page in pages for name in re.findall(r'id="([\w.]+)"', page)}
    last = {name.rpartition(".")[2] for name in documented}
    assert not set(dist2.__all__) - {"ReduceOp"} - last  # torch's class, in words
    assert not set(observability.__all__) - last
    operations = ["all_reduce", "barrier", "recv", "isend", "recv_object", "split_by", "agree", "shutdown"]
    assert not set(operations) - last


def check_site(site: Path) -> None:
    """Check that each link leads to a file and an anchor of the site, and what every page has."""
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r' id="?([^" >]+)', page)) for path, page in pages.items()}
    dead = []
    for path, page in pages.items():
        for link in re.findall(r'href="?([^" >]+)', page):
            parts = urlsplit(unescape(link))
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            fragment = unquote(parts.fragment)
            if not target.exists() or (fragment and fragment not in anchors.get(target, {fragment})):
                dead.append(f"{path.relative_to(site)}: {link}")
        assert f"dist2 {dist2.__version__}, Apache" in page, path
        assert "md-footer__link--next" in page or "md-footer__link--prev" in page, path
        assert {'aria-label="Dark mode"', 'aria-label="Light mode"'} <= set(
            re.findall(r'aria-label="\w+ mode"', page)
        )
    assert not dead
