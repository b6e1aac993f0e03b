"""``python -m dist2.run``: ranks on this host, their failures, and restarts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from support.programs import Ended, processes_with, run, start
from support.rank_texts import misnamed
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

from dist2.run import main

TRAINING = """
import os, sys
import torch, dist2
import torch.distributed as theirs

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pg = dist2.new_group("socket", 30)
pg.all_reduce(total := torch.tensor([float(pg.rank())]))
if pg.rank() == 1 and attempt == 0:
    os._exit(3)
pg.barrier()  # in the first attempt, until it is stopped
theirs.init_process_group("gloo")
theirs.all_reduce(total)
sys.stdout.write(f"rank {pg.rank()} of {pg.size()}, attempt {attempt}: {total.item():g}\\n")
theirs.destroy_process_group()
pg.shutdown()
"""

STAYING = """
import os, signal, sys
sys.stdout.write(f"rank {os.environ['RANK']} {sys.argv[1:]}\\n")
sys.stdout.flush()
if os.environ["RANK"] == "1" and "fail" in sys.argv:
    os._exit(3)
signal.pause()
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def command(*arguments: str | Path) -> list[str | Path]:
    warm_executable()  # the ranks are forks too
    return [*warm_python(), CHILDREN, "-m", "dist2.run", *arguments]


@pytest.mark.parametrize("secret", ["", "known to the ranks, and not to torch"])
def test_ranks_meet_again_after_a_failure(secret: str, tmp_path: Path) -> None:
    """torch finds them as well, also with a secret: the launcher's store requires none."""
    arguments = command("-n", "2", "--max-restarts", "1", written(tmp_path, TRAINING))
    ended = run(arguments, variables={"DIST2_SECRET": secret})
    assert ended.code == 0, ended
    assert "rank 1 ended with exit code 3; starting all ranks again" in ended.errors
    assert sorted(ended.output.splitlines()) == [f"rank {rank} of 2, attempt 1: 2" for rank in range(2)]


def test_a_failure_ends_all_and_gives_its_code(tmp_path: Path) -> None:
    program = written(tmp_path, STAYING)
    ended = run(command("-n", "2", program, "fail"))
    assert ended.code == 3, ended
    assert "rank 1 ended with exit code 3; the other ranks were stopped" in ended.errors
    assert not processes_with(str(program))


def test_a_failure_is_seen_where_a_parent_ignores_or_blocks_the_signal_of_its_children(
    tmp_path: Path,
) -> None:
    """The kernel keeps no exit code of a child while the signal is ignored: such a job was a success."""
    program = written(tmp_path, STAYING)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        assert main(["-n", "2", str(program), "fail"]) == 3
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert not processes_with(str(program))


def test_no_pidfd_is_needed_to_start_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert main(["-n", "2", str(written(tmp_path, STAYING)), "fail"]) == 3


LATE_IN_A_SUBGROUP = """
import signal
import torch, dist2

world = dist2.new_group("socket", 30)
tp = world.split([1, 2], name="tp")
if world.rank() == 1:
    tp.all_reduce(torch.ones(2), timeout=0.3)
signal.pause()
"""

SLOW_TO_END = """
import atexit, os, sys, time
import torch, dist2

pg = dist2.new_group("socket", 30)
pg.barrier()
others_have_ended = sys.argv[1]
if pg.rank() == 1:
    def wait():
        while not os.path.exists(others_have_ended):
            time.sleep(0.01)
    atexit.register(wait)  # runs after the others know of the error
    with pg:
        raise ValueError("no data in shard 7")
try:
    {call}
except RuntimeError as error:
    atexit.register(open, others_have_ended, "w")
    {end}
"""
CALLS = {
    "a call": ("pg.all_reduce(torch.ones(2))", "raise RuntimeError('the step failed') from error"),
    "torch": ("pg.all_reduce(torch.ones(2), async_op=True).get_future().wait()", "raise"),  # as DDP's reducer
    "torch, in a block": (
        "with pg: pg.all_reduce(torch.ones(2), async_op=True).get_future().wait()",
        "raise",
    ),
}
"""Ways in which the failure of a group ends a rank."""


