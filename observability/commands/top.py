"""``dist2 top URL``: the state of a job in a terminal, renewed about once a second.

Theory of operation. Two threads ask the control plane, one for ``/job`` and one for ``/stragglers``, and each
keeps its latest answers. The main thread reads the keyboard and draws a frame for each new answer, at least
one a second. So a control plane that is slow, stopped or gone delays neither the age in the banner nor the
key ``q``. Any rank answers for the whole job: if the asked rank no longer answers, the next one that it has
named is asked, and then those whose files are on this host. If none answers, the job has ended, or will be
started again, or cannot answer: on the host of the job its processes tell, and each wait has a limit.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from dist2.cli.arguments import number
from observability.commands.control_plane import (
    NO_ANSWER,
    ControlPlane,
    NoAnswerError,
    address,
)
from observability.commands.ending import Ending, JobProcesses, end_unanswered
from observability.commands.job_table import Frame

Document = Mapping[str, Any]

JOB_S = 5.0
"""Limit of a request for ``/job``: a stopped process accepts connections and does not answer."""
STRAGGLERS_S = 20.0
OTHER_RANKS = 4
"""Number of other ranks that are asked if the asked one does not answer."""
LOOK_S = 5.0
"""Longest pause between two looks for processes of the job on this host."""
RESTART_S = 15.0
"""How long a job whose ranks have failed is asked: a launcher may start them again."""
GIVE_UP_S = 60.0
"""How long a job is asked that does not answer, and may run."""
REFRESH_S = 1.0
KEY_S = 0.1
LINES_BESIDE = 14
"""Lines of a frame beside the table of ranks: title, banner, stragglers, heads of tables."""
PLAIN_WIDTH = 160
QUIT_KEYS = frozenset("qQ\x03")


@click.command()
@address
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 3600),
    callback=number,
    default=1.0,
    show_default=True,
    help="Seconds between two requests.",
)
@click.option(
    "--once", is_flag=True, help="Print one frame as plain text; also if the output is no terminal."
)
def top(url: str, token: str | None, token_file: Path | None, interval_s: float, once: bool) -> None:
    """Show the ranks of a job, the ranks that they wait for, and their rates, until q or Ctrl-C.

    URL is that of any control plane of the job. If the job ends, the last frame stays. Ends with 0, also if
    the job has ended without an error; with 1 if it has failed; with 2 if that control plane does not answer
    at the start, or no control plane of the job for a minute.
    """
    plane = None
    try:
        plane = ControlPlane.of(url, token, token_file)
        feed = JobFeed(plane)
        feed.ask()
    except NoAnswerError as error:
        end_unanswered(error, plane)
    try:
        if once or not sys.stdout.isatty():
            _print_once(feed, interval_s)
        else:
            _show(feed, interval_s)
    except KeyboardInterrupt:  # a documented way to end it
        return
    finally:
        feed.close()
    sys.exit(feed.status() or 0)


class JobFeed:
    """The latest answers of a job. `ask` and `ask_stragglers` each belong to one thread.

    Args:
        plane: The control plane to ask first.

    Attributes:
        requests: Number of requests that have ended.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._processes = JobProcesses(plane.base)
        self._job: Document | None = None
        self._before: Document | None = None
        self._stragglers: Document | None = None
        self._trouble = ""
        self._ending: Ending | None = None
        self._answered = time.monotonic()
        self._looks = 0.0
        self.requests = 0

    def ask(self) -> None:
        """Ask for ``/job``: the control plane of the last answer, then others of the job.

        Raises:
            NoAnswerError: None of them answers; the latest answer is kept.
        """
        try:
            self._ask()
        except NoAnswerError as error:
            self._trouble = str(error)
            if self._job is not None:
                self._ending = self._processes.ending()
            raise
        finally:
            self.requests += 1
        assert self._job is not None
        has_changed = self._before is None or self._job["answered"] != self._before["answered"]
        if has_changed or time.monotonic() >= self._looks:
            self._processes.look()
            self._looks = time.monotonic() + LOOK_S

    def _ask(self) -> None:
        failure: NoAnswerError | None = None
        for plane in self._planes():
            try:
                job = plane.get_json("/job", JOB_S)
                Frame(plane.base, job, self._job).render()  # raises if it is of another version
                ending = Ending.told(job)
            except NoAnswerError as error:
                failure = failure or error
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                failure = failure or NoAnswerError(f"{plane.base} is of another version of dist2: {error!r}")
            else:
                if (
                    self._job is None or job["ranks"] != self._job["ranks"]
                ):  # a launcher repeats the last state
                    self._before = self._job
                self._plane, self._job = plane, job
                self._answered, self._trouble, self._ending = time.monotonic(), "", ending
                return
        assert failure is not None
        raise failure

    def ask_stragglers(self) -> None:
        """Ask for ``/stragglers``; without an answer the latest one is kept."""
        try:
            found = self._plane.get_json("/stragglers", STRAGGLERS_S)
            ranking = [(each["rank"], each["group"], each["share"]) for each in found["ranking"]]
            self._stragglers = found if ranking else None
        except NoAnswerError:
            return
        except (KeyError, TypeError):  # of another version
            self._stragglers = None

    def status(self) -> int | None:
        """Return the exit status if the job has ended, or does not answer for too long; None to go on."""
        if self._ending is not None and (self._ending.is_final or self._silent_s() > RESTART_S):
            return self._ending.code
        return NO_ANSWER if self._silent_s() > GIVE_UP_S else None

    def frame(self) -> Frame:
        """Return the latest frame."""
        job, ending, trouble, age_s = self._job, self._ending, self._trouble, self._silent_s()
        going_on = self.status() is None
        if ending is not None:
            trouble = ""
            left = (
                f". Trying {RESTART_S - age_s:.0f} s more: a launcher may start it again" if going_on else ""
            )
            tone = "bad" if ending.failed else "good"
            job = {**(job or {}), "headline": f"{ending.sentence}{left}", "tone": tone, "ended": True}
        again = f"Trying again for {GIVE_UP_S - age_s:.0f} s." if going_on else "Giving up."
        return Frame(self._plane.base, job, self._before, self._stragglers, trouble, age_s, again)

    def close(self) -> None:
        """Let go of the processes of the job."""
        self._processes.close()

    def _silent_s(self) -> float:
        return time.monotonic() - self._answered if self._trouble else 0.0

    def _planes(self) -> Iterator[ControlPlane]:
        """Yield the control planes to ask: that of the last answer, those that it has named, those here."""
        asked = {self._plane.base}
        yield self._plane
        if self._job is None:  # the token may be wrong
            return
        urls = [each["url"] for each in self._job["ranks"] if each["url"] and each["url"] not in asked]
        for url in urls[:OTHER_RANKS]:
            asked.add(url)
            yield self._plane.at(url)
        here = [each for each in self._processes.look() if each.url not in asked]
        for each in here[:OTHER_RANKS]:
            yield ControlPlane(each.url, each.token, self._plane.asker)


