"""Ranks as processes that share one GPU: each says that it is a host of its own, which NCCL accepts."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import dist2
from dist2 import ProcessGroup

LIMIT_S = 90.0
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}
"""Read once a process, before the first call of NCCL."""
GROUP: dict[str, Any] = {"backend": "nccl", "device": "cuda:0", "timeout": 60.0}
DIED = "died"

context = multiprocessing.get_context("spawn")


def late(value: float, numel: int = 1 << 20) -> torch.Tensor:
    """Return a tensor that the current stream fills some hundredths of a second from now."""
    tensor = torch.zeros(numel, device="cuda")
    torch.cuda._sleep(50_000_000)
    return tensor.fill_(value)


def run_on_gpu(
    world_size: int,
    body: Callable[..., Any],
    directory: Path,
    *arguments: Any,
    **options: Any,
) -> list[Any]:
    """Call ``body(pg, *arguments)`` on each rank; return the result of each, `DIED` if its process ended.

    Args:
        world_size: How many ranks.
        body: Runs on each.
        directory: A new one.
        arguments: For the body.
        options: Of `dist2.new_group`, beside those in `GROUP` or in their place.

    Raises:
        AssertionError: A rank raised, or has sent nothing for `LIMIT_S`.
    """
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        given = (theirs, body, arguments, str(directory / "store"), rank, world_size, options)
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(waiting), LIMIT_S)
        assert ready, f"stuck: ranks {sorted(waiting.values())}; the others said {answers}"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answers[waiting[pipe]] = pipe.recv()
            except EOFError:
                answers[waiting[pipe]] = (True, DIED)
    failed = {rank: text for rank, (good, text) in answers.items() if not good}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return [answers[rank][1] for rank in range(len(pipes))]


def _serve(
    pipe: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    path: str,
    rank: int,
    world_size: int,
    options: dict[str, Any],
) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 10)  # of a rank that is stuck
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"dist2-{rank}")
    answer: tuple[bool, Any]
    try:
        store = dist2.FileStore(path, world_size)
        members = {"store": store, "rank": rank, "world_size": world_size}
        pg: ProcessGroup = dist2.new_group(**GROUP | members | options)
        answer = True, body(pg, *arguments)
        pg.shutdown()
    except BaseException:  # noqa: BLE001 - reported to the test
        answer = False, traceback.format_exc()
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # a device that hangs is not to hold up the test
