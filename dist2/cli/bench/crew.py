"""The coordinator's side of a crew: processes, one a rank, that carry contenders and obey commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from dist2.cli.bench.peers import Launcher, Peer
from dist2.runtime.config import child_environment
from dist2.runtime.deadline import Deadline, deadline_in, remaining_s

START_S = 60.0
START_RANK_S = 5.0
"""Added for each rank: importing torch takes a second of a core."""

ANSWER_S = 90.0
LAST_WORDS_S = 2.0
STOP_S = 10.0

# Loopback only, and one thread a rank for contenders that compute with torch.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class CrewError(RuntimeError):
    """Processes of a crew did not start, died, were silent for too long, or failed."""


class Crew:
    """Ranks of one or more contenders in processes of their own. A context manager.

    Args:
        peers: The contenders; for an MPI exactly one.
        world_size: Number of ranks.
        folder: A private one, for sockets and logs.
        launcher: Starts all ranks at once; by default they are started one by one.
        own_sessions: Give each rank a session: Linux divides processor time between sessions first.

    Raises:
        CrewError: A process did not start.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        world_size: int,
        folder: Path,
        launcher: Launcher | None = None,
        own_sessions: bool = False,
    ) -> None:
        self.peers = list(peers)
        self.name = peers[0].crew
        self._world_size = world_size
        self._own_sessions = own_sessions
        self._log_path = folder / f"{self.name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[socket.socket] = []
        path = folder / f"{self.name}.sock"
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(world_size)
                listener.settimeout(0.2)
                self._start(path, folder / f"{self.name}.store", launcher)
                self._meet(listener)
        except BaseException:
            self.kill()
            raise

    def _start(self, path: Path, store: Path, launcher: Launcher | None) -> None:
        program = [sys.executable, "-m", f"{__package__}.worker", "--control", str(path)]
        program += [
            "--world-size",
            str(self._world_size),
            "--contenders",
            *(each.name for each in self.peers),
        ]
        if launcher is not None:
            self._spawn([*launcher.command, "-n", str(self._world_size), *program], launcher.environment)
            return
        for rank in range(self._world_size):
            self._spawn([*program, "--store", str(store), "--rank", str(rank)], {})

    def _spawn(self, command: list[str], environment: Any) -> None:
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=child_environment({**_ENVIRONMENT, **environment}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=self._own_sessions,
                process_group=None if self._own_sessions else 0,
            )
        self._processes.append(process)

    def _meet(self, listener: socket.socket) -> None:
        """Accept every rank, and sort them."""
        deadline = Deadline.after(START_S + START_RANK_S * self._world_size)
        while len(self._ranks) < self._world_size:
            with suppress(TimeoutError):
                self._ranks.append(listener.accept()[0])
            self._check_alive()
            if deadline.passed:
                self._fail(f"only {len(self._ranks)} of {self._world_size} ranks started")
        by_rank = {int(self._heard(each, deadline)["rank"]): each for each in self._ranks}
        self._ranks = [by_rank[rank] for rank in range(self._world_size)]

    def tell(self, command: str, *arguments: object) -> list[Any]:
        """Send a command to all ranks at once; return their answers, by rank.

        Raises:
            CrewError: One failed, died, or did not answer in time. The crew is of no further use.
        """
        for rank in self._ranks:
            try:
                _say(rank, [command, arguments])
            except OSError as error:
                self._lost(f": {error}")
        deadline = Deadline.after(ANSWER_S)
        answers = [self._heard(each, deadline) for each in self._ranks]
        for number, answer in enumerate(answers):
            if "error" in answer:
                self._fail(f"rank {number}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def _heard(self, rank: socket.socket, deadline: Deadline) -> dict[str, Any]:
        """Return a rank's next message: one line, after which it waits for a command."""
        line = b""
        rank.settimeout(0.2)
        while not line.endswith(b"\n"):
            try:
                received = rank.recv(1 << 16)
            except TimeoutError:
                self._check_alive()  # all ranks: this one may wait for another that is gone
                if deadline.passed:
                    self._fail("a rank does not answer")
                continue
            except OSError as error:
                self._lost(f": {error}")
            if not received:
                self._lost()
            line += received
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self, how: str = "") -> NoReturn:
        """Fail for a rank that hung up, once it has said its last words: its log is still being written."""
        for _ in Deadline.after(LAST_WORDS_S).tries(0.01, 0.01):
            if any(process.poll() is not None for process in self._processes):
                break
        self._fail(f"a rank is gone{how}")

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            self._fail("a process ended")

    def _fail(self, why: str) -> NoReturn:
        log = self._log_path.read_text(errors="replace").strip()
        raise CrewError(f"{', '.join(each.title for each in self.peers)}: {why}\n{log[-2000:]}".rstrip())

    def close(self) -> None:
        """Ask all ranks to stop and wait for them; kill those that do not."""
        for rank in self._ranks:
            with suppress(OSError):  # one that is gone needs no stopping
                _say(rank, ["stop", []])
        deadline_ns = deadline_in(STOP_S)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, remaining_s(deadline_ns)))
        self.kill()

    def kill(self) -> None:
        """Kill all processes at once, and their children."""
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def _say(rank: socket.socket, command: object) -> None:
    rank.sendall(json.dumps(command).encode() + b"\n")
