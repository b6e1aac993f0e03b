"""Errors that newcomers meet: each says the right spelling."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dist2
from dist2 import BackendUnavailableError, UnknownBackendError
from dist2.c10d.spellings import INSTEAD


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("all_reduce", r"method of a group: .*new_group\('socket'\), and call pg.all_reduce.*dist2.legacy"),
        (
            "init_process_group",
            r"make a group, pg = dist2.new_group\('socket'\); or .*import dist2.legacy as",
        ),
        ("get_world_size", "global API: import dist2.legacy as dist, and use dist.get_world_size"),
        ("all_gather_into_tensor", r"use dist.all_gather_into_tensor; of a group, pg.all_gather_single\("),
        ("nothing_of_the_kind", "no attribute 'nothing_of_the_kind'$"),
    ],
)
def test_names_of_torch_distributed_are_located(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(dist2, name)


def test_the_module_lists_its_public_names() -> None:
    on_demand = {"functional", "launch", "legacy", "torch_backend"}
    assert set(dir(dist2)) == {*dist2.__all__, *on_demand, "__version__"}
    assert all(hasattr(dist2, name) for name in dir(dist2))


def test_a_misspelt_backend_is_recognised() -> None:
    with pytest.raises(UnknownBackendError, match=r"did you mean 'socket'\?$"):
        dist2.new_group("scoket", store=dist2.HashStore(), rank=0, world_size=1)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
@pytest.mark.parametrize("name", ["nccl", "cpu:socket,cuda:nccl"])
def test_a_backend_that_cannot_run_is_told_before_a_launcher_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(BackendUnavailableError, match="needs a build of torch for GPUs"):
        dist2.new_group(name)
    with pytest.raises(dist2.RendezvousError, match="RANK expected"):
        dist2.new_group("socket")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.float32(1), r"float32: .*; use torch.tensor\(...\) for numbers, or .*broadcast_object$"),
        ([1.0], r"(float|list): \[?1.0\]?; use torch.tensor\(...\) for numbers, or .*broadcast_object$"),
        (None, r"NoneType: None$"),
    ],
)
def test_objects_that_are_no_tensors_are_told_how_to_become_one(given: Any, words: str) -> None:
    with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        for call in (lambda: pg.all_reduce(given), lambda: pg.broadcast(given, root=0)):
            with pytest.raises(TypeError, match=words):
                call()


def test_names_of_torch_and_mpi_on_a_group_say_the_right_spelling() -> None:
    with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        with pytest.raises(AttributeError, match=r"no attribute 'world_size': use pg.size\(\)$"):
            pg.world_size  # type: ignore[attr-defined]  # noqa: B018
        for name, instead in INSTEAD.items():
            assert not hasattr(pg, name)
            assert re.match(r"\w+", instead).group() in dir(pg)


def test_a_group_lists_the_names_for_users() -> None:
    with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:
        assert {"all_reduce", "size", "global_ranks", "split", "shutdown", "timeout_s"} <= {*dir(pg)}
        assert not {"allreduce", "boxed", "getGroupName", "new_window", "spec", "backend", "NCCL"} & {
            *dir(pg)
        }
        assert not [name for name in dir(pg) if name.startswith("_") or not hasattr(pg, name)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at_url", [False, True])
def test_a_rank_that_two_threads_have_is_named(rank: int, at_url: bool, tmp_path: Path) -> None:
    place = {"init_method": f"file://{tmp_path}/place"} if at_url else {"store": dist2.HashStore()}
    errors = []

    def join() -> None:
        with pytest.raises(dist2.RendezvousError) as caught:
            dist2.new_group("socket", timeout=30, rank=rank, world_size=2, **place)
        errors.append(str(caught.value))

    threads = [threading.Thread(target=join) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    for error in errors:
        assert f"rank {rank} was started twice: by two threads of process {os.getpid()}" in error
