"""A few real processes, started once and used for many cases."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from support.processes import context, start

CASE_S = 45.0
"""A case that takes longer is stuck."""


class RankFailed(AssertionError):  # noqa: N818 - a failed assertion, in another process
    """A rank raised, or died; the message has its traceback."""


class RankPool:
    """Processes that run one function as all ranks of a job.

    Attributes:
        world_size: How many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._start()

    def _start(self) -> None:
        self._pipes, self._processes = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            with theirs:
                self._processes.append(start(_serve, rank, theirs))
            self._pipes.append(ours)

    def run(self, case: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call ``case(rank, *arguments)`` on every rank; return each one's result.

        Raises:
            RankFailed: A rank raised, or died, or is stuck. All processes are replaced if one was lost.
        """
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + CASE_S
        while len(answers) < self.world_size:
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._replace()
                raise RankFailed(f"stuck: ranks {sorted(missing.values())}")
            for pipe, rank in missing.items():
                if pipe in ready:
                    answers[rank] = self._answer(pipe)
        failed = {rank: text for rank, (fine, text) in answers.items() if not fine}
        if failed:
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _answer(self, pipe: Any) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            self._replace()
            raise RankFailed("a rank's process died") from None

    def _replace(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank returns; one that is stuck is killed
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, case(rank, *arguments))
        except BaseException:  # noqa: BLE001 - reported to the test
            answer = (False, traceback.format_exc())
        pipe.send(answer)
