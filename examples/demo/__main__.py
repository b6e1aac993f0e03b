"""Train a classifier of handwritten digits on several ranks: `make demo`, or ``python examples/demo``.

This driver starts the ranks with torchrun and waits for them. Exit code 0 means that the model reads
at least 95 % of the test images and that all ranks hold bitwise the same weights.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

RANK = Path(__file__).parent / "rank.py"
NEEDED = {
    "torch": "pip install torch",
    "dist2": "pip install -e .",
    "sklearn": "pip install 'dist2[bench]'",
    "rich": "pip install 'dist2[bench]'",
    "starlette": "pip install 'dist2[control-plane]'",
    "uvicorn": "pip install 'dist2[control-plane]'",
}
STOP_S = 40.0
"""torchrun gives its ranks 30 s to end before it kills them."""

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130


def main() -> int:
    """Run the demo; return the exit code."""
    options = _options()
    missing = [f"{name} ({how})" for name, how in NEEDED.items() if find_spec(name) is None]
    if missing:
        return _fail(UNUSABLE, f"not installed: {', '.join(missing)}; `make demo` installs everything")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _folder_of_its_own(options.out) as out:
        _clear(out)
        result = out / "result.json"
        try:
            code = _run_ranks(options, out)
        except KeyboardInterrupt:
            if not result.exists():
                return _fail(INTERRUPTED, "interrupted; all ranks were stopped")
            code = 0  # it ended the time that the control planes stay up
        if code:
            return _fail(FAILED, f"torchrun ended with exit code {code}; the output of the ranks is above")
        return _judge(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--ranks", type=_positive, default=4, help="processes that train (default: 4)")
    parser.add_argument("--epochs", type=_positive, default=30, help="passes over the images (default: 30)")
    parser.add_argument(
        "--hold",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that the control planes stay up afterwards",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for dumps and traces")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


@contextmanager
def _folder_of_its_own(wanted: Path) -> Iterator[Path]:
    """Make the folder for the files of a run: another one beside it while a running demo has that one."""
    for number in itertools.count(1):
        out = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        out.mkdir(parents=True, exist_ok=True)
        with (out / ".taken").open("w") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when this process ends
            except BlockingIOError:
                continue
            yield out
            return


def _clear(out: Path) -> None:
    """Remove the files of an earlier run."""
    (out / "flight").mkdir(exist_ok=True)
    for pattern in ("flight/rank_*", "trace_*.json", "result.json", "torchfrtrace.pickle"):
        for file in out.glob(pattern):
            file.unlink()


def _run_ranks(options: argparse.Namespace, out: Path) -> int:
    """Start torchrun, pass on its output, and return its exit code; stop all ranks if interrupted."""
    with tempfile.TemporaryDirectory(prefix="dist2-demo-") as folder:
        # torchrun's own store listens on all interfaces, also if it is given an address, and the port that it
        # selects for ranks may be taken by the time they have imported torch: all meet in files.
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=1", f"--nproc-per-node={options.ranks}", "--local-addr=127.0.0.1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/rendezvous"]
        command += ["--rdzv-conf=store_type=file", str(RANK)]
        command += [f"--epochs={options.epochs}", f"--hold={options.hold}", f"--out={out}"]
        command += [f"--meeting=file://{folder}/ranks"]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        # In a new session, so that Ctrl-C reaches the driver alone, which then stops the others in order.
        torchrun = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert torchrun.stderr is not None
        stopped = threading.Event()
        messages = threading.Thread(target=_pass_on, args=(torchrun.stderr, stopped), daemon=True)
        messages.start()
        try:
            if options.hold:
                _hold_until_key(torchrun, out / "result.json")
            return torchrun.wait()
        except KeyboardInterrupt:
            stopped.set()  # torchrun prints a traceback when it is ended
            _stop(torchrun)
            raise
        finally:
            messages.join()
            torchrun.stderr.close()


def _hold_until_key(torchrun: subprocess.Popen[str], result: Path) -> None:
    """Return when the ranks have ended.

    Raises:
        KeyboardInterrupt: A key was pressed while the control planes stay up after the training.
    """
    while torchrun.poll() is None and not result.exists():
        time.sleep(0.1)
    with _ctrl_c_as_key() as pressed:
        while torchrun.poll() is None:
            if pressed():
                raise KeyboardInterrupt


@contextmanager
def _ctrl_c_as_key() -> Iterator[Callable[[], bool]]:
    """Have the terminal deliver Ctrl-C as a key: as a signal it would make `make` report an error.

    Yields:
        Returns whether a key was pressed, after at most 0.1 s; always False without a terminal.
    """
    if not os.isatty(0) or os.tcgetpgrp(0) != os.getpgrp():
        yield _no_key
        return
    before, keys = termios.tcgetattr(0), termios.tcgetattr(0)
    keys[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)
    termios.tcsetattr(0, termios.TCSANOW, keys)
    try:
        yield lambda: bool(select.select([0], [], [], 0.1)[0])
    finally:
        termios.tcsetattr(0, termios.TCSAFLUSH, before)


def _no_key() -> bool:
    time.sleep(0.1)
    return False


def _pass_on(stderr: IO[str], stopped: threading.Event) -> None:
    """Print the ranks' messages, without those that torchrun adds after the first rank failed."""
    failed = False
    for line in stderr:
        failed = failed or "torch/distributed/elastic/multiprocessing/api.py" in line
        if not failed and not stopped.is_set():
            sys.stderr.write(line)


def _stop(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks."""
    torchrun.terminate()
    try:
        torchrun.wait(STOP_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()


def _judge(result: Path) -> int:
    """Read the result that the ranks left; print its faults, if any."""
    if not result.exists():
        return _fail(FAILED, f"the ranks ended without a result in {result}")
    complaints = json.loads(result.read_text())["complaints"]
    return _fail(FAILED, "; ".join(complaints)) if complaints else 0


def _fail(code: int, reason: str) -> int:
    print(f"demo failed: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