def _print_once(feed: JobFeed, interval_s: float) -> None:
    """Print a frame; the rates need a second answer."""
    feed.ask_stragglers()
    time.sleep(interval_s)
    with suppress(NoAnswerError):  # the frame has the reason
        feed.ask()
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns  # COLUMNS, if that is set
    plain = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with plain.capture() as captured:
        plain.print(feed.frame().render(width=width))
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _show(feed: JobFeed, interval_s: float) -> None:
    """Show frames until a key, Ctrl-C or the end of the job; then the last frame stays."""
    ends = threading.Event()

    def ask_again() -> None:
        while not ends.wait(interval_s):
            with suppress(NoAnswerError):  # the frame has the reason
                feed.ask()

    def ask_stragglers_again() -> None:
        feed.ask_stragglers()
        while not ends.wait(max(interval_s, 1.0)):
            feed.ask_stragglers()

    for target in (ask_again, ask_stragglers_again):
        threading.Thread(target=target, name="dist2-top", daemon=True).start()
    console = Console()
    try:
        with _keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
            shown: object = None
            while feed.status() is None:
                if read_key(KEY_S) in QUIT_KEYS:
                    return
                current = feed.requests, console.size, int(time.monotonic() / REFRESH_S)
                if current != shown:
                    shown = current
                    rows = max(3, console.height - LINES_BESIDE)
                    live.update(feed.frame().render(rows, console.width), refresh=True)
    finally:
        ends.set()
    console.print(feed.frame().render(max(3, console.height - LINES_BESIDE), console.width))


def _no_key(limit_s: float) -> str:
    """Wait: there is no keyboard."""
    time.sleep(limit_s)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key, at most some seconds; empty text if none was pressed."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def read_key(limit_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], limit_s)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        yield read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
