"""The documentation as a site: built without a warning, with every public name in the reference."""

from __future__ import annotations

import re
import shutil
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support import debian
from support.programs import run

import dist2
import observability

MISSING = [
    name for name in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers") if not find_spec(name)
]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (extra `docs`)")


BROAD = """() => {
  const width = document.documentElement.clientWidth;
  const clips = node => getComputedStyle(node).overflowX !== "visible";
  const scrolls = node => node && (clips(node) || scrolls(node.parentElement));
  const all = [...document.querySelectorAll("article *")];
  const broad = all.filter(each => each.getBoundingClientRect().right > width + 1 && !scrolls(each));
  return broad.map(each => each.outerHTML.slice(0, 80));
}"""
"""Elements that reach beyond the right edge, and cannot be scrolled."""

CUT = """() => [...document.querySelectorAll("article pre code")]
  .filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent.slice(0, 80))"""
"""Blocks of code with lines that are longer than the block."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    ended = run(command, timeout_s=50.0, variables={"NO_MKDOCS_2_WARNING": "1"})
    assert ended.code == 0, ended
    return folder


@pytest.mark.slow
def test_the_site_documents_every_public_name(site: Path) -> None:
    check_site(site)
    pages = [path.read_text() for path in (site / "reference").glob("*.html")]
    documented = {name for page in pages for name in re.findall(r'id="([\w.]+)"', page)}
    last = {name.rpartition(".")[2] for name in documented}
    assert not set(dist2.__all__) - {"ReduceOp"} - last  # torch's class, in words
    assert not set(observability.__all__) - last
    operations = ["all_reduce", "barrier", "recv", "isend", "recv_object", "split_by", "agree", "shutdown"]
    assert not set(operations) - last


@pytest.mark.slow
@pytest.mark.timeout(debian.NEEDED_S)
def test_pages_fit_the_window_and_load_nothing_from_elsewhere(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    programs = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, programs)):
        debian.require("chromium", "chromium")
    program = next(filter(None, map(shutil.which, programs)))
    troubles: list[str] = []

    def answer(route: Any) -> None:
        parts = urlsplit(route.request.url)
        if parts.netloc != "site.test":
            troubles.append(route.request.url)
        route.fulfill(path=site / parts.path.lstrip("/"))

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="dark")
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.route("**/*", answer)
        for name, width in [("index", 1400), ("cheatsheet", 1400), ("index", 400), ("failures", 400)]:
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"http://site.test/{name}.html")
            assert not page.evaluate(BROAD), (name, width)
            assert width < 1400 or not page.evaluate(CUT), name
        scheme = "document.body.dataset.mdColorScheme"
        assert page.evaluate(scheme) == "slate"  # as the browser asks
        page.click("label[title='Light mode']")
        assert page.evaluate(scheme) == "default"
        browser.close()
    assert not troubles


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
