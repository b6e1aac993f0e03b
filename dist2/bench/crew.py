"""The coordinator's side of a crew: processes, one a rank, that carry contenders and obey commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dist2.bench.peers import Launcher, Peer
from dist2.config import child_environment

START_S = 60.0
ANSWER_S = 90.0
STOP_S = 10.0

# Loopback only, and one thread a rank for all who compute with torch.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class CrewError(RuntimeError):
    """Processes of a crew did not start, died, were silent for too long, or failed."""


class Crew:
    """Ranks of one or more contenders in processes of their own. A context manager.

    Args:
        peers: The contenders; for an MPI exactly one.
        world_size: How many ranks.
        folder: A private one, for sockets and logs.
        launcher: Starts all ranks at once; by default they are started one by one.

    Raises:
        CrewError: It did not come up.
    """

    def __init__(
        self, peers: Sequence[Peer], world_size: int, folder: Path, launcher: Launcher | None = None
    ) -> None:
        self.peers = list(peers)
        self.name = peers[0].crew
        self._world_size = world_size
        self._log_path = folder / f"{self.name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[tuple[socket.socket, IO[str]]] = []
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
        program = [sys.executable, "-m", "dist2.bench.worker", "--control", str(path)]
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
                start_new_session=True,
            )
        self._processes.append(process)

    def _meet(self, listener: socket.socket) -> None:
        """Accept every rank, and sort them."""
        deadline = time.monotonic() + START_S
        accepted: list[socket.socket] = []
        while len(accepted) < self._world_size:
            with suppress(TimeoutError):
                accepted.append(listener.accept()[0])
            self._check_alive()
            if time.monotonic() > deadline:
                self._fail(f"only {len(accepted)} of {self._world_size} ranks started")
        by_rank = {}
        for connection in accepted:
            connection.settimeout(max(1.0, deadline - time.monotonic()))
            lines = connection.makefile("rw")
            self._ranks.append((connection, lines))
            by_rank[int(self._heard(lines)["rank"])] = (connection, lines)
        self._ranks = [by_rank[rank] for rank in range(self._world_size)]
        for connection, _ in self._ranks:
            connection.settimeout(ANSWER_S)

    def tell(self, command: str, *arguments: object) -> list[Any]:
        """Have all ranks do something at once; return what each answers, by rank.

        Raises:
            CrewError: One failed, died, or did not answer in time. The crew is of no further use.
        """
        text = json.dumps([command, arguments]) + "\n"
        try:
            for _, lines in self._ranks:
                lines.write(text)
                lines.flush()
        except OSError as error:
            self._fail(f"a rank is gone: {error}")
        answers = [self._heard(lines) for _, lines in self._ranks]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                self._fail(f"rank {rank}: {answer['error']}")
        return [answer["value"] for answer in answers]

    def _heard(self, lines: IO[str]) -> dict[str, Any]:
        try:
            line = lines.readline()
        except TimeoutError:
            self._fail("a rank does not answer")
        except OSError as error:
            self._fail(f"a rank is gone: {error}")
        if not line:
            self._fail("a rank is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            self._fail("a process ended while it started")

    def _fail(self, why: str) -> Any:
        log = self._log_path.read_text(errors="replace").strip()
        raise CrewError(f"{', '.join(each.title for each in self.peers)}: {why}\n{log[-2000:]}".rstrip())

    def close(self) -> None:
        """Have all ranks stop and wait for them; kill what does not."""
        for _, lines in self._ranks:
            with suppress(OSError):
                lines.write(json.dumps(["stop", []]) + "\n")
                lines.flush()
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all processes at once, with what they started."""
        for connection, lines in self._ranks:
            with suppress(OSError):  # unsent commands
                lines.close()
            connection.close()
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
