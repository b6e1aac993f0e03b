"""The page in a real browser: during a run and hangs, after a time-out, and when the server has gone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import pytest
import torch
from support import debian
from support.large_jobs import job_of
from support.programs import start
from support.ranks import Tenant, run_ranks
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

import observability
from dist2 import Dist2Error, ProcessGroup, ReduceOp
from observability import server as control_plane
from observability import token_files

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

sync_api = pytest.importorskip("playwright.sync_api")
INPROC = Tenant("inproc", "socket", {"transport": "inproc"})
RANKS = 3

pytestmark = pytest.mark.timeout(debian.NEEDED_S)

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = color => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
    const [r, g, b] = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "white";
  };
  const poor = [];
  for (const node of document.querySelectorAll("main *, header *, footer *")) {
    const own = [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".sr, .plot")) continue;
    const pair = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) poor.push(node.outerHTML.slice(0, 80));
  }
  return poor;
}"""

UNNAMED = """() => {
  const all = query => [...document.querySelectorAll(query)];
  const lost = table => !table.querySelector("tbody th") || table.querySelector("th:not([scope])");
  return [
    ...all("table:not(.u-legend)").filter(each => each.rows.length && lost(each)),
    ...all("[aria-labelledby]").filter(each => !all("#" + each.getAttribute("aria-labelledby")).length),
    ...all("button, select, a").filter(each => !(each.ariaLabel || each.textContent.trim())),
    ...all("select").filter(each => !each.labels.length),
  ].map(each => each.outerHTML.slice(0, 80));
}"""


OTHER_OPERATIONS = """async () => {
  const { showHistory } = await import("/charts.js");
  const { get } = await import("/session.js"), history = await get("/history"), { all } = history.operations;
  return ["broadcast", "send"].map(name => {
    showHistory({ ...history, operations: { all, [name]: all } }, "all");
    return [...document.querySelector("#op").options].map(each => each.value);
  });
}"""


FIRST_OF_MANY = """async () => {
  const { showJob } = await import("/job.js");
  const { get } = await import("/session.js"), job = await get("/job"), [one] = job.ranks;
  const rank = number => ({ ...one, rank: number, state: number === 18 ? "waited for" : "waiting" });
  const ranks = Array.from({ length: 20 }, (_, number) => rank(number));
  showJob({ ...job, culprits: [18], ranks }, 0, () => {}, () => {});
  return document.querySelector("#grid tbody button").ariaLabel;
}"""


BROKEN_IN_TWO_GROUPS = """async () => {
  const { showJob } = await import("/job.js");
  const { get } = await import("/session.js"), job = await get("/job"), [one] = job.ranks;
  const group = (uid, begun, state) => {
    return { ...one.groups[0], uid, name: uid, begun, state, last: { op: "barrier", seq: begun } };
  };
  const rank = (rank, state, ...groups) => ({ ...one, rank, state, groups });
  showJob({ ...job, verdict: [], ranks: [
    rank(0, "broken", group("all", 4, "open"), group("half", 3, "broken")),
    rank(1, "broken", group("all", 5, "broken")),
    rank(2, "ok", group("all", 4, "open"), group("half", 2, "open")),
  ] }, 0, () => {}, () => {});
  return document.querySelector("#state-title").textContent;
}"""


TWO_CULPRITS = """async () => {
  const { showJob } = await import("/job.js");
  const { get } = await import("/session.js"), job = await get("/job"), [one] = job.ranks;
  const process = { state: "", words: "process 7 was killed by SIGSEGV" };
  showJob({ ...job, verdict: ["they wait"], culprits: [1, 2], ranks: [
    { ...one, rank: 0, state: "waiting" },
    { ...one, rank: 1, state: "waited for" },
    { rank: 2, state: "silent", silence: "it is gone", process },
  ] }, 0, () => {}, () => {});
  return document.querySelector("#state-title").textContent;
}"""


