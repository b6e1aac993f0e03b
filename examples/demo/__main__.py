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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
        try:
            code = _run_ranks(options, out)
        except KeyboardInterrupt:
            return _fail(INTERRUPTED, "interrupted; all ranks were stopped")
        if code:
            return _fail(FAILED, f"torchrun ended with exit code {code}; what a rank said is above")
        return _judge(out / "result.json")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--ranks", type=_positive, default=4, help="processes that train (default: 4)")
    parser.add_argument("--epochs", type=_positive, default=30, help="passes over the images (default: 30)")
    parser.add_argument(
        "--hold", type=float, default=0.0, metavar="S", help="keep the control planes up that long afterwards"
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
    """Make the folder for what comes of a run: another beside it while a run that goes on has that one."""
    for number in itertools.count(1):
        out = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        out.mkdir(parents=True, exist_ok=True)
        with (out / ".taken").open("w") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of when this process ends
            except BlockingIOError:
                continue
            yield out
            return


def _clear(out: Path) -> None:
    """Empty the folder of what an earlier run left in it."""
    (out / "flight").mkdir(exist_ok=True)
    for pattern in ("flight/rank_*", "trace_*.json", "result.json"):
        for file in out.glob(pattern):
            file.unlink()


def _run_ranks(options: argparse.Namespace, out: Path) -> int:
    """Start torchrun, pass on what it says, and return its exit code; stop all ranks if interrupted."""
    with tempfile.TemporaryDirectory(prefix="dist2-demo-") as folder:
        # torchrun's own store listens on all interfaces, whatever address it is given, and the port that it
        # finds for ranks may be another program's once they have imported torch: all meet in files.
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=1", f"--nproc-per-node={options.ranks}", "--local-addr=127.0.0.1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/rendezvous"]
        command += ["--rdzv-conf=store_type=file", str(RANK)]
        command += [f"--epochs={options.epochs}", f"--hold={options.hold}", f"--out={out}"]
        command += [f"--meeting=file://{folder}/ranks"]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        # A session of its own, so that Ctrl-C reaches the driver alone, which then stops the others in order.
        torchrun = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert torchrun.stderr is not None
        try:
            _pass_on(torchrun.stderr)
            return torchrun.wait()
        except KeyboardInterrupt:
            _stop(torchrun)
            raise
        finally:
            torchrun.stderr.close()


def _pass_on(stderr: IO[str]) -> None:
    """Print what the ranks say, and not what torchrun makes of it after the first of them failed."""
    failed = False
    for line in stderr:
        failed = failed or "torch/distributed/elastic/multiprocessing/api.py" in line
        if not failed:
            sys.stderr.write(line)


def _stop(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks, without the traceback that it prints then."""
    torchrun.terminate()
    try:
        torchrun.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.communicate()


def _judge(result: Path) -> int:
    """Read what the ranks left behind; say what is wrong, if anything."""
    if not result.exists():
        return _fail(FAILED, f"the ranks ended without a result in {result}")
    complaints = json.loads(result.read_text())["complaints"]
    return _fail(FAILED, "; ".join(complaints)) if complaints else 0


def _fail(code: int, reason: str) -> int:
    print(f"demo failed: {reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