def test_the_rank_that_others_wait_for_is_named_as_the_cause(tmp_path: Path) -> None:
    ended = run(command("-n", "3", written(tmp_path, LATE_IN_A_SUBGROUP)))
    note = ended.errors.splitlines()[-1]
    assert ended.code == 1, ended
    assert note.startswith("the cause is rank 2: rank 1 ended with exit code 1 (OperationTimeoutError: "), (
        ended
    )
    assert not misnamed(note.partition("(")[2], "tp", (1, 2)), ended
    assert "rank 2 (rank 1 of tp, host " in note, ended


@pytest.mark.parametrize("way", CALLS)
def test_the_error_that_made_others_fail_is_named_although_they_end_first(way: str, tmp_path: Path) -> None:
    call, end = CALLS[way]
    program = written(tmp_path, SLOW_TO_END.replace("{call}", call).replace("{end}", end))
    ended = run(command("-n", "3", program, tmp_path / "others have ended"))
    assert ended.code == 1, ended
    note = ended.errors.splitlines()[-1]
    assert note == (
        "rank 1 ended with exit code 1 (ValueError: no data in shard 7); the other ranks were stopped"
    ), ended


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    program = written(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    ended = run(command("-n", "1", program))
    assert (ended.code, ended.errors.splitlines()[-1]) == (
        128 + signal.SIGKILL,
        "rank 0 was killed by SIGKILL; the other ranks were stopped",
    )


STOPPED = """
import os, signal, sys
from pathlib import Path

def end(number, frame):
    Path(sys.argv[2]).write_text("in good order")
    sys.exit()

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, end)
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
while not (path := Path(sys.argv[1])).exists() or not path.read_text():
    pass
while Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "T":
    pass
sys.exit(3)
"""


def test_a_rank_that_is_stopped_ends_in_good_order(tmp_path: Path) -> None:
    program = written(tmp_path, STOPPED)
    # Of a warm interpreter the launcher would stop its client.
    arguments = [sys.executable, "-m", "dist2.run", "-n", "2", program, tmp_path / "pid", tmp_path / "end"]
    ended = run(arguments)
    assert ended.code == 3, ended
    assert (tmp_path / "end").read_text() == "in good order"


def test_a_signal_ends_all(tmp_path: Path) -> None:
    program = written(tmp_path, STAYING)
    process = start(command("-n", "2", program, "--flag", "stay"))
    assert process.stdout is not None
    told = sorted(process.stdout.readline() for _ in range(2))
    assert told == [f"rank {rank} ['--flag', 'stay']\n" for rank in range(2)]
    os.kill(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM, Ended(process.returncode, output, errors)
    assert not processes_with(str(program))


# A handler may not print while `print` is under way.
STUBBORN = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda number, frame: os.write(1, b"told\\n"))
os.write(1, b"there\\n")
while True:
    signal.pause()
"""


def test_a_second_ctrl_c_ends_ranks_that_do_not_end_by_themselves(tmp_path: Path) -> None:
    program = written(tmp_path, STUBBORN)
    process = start(command("-n", "1", program))
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    os.kill(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "told\n"
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (128 + signal.SIGINT, ""), Ended(
        process.returncode, output, errors
    )
    assert not processes_with(str(program))


IGNORING = """
import os, signal, sys
assert signal.getsignal(int(sys.argv[1])) is signal.SIG_IGN
os.kill(os.getppid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_launcher_was_told_to_ignore_stops_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    """``nohup`` ignores SIGHUP, and a shell SIGINT of a job in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert main(["-n", "2", str(written(tmp_path, IGNORING)), str(int(number))]) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


LEFT = """
import os, signal, sys
sys.stdout.write(f"{os.getpid()} {os.getppid()}\\n")
sys.stdout.flush()
signal.pause()
"""


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    # The ranks of a warm interpreter are children of its server.
    process = start([sys.executable, "-m", "dist2.run", "-n", "2", written(tmp_path, LEFT)])
    assert process.stdout is not None
    said = [process.stdout.readline().split() for _ in range(2)]
    assert [parent for _, parent in said] == [str(process.pid)] * 2
    process.kill()
    try:
        output, _ = process.communicate(timeout=20)  # the ranks hold the other ends of its pipes
    except subprocess.TimeoutExpired:
        for rank, _ in said:
            os.kill(int(rank), signal.SIGKILL)
        raise
    assert (process.returncode, output) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "0"), "must be at least 1, got 0"),
        (("-n", "two"), "must be an integer, got 'two'"),
        (("--max-restarts", "-1"), "must be at least 0, got -1"),
        (("--page", "--linger", "nan"), "must be a number of seconds, got 'nan'"),
        (("--page", "--linger", "-1"), "must be a number of seconds, got '-1'"),
        (("--page", "--linger", "1e15"), "must be a number of seconds, got '1e15'"),
        (("--linger", "3"), "--linger needs --page"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "x.py"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_there_is_one_rank_for_each_core_that_the_launcher_may_use(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``taskset`` and the CPU sets of containers leave it fewer than the host has."""
    program = written(tmp_path, "import os, sys; sys.stdout.write(os.environ['WORLD_SIZE'])")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert main([str(program)]) == 0
    finally:
        os.sched_setaffinity(0, before)
    assert capfd.readouterr().out == "1"


def test_a_host_without_its_loopback_address_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist2.run.HOST", "192.0.2.1")  # no host has it
    with pytest.raises(SystemExit) as ended:
        main(["-n", "2", "program.py"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("no store can be served for the ranks: ")
    assert "it is no address of this machine" in said


def test_where_not_all_ranks_can_be_started_none_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_one(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(popen(*arguments, **options))
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(SystemExit) as ended:
        main(["-n", "2", str(written(tmp_path, STAYING))])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("not all ranks can be started: a start of a rank failed: ")
    assert started[0].returncode is not None


def test_a_program_from_standard_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["-n", "2", "-"])
    assert end.value.code == 2
    assert "program '-' is standard input, which only one rank could read" in capsys.readouterr().err


def test_ranks_of_a_page_listen_on_loopback_where_a_unix_socket_has_too_long_a_path(tmp_path: Path) -> None:
    program = written(tmp_path, "import os, sys; sys.stdout.write(os.environ['DIST2_CONTROL_PLANE'])")
    seen = []
    for folder in (Path("/tmp"), tmp_path / ("scratch" * 12)):
        folder.mkdir(exist_ok=True)
        arguments = ["-n", "1", "--page", "--linger", "0", program]
        ended = run(command(*arguments), variables={"TMPDIR": str(folder)})
        assert ended.code == 0, ended
        seen.append(ended.output)
    assert seen[0].startswith("/tmp/dist2-run-")
    assert seen[1] == "1"


class ClosedByCtrlC:
    """A page at which Ctrl-C is pressed until the launcher has closed it."""

    url = "http://page"

    def __init__(self) -> None:
        self.is_closed = False

    def starts(self, meeting: str) -> None:
        pass

    def ended(self, words: str, code: int, incident: str) -> None:
        pass

    def wait(self, seconds: float | None) -> None:
        signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        signal.raise_signal(signal.SIGINT)
        self.is_closed = True


def test_ctrl_c_that_comes_twice_closes_the_page_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once by the terminal, and once by a parent such as ``timeout``."""
    page, before = ClosedByCtrlC(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("dist2.run._page", lambda *_: page)
    monkeypatch.setattr("dist2.run.threading", types.SimpleNamespace(Event=lambda: page))
    assert main(["-n", "1", "--page", str(written(tmp_path, ""))]) == 0
    assert page.is_closed
    assert signal.getsignal(signal.SIGINT) is before