BOTH_INSIDE = """async () => {
  const { showJob } = await import("/job.js");
  const { get } = await import("/session.js"), job = await get("/job"), [one] = job.ranks;
  const ages = { age_s: 60, call: "", where: "" };
  const send = { ...ages, uid: "w", group: "w", op: "send", seq: 5, p2p: true, peer: 1 };
  const recv = { ...send, op: "recv", seq: 4, peer: 0 };
  showJob({ ...job, verdict: ["they are stuck"], culprits: [], waiting: [
    { ...send, caller: 0, missing: [], more: 0 }, { ...recv, caller: 1, missing: [], more: 0 },
  ], ranks: [
    { ...one, rank: 0, state: "waiting", in_flight: [send] },
    { ...one, rank: 1, state: "waiting", in_flight: [recv] },
  ] }, 0, () => {}, () => {});
  return ["#state-title", "#waits tbody"].map(place => document.querySelector(place).textContent);
}"""


HIDE_AND_SHOW = """() => {
  for (const hidden of [true, false]) {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  }
}"""


LAUNCHED = """
import sys, time
from pathlib import Path
import torch, dist2

pg = dist2.new_group("socket", 30, name="launched")
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


PAGES = Path(control_plane.__file__).parent / "pages"
SUMMARY = {
    "identity": {"rank": 0, "host": "node-000", "pid": 4000, "version": "0.1.0"},
    "now_s": 1.0,
    "health": {"ok": True, "status": "ok"},
    "groups": [],
    "operations": [],
    "in_flight": [],
    "in_flight_count": 0,
    "failures": [],
}
LATE = {"group": "world", "late_s": 0.004, "share": 0.01, "operations": 10}


@attrs.define(eq=False)
class Job:
    """Ranks that work until the test says otherwise; then rank 1 stays away from two operations.

    Rank 2 is late to the first of these.
    """

    hang: threading.Event = attrs.field(factory=threading.Event)
    let_rank_2_enter: threading.Event = attrs.field(factory=threading.Event)
    time_out: threading.Event = attrs.field(factory=threading.Event)
    leave: threading.Event = attrs.field(factory=threading.Event)
    end: threading.Event = attrs.field(factory=threading.Event)
    started: threading.Barrier = attrs.field(factory=lambda: threading.Barrier(RANKS + 1))
    gone: threading.Event = attrs.field(factory=threading.Event)
    url: str = ""

    def body(self, pg: ProcessGroup) -> None:
        """Be one rank."""
        half = pg.split_by(color=1 if pg.rank() else None)
        with observability.start(pg, waiting_after_s=0.3) as server:
            if pg.rank() == 0:
                self.url = server.page_url
            self.started.wait(20)
            going = torch.ones(1)
            while going.item():
                if half is not None:
                    half.barrier()
                going.fill_(not self.hang.wait(0.01))
                pg.all_reduce(going, ReduceOp.MIN)
            self.miss(pg)
            if pg.rank() == 0:
                self.leave.wait(50)
                server.close()
                self.gone.set()
            self.end.wait(50)

    def miss(self, pg: ProcessGroup) -> None:
        """Wait for ranks 1 and 2, then for rank 1 alone, and then time out."""
        if pg.rank() == 1:
            self.time_out.wait(50)
        if pg.rank() == 2:
            self.let_rank_2_enter.wait(50)
        pg.all_reduce(torch.ones(2), timeout=50.0)
        if pg.rank() != 1:
            with suppress(Dist2Error):  # a time-out; another one where the test has failed
                pg.all_reduce(torch.ones(3), timeout=0.5)

    def release(self) -> None:
        """Let the ranks end, after any outcome of the test."""
        for event in (self.hang, self.let_rank_2_enter, self.time_out, self.leave, self.end):
            event.set()


@pytest.fixture(scope="module")
def browser() -> str:
    """The Chromium of the machine, installed if there is none."""
    for program in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(program):
            return found
    debian.require("chromium", "chromium")
    return shutil.which("chromium") or ""


@attrs.define(eq=False)
class Leaving:
    """Ranks that work until the end of the test; the control plane of each is closed when that says so."""

    closes: list[threading.Event] = attrs.field(factory=lambda: [threading.Event() for _ in range(RANKS)])
    end: threading.Event = attrs.field(factory=threading.Event)
    started: threading.Barrier = attrs.field(factory=lambda: threading.Barrier(RANKS + 1))
    urls: list[str] = attrs.field(factory=lambda: [""] * RANKS)

    def body(self, pg: ProcessGroup) -> None:
        """Be one rank."""
        with observability.start(pg, announce=False) as server:
            self.urls[pg.rank()] = server.page_url
            self.started.wait(20)
            self.closes[pg.rank()].wait(100)
        self.end.wait(100)

    def release(self) -> None:
        """Let the ranks end, after any outcome of the test."""
        for event in (*self.closes, self.end):
            event.set()


@contextmanager
def running() -> Iterator[Job]:
    job = Job()
    ranks = threading.Thread(target=run_ranks, args=(RANKS, job.body, INPROC))
    ranks.start()
    try:
        job.started.wait(20)
        yield job
    finally:
        job.release()
        ranks.join(20)


def answer(route: Route, job: dict[str, Any]) -> None:
    """Answer a request of the page: with a job that is not there, or a file of the page."""
    path = urlsplit(route.request.url).path.lstrip("/") or "index.html"
    answers = {
        "page-token": {"token": "t"},
        "job": job,
        "summary": SUMMARY,
        "stragglers": {"stragglers": [], "ranking": [{**LATE, "rank": rank} for rank in range(2)]},
    }
    if (PAGES / path).is_file():
        kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
        route.fulfill(body=(PAGES / path).read_text(), content_type=kinds[Path(path).suffix])
    elif path in answers:
        route.fulfill(json=answers[path])
    else:
        route.fulfill(status=404, json={"reason": "it is not there"})


@contextmanager
def browsing_job(program: str, world_size: int, state: str) -> Iterator[Page]:
    """Open the page of a large job that is not there."""
    job = job_of(world_size, state)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(20_000)
        page.route("**/*", lambda route: answer(route, job))
        page.goto("http://job.test/#token=t")
        yield page
        browser.close()


@contextmanager
def browsing(url: str, program: str) -> Iterator[tuple[Page, list[str]]]:
    """Open the page; its errors and its requests to other hosts are added to the list."""
    troubles: list[str] = []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="dark")
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        host = urlsplit(url).netloc
        page.on(
            "request",
            lambda asked: (
                troubles.append(asked.url) if urlsplit(asked.url).netloc not in ("", host) else None
            ),
        )
        page.goto(url)
        yield page, troubles
        browser.close()


def see(page: Page, place: str, text: str) -> None:
    """Wait until a place has a text."""
    sync_api.expect(page.locator(place)).to_contain_text(text, timeout=20_000)


def check_accessible(page: Page) -> None:
    """Check names, contrast in both colour schemes, and the width on a phone."""
    assert page.evaluate(UNNAMED) == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 1200, "height": 900})


def check_run(page: Page) -> None:
    see(page, "#state-title", "All 3 ranks work")
    see(page, "#link", "live")
    see(page, "#who", "job of 3 ranks, asked rank 0")
    see(page, "#grid thead", "split(…)#0")
    see(page, "#grid tbody tr:first-child", "not a member")
    sync_api.expect(page.locator("#grid tbody tr")).to_have_count(RANKS)
    see(page, "#bandwidth-now", "B/s, at most")
    for name in ("payload", "bus"):
        see(page, "#bandwidth .u-legend", name)
    assert page.locator(".plot canvas").count() == 3
    see(page, "#operations", "barrier")
    page.select_option("#op", "barrier")
    see(page, "#latency-now", "p99")
    assert page.evaluate(OTHER_OPERATIONS) == [["all", "broadcast"], ["all", "send"]], "of other ranks"
    check_accessible(page)


def check_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    button = page.locator("#grid button[aria-label='Show rank 2']")
    button.focus()
    page.keyboard.press("Enter")
    see(page, "#charts-title", "of rank 2")
    assert button.get_attribute("aria-pressed") == "true"
    page.wait_for_timeout(1500)  # more than one update of the table
    assert page.evaluate("document.activeElement.ariaLabel") == "Show rank 2"
    see(page, "#groups", "1, 2")


def check_hang_of_two(page: Page) -> None:
    see(page, "#state-title", "The job waits for ranks 1, 2")
    see(page, "#waits tbody", "ranks 1, 2")
    for culprit in (1, 2):
        see(page, "#verdict", f"rank {culprit} (last seen: all_reduce #")
    assert page.title().endswith("The job waits for ranks 1, 2")


def check_hang(page: Page) -> None:
    see(page, "#state-title", "The job waits for rank 1")
    see(page, "#verdict", "is waited for by ranks 0, 2 in all_reduce")
    see(page, "#announce", "its main thread is at test_page.py:")
    assert " for 1" not in page.locator("#announce").inner_text()  # an age would be read out every second
    see(page, "#waits tbody", "0, 2")
    see(page, "#waits tbody", "rank 1")
    see(page, "#grid", "◀ missing in #")
    see(page, "#log", "the job waits for ")
    check_accessible(page)
    page.get_by_role("button", name="Stacks of rank 1").click()
    see(page, "#stacks-text", "test_page.py")
    see(page, "#process-title", "One rank")
    assert page.locator("#rank").input_value() == "1"
    assert page.evaluate(TWO_CULPRITS) == "◀ The job waits for ranks 1, 2: rank 2 was killed by SIGSEGV"
    title, rows = page.evaluate(BOTH_INSIDE)
    assert title == "◷ Operations wait"
    assert rows.count("none: all are inside") == 2
    assert page.evaluate(FIRST_OF_MANY) == "Show rank 18", (
        "of many ranks, the culprit is not below the screen"
    )


def check_broken_link(page: Page, troubles: list[str]) -> None:
    """A page without its stream polls; without its server, it says that it is old."""
    assert troubles == []
    page.route("**/events", lambda route: route.abort())
    page.reload()
    see(page, "#link", "polling")
    see(page, "#state-title", "rank 1 did not enter all_reduce")
    page.unroute("**/events")
    see(page, "#link", "live")


def check_signed_in(page: Page, job: Job) -> None:
    """The tab stays signed in, without a cookie or the token in its address; another tab does not."""
    assert page.context.cookies() == []
    assert "token" not in page.url
    with page.expect_download() as saved:
        page.locator("#files").get_by_role("button", name="Flight recorder of the asked rank").click()
    assert saved.value.suggested_filename == "flight_0"
    assert page.context.browser is not None
    other = page.context.browser.new_page()
    other.goto(job.url.partition("#")[0])
    see(other, "#lost", "This tab is not signed in")
    other.close()


@pytest.mark.slow
def test_the_page_shows_a_run_a_hang_and_its_end(browser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "EVERY_S", 0.5)
    with running() as job, browsing(job.url, browser) as (page, troubles):
        check_run(page)
        check_keyboard(page)
        check_signed_in(page, job)
        job.hang.set()
        check_hang_of_two(page)
        job.let_rank_2_enter.set()
        check_hang(page)
        job.time_out.set()
        see(page, "#state-title", "is broken: rank 1 did not enter all_reduce #")
        see(page, "#verdict", "OperationTimeoutError on ranks 0, 2")
        see(page, "#failed", "OperationTimeoutError")
        see(page, "#grid", "✕ broken")
        assert "all is broken: rank 2 did not" in page.evaluate(BROKEN_IN_TWO_GROUPS), "rank 0 waited, too"
        check_broken_link(page, troubles)
        job.leave.set()
        assert job.gone.wait(20)
        see(page, "#lost", "Connection lost")
        assert page.evaluate("document.body.className") == "stale"


@pytest.mark.slow
def test_the_page_of_a_killed_launcher_says_that_it_lost_the_job(browser: str, tmp_path: Path) -> None:
    """The pages of its ranks, at Unix sockets and with other tokens, are not offered: the ranks end too."""
    program, ends = tmp_path / "train.py", tmp_path / "ends"
    program.write_text(LAUNCHED)
    warm_executable()
    process = start(
        [*warm_python(), CHILDREN, "-m", "dist2.run", "-n", "2", "--page", "--linger", "0", program, ends]
    )
    assert process.stderr is not None
    try:
        link = re.search(r"http://\S+#token=\S+", process.stderr.readline())
        assert link
        with browsing(link[0], browser) as (page, _):
            see(page, "#state-title", "All 2 ranks work")
            base = link[0].partition("/#")[0]
            (launcher,) = (each.process for each in token_files.control_planes() if each.url == base)
            os.kill(launcher.pid, signal.SIGKILL)
            see(page, "#lost", "Connection lost")
            see(page, "#lost", "On the host of the job, dist2 ps lists the jobs that still run.")
            assert page.title() == "No answer: launched, 2 ranks"
            assert page.locator("#lost-links a").count() == 0
            shown = page.locator("#lost-text").inner_text()
            page.evaluate(HIDE_AND_SHOW)
            page.wait_for_timeout(1500)  # more than one attempt
            assert page.locator("#lost-text").inner_text() == shown, "what it shows is not newer"
    finally:
        ends.touch()
        process.communicate(timeout=20)


@pytest.mark.slow
def test_the_page_goes_to_the_next_rank_that_answers(browser: str) -> None:
    job = Leaving()
    ranks = threading.Thread(target=run_ranks, args=(RANKS, job.body, INPROC))
    ranks.start()
    try:
        job.started.wait(20)
        with browsing(job.urls[0], browser) as (page, _):
            see(page, "#state-title", "All 3 ranks work")
            assert page.locator("#moved").is_hidden()
            for gone in (0, 1):
                job.closes[gone].set()
                see(page, "#moved", f"Rank {gone + 1} answers now: rank {gone}, whose page this tab showed")
                see(page, "#who", f"asked rank {gone + 1}")
                see(page, "#state-title", "ranks 0, 1" if gone else "rank 0")
                assert page.title().startswith("⚠ ")
                assert page.title().endswith(page.locator("#state-title").inner_text()[2:])
                assert page.url == f"{job.urls[gone + 1].partition('#')[0]}", "without the token"
            check_accessible(page)
            job.closes[2].set()
            see(page, "#lost", "Connection lost")
            assert page.title().startswith("No answer: ")
    finally:
        job.release()
        ranks.join(20)


def test_the_page_goes_only_to_pages(browser: str) -> None:
    """Beside a forwarded port, another program may listen at the port of another rank."""
    found: list[str] = ["another program"]

    def elsewhere(route: Route) -> None:
        headers = {"Access-Control-Allow-Origin": "*"}
        route.fulfill(body=found[0], content_type="text/javascript", headers=headers)

    with browsing_job(browser, 64, "run") as page:
        see(page, "#state-title", "All 64 ranks work")
        page.route("**/*", lambda route: route.abort())
        page.route("http://127.0.0.1:20001/**", elsewhere)
        with page.expect_response("http://127.0.0.1:20001/others.js"):
            see(page, "#lost", "Connection lost")
        with page.expect_response("http://127.0.0.1:20001/others.js"):  # it has asked again
            pass
        assert page.url == "http://job.test/"
        found[0] = (PAGES / "others.js").read_text()
        page.wait_for_url("http://127.0.0.1:20001/*before=0")


def test_thousands_of_ranks_fit_on_the_page(browser: str) -> None:
    with browsing_job(browser, 2048, "hang") as page:
        see(page, "#state-title", "The job waits for ranks 5, 29")
        assert page.title() == "⚠ training: The job waits for ranks 5, 29"
        sync_api.expect(page.locator("#hosts i")).to_have_count(2048)
        see(page, "#tile-ranks", "0 of 2,048")
        see(page, "#flying-note", "256 older than a second; 32 are shown, those that miss a rank first")
        assert page.locator("#waits tbody tr").count() == 32
        missing = page.locator("#waits tbody tr td:nth-of-type(4)").all_inner_texts()
        assert missing[:3] == ["rank 5", "rank 29", "none: all are inside"]
        assert page.locator("#hosts i.waited-for").count() == 2
        assert page.locator("#grid thead th").all_inner_texts()[2:6] == ["tp-*", "pp-*", "dp-*", "world"]
        rows = page.locator("#grid tbody tr:not(.pad)")
        assert rows.first.locator("button").get_attribute("aria-label") == "Show rank 5"
        assert rows.count() < 100, "rows beyond the screen exist"
        page.evaluate("document.querySelector('#grid').parentElement.scrollTop = 1e9")
        see(page, "#grid tbody", "node-255:6047")
        assert rows.count() < 100
        page.select_option("#shade", "wait")
        see(page, "#map-scale", "0 % (faint) to 37 % (strong)")
        page.select_option("#shade", "late")
        see(page, "#map-scale", "4.00 ms (faint)")
        page.locator("#hosts i[data-rank='21']").click()
        see(page, "#charts-title", "of rank 21")
        check_accessible(page)


def test_the_headline_names_the_rank_that_called_something_else(browser: str) -> None:
    with browsing_job(browser, 64, "broken") as page:
        see(page, "#state-title", "A group is broken on ranks 8\N{EN DASH}15 because of rank 9")
        assert page.locator("#next button").first.inner_text() == "Stacks of rank 9"
        first = page.locator("#grid tbody tr:first-child button")
        assert first.get_attribute("aria-label") == "Show rank 9"
        marked = page.locator("#hosts i.waited-for")
        assert marked.get_attribute("title") == "rank 9 on node-001: broken, the cause"
        assert page.locator("#hosts i.broken").count() == 7


def test_the_headline_says_how_a_process_died_and_the_page_of_another_rank_is_offered(browser: str) -> None:
    with browsing_job(browser, 64, "dead") as page:
        see(page, "#state-title", "The job waits for rank 21: rank 21 was killed by SIGKILL")
        see(page, "#grid tbody tr:first-child", "node-002")
        title = page.locator("#hosts i[data-rank='21']").get_attribute("title")
        assert title == "rank 21 on node-002: silent"
        page.unroute("**/*")
        page.route("**/*", lambda route: route.abort())
        see(page, "#lost", "Connection lost")
        link = page.get_by_role("link", name="Page of rank 1", exact=True)
        assert link.get_attribute("href") == "http://127.0.0.1:20001/#token=t"
        assert page.get_by_role("link", name="Page of rank 0", exact=True).count() == 0


def test_no_rank_is_at_work_after_the_end(browser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"words": "rank 6 was killed by SIGKILL", "code": 137, "incident": ""}
    headline = f"The job has ended: {ended['words']}"
    told = {**job_of(64), "headline": headline, "tone": "bad", "ended": ended}
    monkeypatch.setitem(globals(), "job_of", lambda *_: told)
    with browsing_job(browser, 64, "run") as page:
        see(page, "#state-title", headline)
        see(page, "#tile-ranks", "0 of 64")
        see(page, "#ranks-note", "as they were at the last answer, before the end")
