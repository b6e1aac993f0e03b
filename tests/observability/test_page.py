"""The page in a real browser: while ranks work, while one is missing, and after the group has failed."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.ranks import Tenant, run_ranks

import observability
from dist2 import Dist2Error, ProcessGroup

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
INPROC = Tenant("inproc", "socket", {"transport": "inproc"})

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


def shown(url: str, profile: Path) -> str:
    """Return the text of a page as a browser shows it after about two seconds."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    waiting = ["--virtual-time-budget=2500", "--dump-dom"]
    ran = subprocess.run(
        [BROWSER, *flags, *waiting, url], capture_output=True, text=True, timeout=50, check=True
    )
    body = ran.stdout.partition("<body")[2].partition("<script>")[0]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def test_the_page_shows_a_run_a_hang_and_its_end(tmp_path: Path) -> None:
    pages: list[str] = []
    ended = threading.Event()

    def body(pg: ProcessGroup) -> None:
        with observability.start(pg, waiting_after_s=0.3) as server:
            pg.barrier()
            if pg.rank() == 0:
                pages.append(shown(server.page_url, tmp_path))
                looker = threading.Thread(target=look, args=(pg, server.page_url))
                looker.start()
                with suppress(Dist2Error):
                    pg.all_reduce(torch.ones(2), timeout=45.0)
                looker.join()
                pages.append(shown(server.page_url, tmp_path))
                ended.set()
            assert ended.wait(50)

    def look(pg: ProcessGroup, url: str) -> None:
        while "waits for rank 1" not in pages[-1] and len(pages) < 5:
            pages.append(shown(url, tmp_path))
        pg.abort()

    run_ranks(2, body, INPROC)
    working, *_, hanging, over = pages
    assert "dist2 rank 0 of 2" in working
    assert "healthy" in working
    assert "2 of 2 ranks answered" in working
    assert "waiting" in hanging
    assert re.search(
        r"all_reduce #2 of group \S+ waits for rank 1 \(last seen: barrier #1 at test_page\.py:", hanging
    )
    assert re.search(r"1 waited for \S+ barrier #1", hanging)
    assert "GroupAbortedError" in over
    assert "waits for rank 1" not in over
