"""``python -m dist2.run -n 4 script.py``: start a program as ranks on this host.

Each process gets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT``, so that ``env://`` works for dist2 and for torch.distributed. This process hosts the store
where ranks meet, on loopback and at a port that the kernel chooses; no other process can take that port in
between.

If a rank fails, the others get ``SIGTERM``, and ``SIGKILL`` after a grace period. The rank that ends first is
often not the cause: ranks report their errors at exit, and the launcher follows the ranks that these blame.
The exit code is that of the cause, if it has failed, else that of the rank that failed first. With
``--max-restarts`` all ranks start again, with a new store. If this process itself is killed, the kernel
sends the ranks ``SIGTERM``. With ``--page`` this process serves the live page of the job, which shows the
last state after the ranks have ended. torchrun does more: several hosts, and a number of ranks that changes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from dist2.errors import Dist2Error, ResourceError
from dist2.launch.meeting import HOST, rank_environment, serve_ranks
from dist2.runtime.config import child_environment, environment_value, temporary_folder
from dist2.runtime.deadline import deadline_in, remaining_s
from dist2.runtime.exit_report import VARIABLE, ExitReport, latest_incident, read_report
from dist2.runtime.other_process import was_killed_by
from dist2.runtime.rank_names import rank_names
from dist2.runtime.resources import system_call

GRACE_S = 5.0
_CAUSE_S = 1.0
"""How long ranks that another one blames may take to end before they count as running."""
_NOTICE_S = 1.0
"""How long the other ranks may take to notice a failure before they are stopped."""
_PAGES = "dist2.launcher_pages"
"""Entry points: functions that serve a page of a job, of a program and a number of ranks."""
_CONTROL_PLANE = "DIST2_CONTROL_PLANE"
_SOCKET_FOLDER_BYTES = 80
"""Longest folder for Unix sockets, whose path has 107 bytes at most; a longer ``TMPDIR`` gets loopback."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = 512
"""Bytes to read at once of the descriptor that has one for each signal."""


@attrs.frozen
class Ended:
    """How the ranks ended.

    Attributes:
        code: Exit code: 0, that of the rank whose failure is the cause, or 128 and the number of a signal.
        rank: That rank; None if none failed.
        words: Its end, in words that follow the name of the rank.
        blames: Ranks that its error blames, and that have not failed themselves.
        stopped: Whether this process was told to stop.
        incident: The folder with the evidence; empty where there is none.
    """

    code: int
    rank: int | None = None
    words: str = ""
    blames: tuple[int, ...] = ()
    stopped: bool = False
    incident: str = ""


