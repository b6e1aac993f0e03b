"""Run one of torch's tests: fork its ranks, collect their exit codes."""

from __future__ import annotations

import functools
import importlib
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

from torch_suite.comparisons import with_comparisons

MODULE = "torch.testing._internal.distributed.distributed_test"
LIMIT_S = 40.0
GRACE_S = 3.0
"""How long other ranks may go on once one has failed."""
TAIL_CHARACTERS = 3000
ERROR_LINE = re.compile(r"\b((?:\w+\.)*\w+(?:Error|Exception): .+)")
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


@attrs.frozen
class Outcome:
    """The end of a test.

    Attributes:
        status: "passed", "skipped" or "failed".
        reason: The reason of a skip; the last line of a failure.
        detail: The output of the failed ranks.
        took_s: Its duration.
    """

    status: str
    reason: str = ""
    detail: str = ""
    took_s: float = 0.0


@attrs.frozen
class Job:
    """A job whose ranks run torch's tests.

    Attributes:
        system: "gloo" (torch's own) or "dist2".
        world_size: How many ranks.
        played: Name of the backend that the tests believe to run on.
    """

    system: str
    world_size: int
    played: str = "gloo"

    def __str__(self) -> str:
        return f"{self.system} as {self.played}, {self.world_size} ranks"


class Suite:
    """torch's tests, imported for one job: its environment decides which of them are skipped.

    Args:
        job: Backend, number of ranks and environment of the runs.
        prepare: Called in each rank with the module, before the test.
    """

    def __init__(self, job: Job, prepare: Callable[[Any], object]) -> None:
        self.job = job
        self._prepare = prepare
        self._folder = tempfile.TemporaryDirectory(prefix="dist2-torch-suite-")
        os.environ.update(
            BACKEND=job.played,
            WORLD_SIZE=str(job.world_size),
            TEMP_DIR=self._folder.name,
            INIT_METHOD="env://",
            MASTER_ADDR="127.0.0.1",
            DIST2_ALLOW_PICKLE="1",  # torch pickles objects, and its tests send some of their own types
        )
        common_distributed.skip_if_small_worldsize = _skip_below_three
        sys.modules.pop(MODULE, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module: Any = importlib.import_module(MODULE)
        module = self.module

        bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
        self._case: Any = with_comparisons(bases, module)

    def names(self) -> list[str]:
        """Return the names of all tests."""
        return sorted(name for name in dir(self._case) if name.startswith("test_"))

    def run(self, name: str) -> Outcome:
        """Run a test on all ranks."""
        method = getattr(self._case, name)
        if getattr(method, "__unittest_skip__", False):
            return Outcome("skipped", method.__unittest_skip_why__)
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            return self._outcome(name, Path(folder))

    def _outcome(self, name: str, folder: Path) -> Outcome:
        for part in ("barrier", "test_dir"):
            (folder / part).mkdir()
        sys.stdout.flush()
        start = time.monotonic()
        pids = []
        for rank in range(self.job.world_size):
            pid = os.fork()
            if not pid:
                self._be(rank, name, folder)
            pids.append(pid)
        codes = _collect(pids, LIMIT_S)
        took_s = time.monotonic() - start
        told = [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(len(pids))]
        return _judge(codes, told, took_s)

    def _be(self, rank: int, name: str, folder: Path) -> None:
        """Be a rank: run the test and exit."""
        code = MultiProcessTestCase.TEST_ERROR_EXIT_CODE
        try:
            with (folder / f"rank{rank}").open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.environ["TEMP_DIR"] = str(folder)
            torch.set_num_threads(1)
            self.module.Barrier.sync = staticmethod(FileBarrier())
            self._prepare(self.module)
            theirs, ours = Pipe()
            self._case._run(rank, name, str(folder / "meeting"), ours)
            theirs.close()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else code
        except BaseException:  # noqa: BLE001 - reported to the parent in the file
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _skip_below_three(method: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a test of groups ``[1, 2]`` on fewer than 3 ranks. torch skips it on fewer than 8."""

    @functools.wraps(method)
    def run(*arguments: Any, **options: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < 3:
            sys.exit(TEST_SKIPS["small_worldsize"].exit_code)
        return method(*arguments, **options)

    return run


class FileBarrier:
    """torch's barrier over files, without its steps of a tenth of a second."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, wait_for: int | None = None, timeout: float = 10) -> None:
        """Wait until as many processes have come; by default all ranks."""
        self._count += 1
        folder = Path(os.environ["TEMP_DIR"]) / "barrier"
        (folder / f"{self._count}-{os.getpid()}").touch()
        expected = int(os.environ["WORLD_SIZE"]) if wait_for is None else wait_for
        deadline = time.monotonic() + timeout
        while len(list(folder.glob(f"{self._count}-*"))) < expected:
            if time.monotonic() > deadline:
                raise RuntimeError("barrier timeout")
            time.sleep(0.002)


def _collect(pids: list[int], limit_s: float) -> list[int | None]:
    """Return the exit codes of processes; None for one that was stopped by a limit. All have ended then."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + limit_s
    watched = {os.pidfd_open(pid): pid for pid in pids}
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    while len(codes) < len(pids):
        for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            poll.unregister(descriptor)
            pid = watched[descriptor]
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[pid] = code
            if code and code not in SKIPS:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() >= deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
    for descriptor in watched:
        os.close(descriptor)
    return [codes[pid] for pid in pids]


def _judge(codes: list[int | None], told: list[str], took_s: float) -> Outcome:
    """Return how a test ended. torch looks at rank 0 alone; here all ranks must have ended alike."""
    if all(code in SKIPS for code in codes):
        return Outcome("skipped", SKIPS[codes[0] or 0], took_s=took_s)
    if all(code == 0 or code in SKIPS for code in codes):
        return Outcome("passed", took_s=took_s)
    bad = [rank for rank, code in enumerate(codes) if code]
    bad = bad or [rank for rank, code in enumerate(codes) if code is None]
    ends = ["stopped" if code is None else f"exit code {code}" for code in codes]
    detail = "\n".join(f"--- rank {rank}: {ends[rank]}\n{told[rank][-TAIL_CHARACTERS:]}" for rank in bad)
    lines = ERROR_LINE.findall(told[bad[0]])
    return Outcome("failed", lines[-1][:300] if lines else f"exit codes {codes}", detail, took_s)