class Ranks:
    """The processes of one attempt.

    Args:
        command: The program and its arguments.
        count: Number of ranks.
        attempt: How many attempts there were before.
        observed: Whether each rank has a control plane.
    """

    def __init__(self, command: Sequence[str], count: int, attempt: int, observed: bool = False) -> None:
        self._lease = serve_ranks(HOST)
        self._reports = tempfile.TemporaryDirectory(prefix="dist2-run-", dir=temporary_folder())
        common = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        if observed and not environment_value(_CONTROL_PLANE):
            # At Unix sockets only the page has an address.
            fits = len(os.fsencode(self._reports.name)) <= _SOCKET_FOLDER_BYTES
            common[_CONTROL_PLANE] = self._reports.name if fits else "1"
        self._command, self._count, self._common = command, count, common
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signal = 0
        self._is_stopping = False

    @property
    def meeting(self) -> str:
        """The address of the store where the ranks meet: ``127.0.0.1:40123``."""
        return f"{HOST}:{self._lease.server.port}"

    def wait(self) -> Ended:
        """Start the ranks, and wait until all have ended; end the others once one has failed."""
        with self._heeding_signals() as signals, self._reports:
            try:
                failed = self._first_failure(signals)
            finally:
                self._stop([process for process in self._processes if process.poll() is None])
                self._lease.give_back()
            return Ended(0) if failed is None else attrs.evolve(failed, incident=self._incident())

    def _first_failure(self, signals: int) -> Ended | None:
        """Start the ranks, and wait until one has failed, or all have ended."""
        failed: Ended | None = None
        self._start_ranks()
        running = list(range(self._count))
        while running and failed is None and not self._signal:
            os.read(signals, _SIGNALS)  # until a rank has ended, or this process is told to stop
            for rank in tuple(running):
                code = self._processes[rank].poll()
                if code is not None:
                    running.remove(rank)
                if code and failed is None:
                    failed = self._cause(rank)
        if failed is not None and environment_value("DIST2_INCIDENTS") != "0":
            self._let_others_notice()
        if self._signal:
            failed = Ended(128 + self._signal, stopped=True)
        return failed

    def _start_ranks(self) -> None:
        parent = os.getpid()
        for rank in range(self._count):
            own = rank_environment(rank, self._count, self._lease.server.port)
            environment = child_environment({**self._common, **own, VARIABLE: str(self._report_of(rank))})
            with system_call("a start of a rank"):
                self._processes.append(
                    subprocess.Popen(self._command, env=environment, preexec_fn=lambda: _end_with(parent))
                )

    def _let_others_notice(self) -> None:
        """Give the other ranks a moment: a rank that sees the failure writes its part of the incident."""
        deadline_ns = deadline_in(_NOTICE_S)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(remaining_s(deadline_ns))

    def _incident(self) -> str:
        """Return the folder of the incident that a rank has noted last; empty if none has."""
        return latest_incident(map(self._report_of, range(len(self._processes))))

    def _report_of(self, rank: int) -> Path:
        return Path(self._reports.name, f"rank-{rank}.json")

    def _cause(self, rank: int) -> Ended:
        """Return the end of the rank that made a rank fail: that which its error blames, if it has failed."""
        seen, deadline_ns = {rank}, deadline_in(_CAUSE_S)
        while True:
            report = read_report(self._report_of(rank))
            blamed = () if report is None else tuple(each for each in report.blames if each not in seen)
            failed = next((each for each in blamed if self._fails(each, deadline_ns)), None)
            if failed is None:
                break
            rank = failed
            seen.add(rank)
        code = self._processes[rank].returncode
        return Ended(code if code > 0 else 128 - code, rank, _words(code, report), blamed)

    def _fails(self, rank: int, deadline_ns: int) -> bool:
        """Whether a rank has ended with an error, or does so until a time."""
        if not 0 <= rank < len(self._processes):
            return False
        with suppress(subprocess.TimeoutExpired):
            return self._processes[rank].wait(remaining_s(deadline_ns)) != 0
        return False

    @contextmanager
    def _heeding_signals(self) -> Iterator[int]:
        """Have signals stop the ranks; yield a descriptor that is readable after one, and as a rank ends."""
        heard, note = os.pipe()
        os.set_blocking(note, False)
        # What is ignored stays so, and is ignored by the ranks: nohup, or a job in the background of a shell.
        minded = (each for each in _STOPPING if signal.getsignal(each) is not signal.SIG_IGN)
        before = {number: signal.signal(number, self._take_signal) for number in minded}
        # A parent may have left it ignored, where the kernel keeps no exit codes, or blocked.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        wakeup = signal.set_wakeup_fd(note)
        try:
            yield heard
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(heard)
            os.close(note)

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._is_stopping:
            raise KeyboardInterrupt

    def _stop(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        with suppress(KeyboardInterrupt):
            try:
                self._is_stopping = True  # from now on a signal ends the grace period
                for process in processes:
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # a process that is stopped handles no other signal
                deadline_ns = deadline_in(GRACE_S)
                for process in processes:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(remaining_s(deadline_ns))
            finally:
                self._is_stopping = False
        for process in processes:
            process.kill()  # nothing where it has ended
        for process in processes:
            process.wait()


def _end_with(parent: int) -> None:
    """In a child: have the kernel send it SIGTERM when its parent ends, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        os._exit(128 + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks; return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.program == "-":
        parser.error("program '-' is standard input, which only one rank could read: write it to a file")
    if given.linger is not None and not given.page:
        parser.error("--linger needs --page: nothing else stays after the ranks have ended")
    command = [sys.executable, *(["-m"] if given.module else []), given.program, *given.arguments]
    page = _page(parser, Path(given.program).name, given.ranks) if given.page else None
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        for attempt in range(given.max_restarts + 1):
            try:
                ranks = Ranks(command, given.ranks, attempt, given.page)
            except Dist2Error as error:
                parser.exit(1, f"no store can be served for the ranks: {error}\n")
            if page is not None:
                page.starts(ranks.meeting)
            try:
                ended = ranks.wait()
            except ResourceError as error:
                parser.exit(1, f"not all ranks can be started: {error}\n")
            words = _summary(ended, attempt < given.max_restarts)
            if words:
                sys.stderr.write(f"{words}\n")
            if ended.incident:
                sys.stderr.write(f"incident: {ended.incident}, read it with: dist2 why {ended.incident}\n")
            if ended.code == 0 or ended.stopped:
                break
        if page is not None and not ended.stopped:
            page.ended(words or "all ranks, without an error", ended.code, ended.incident)
            _linger(page.url, given.linger)
    finally:
        if page is not None:
            page.close()
        signal.signal(signal.SIGINT, on_ctrl_c)
    return ended.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist2.run", description="Start a program as ranks.")
    parser.add_argument(
        "-n",
        "--ranks",
        type=partial(_count, least=1),
        default=len(os.sched_getaffinity(0)),
        help="default: one a core that this process may use",
    )
    parser.add_argument(
        "--max-restarts",
        type=partial(_count, least=0),
        default=0,
        metavar="N",
        help="of all ranks, after a failure",
    )
    parser.add_argument("--page", action="store_true", help="serve the live page of the job on this host")
    parser.add_argument(
        "--linger",
        type=_seconds,
        metavar="SECONDS",
        help="how long the page stays after the ranks have ended; default: until Ctrl-C",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a Python script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's")
    return parser


def _summary(ended: Ended, again: bool) -> str:
    """Return how the ranks ended, in words; empty where none failed."""
    if ended.rank is None:
        return ""
    then = "starting all ranks again" if again else "the other ranks were stopped"
    cause = f"the cause is {rank_names(ended.blames)}: " if ended.blames else ""
    return f"{cause}{rank_names([ended.rank])} {ended.words}; {then}"


def _page(parser: argparse.ArgumentParser, program: str, ranks: int) -> Any:
    """Start the page of the job; it comes from a package above this one."""
    point = next(iter(entry_points(group=_PAGES)), None)
    if point is None:
        parser.error("--page needs the package observability, which comes with dist2: install dist2 again")
    try:
        return point.load()(program, ranks)
    except ModuleNotFoundError as error:
        parser.error(f"--page needs {error.name}: pip install 'dist2[control-plane]'")


def _linger(url: str, seconds: float | None) -> None:
    """Keep the page for some seconds, or until Ctrl-C."""
    until = "until Ctrl-C" if seconds is None else f"for {seconds:g} s, or until Ctrl-C"
    sys.stderr.write(f"dist2: the ranks have ended; their last state stays at {url} {until}\n")
    signal.signal(signal.SIGINT, _interrupt_once)
    with suppress(KeyboardInterrupt):
        threading.Event().wait(seconds)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and ignore the signal from now on: the page is being closed."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _words(code: int, report: ExitReport | None) -> str:
    """Return how a rank ended, in words that follow its name."""
    if code < 0:
        return was_killed_by(-code)
    return f"ended with exit code {code}{'' if report is None else f' ({report.words})'}"


def _count(text: str, least: int) -> int:
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if count < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {count}")
    return count


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= threading.TIMEOUT_MAX:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
