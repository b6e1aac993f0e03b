"""Collectives of objects, over every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist2 import InvalidUsageError, ProcessGroup
from dist2.testing.ranks import BackendCase

__all__ = [
    "test_an_object_that_cannot_travel_raises_on_all_who_wait_for_it",
    "test_bad_arguments_raise_before_anything_is_sent",
    "test_messages_of_objects",
    "test_metrics_of_numpys_numbers_are_gathered_without_pickle",
    "test_objects_reach_whom_they_are_for",
    "test_pickles_where_all_ranks_allow_them",
]


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value


def thing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "x" * 1000 * rank, "pair": (rank, {rank})}


@pytest.mark.parametrize("world_size", [1, 3])
def test_objects_reach_whom_they_are_for(tenant: BackendCase, world_size: int) -> None:
    everything = [thing(rank) for rank in range(world_size)]
    last = world_size - 1

    def body(pg: ProcessGroup) -> None:
        mine, rank = thing(pg.rank()), pg.rank()
        assert pg.all_gather_object(mine) == everything
        assert pg.gather_object(mine, last) == (everything if rank == last else None)
        assert pg.broadcast_object(mine if rank == last else None, last) == everything[last]
        assert pg.scatter_object(everything if rank == last else None, last) == mine
        state = pg.broadcast_object({"weight": torch.arange(3.0)} if rank == 0 else None)
        assert state["weight"].tolist() == [0.0, 1.0, 2.0]

    tenant.run(world_size, body)


def test_metrics_of_numpys_numbers_are_gathered_without_pickle(tenant: BackendCase) -> None:
    numpy = pytest.importorskip("numpy")

    def metrics(rank: int) -> dict[str, Any]:
        return {"loss": numpy.float32(rank / 4), "seen": numpy.int64(rank), "hits": numpy.arange(rank + 1)}

    def body(pg: ProcessGroup) -> None:
        for rank, found in enumerate(pg.all_gather_object(metrics(pg.rank()))):
            assert (found["loss"], found["seen"]) == (rank / 4, rank)
            assert (type(found["loss"]), type(found["seen"])) == (numpy.float32, numpy.int64)
            assert found["hits"].tolist() == list(range(rank + 1))

    tenant.run(2, body)


def test_messages_of_objects(tenant: BackendCase) -> None:
    if tenant.backend == "nccl":
        pytest.skip(
            "tensors without a tag from any rank: on GPUs those of objects are on the CPU, here they are not"
        )

    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            pg.send_object(thing(7), 1, tag=3)
            assert pg.recv_object() == ("back", 1)
        else:
            assert pg.recv_object(0, tag=3) == (thing(7), 0)
            pg.send_object("back", 0)

    tenant.run(2, body)


def test_an_object_that_cannot_travel_raises_on_all_who_wait_for_it(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        bad = pg.rank() == 1
        whose = "obj cannot travel safely: type Custom" if bad else "the object of rank 1 was not sent"
        obj = Custom(1) if bad else pg.rank()
        with pytest.raises(InvalidUsageError, match=whose):
            pg.all_gather_object(obj)
        with pytest.raises(InvalidUsageError, match=whose):
            pg.broadcast_object(obj, 1)
        if pg.rank() in (0, 1):
            with pytest.raises(InvalidUsageError, match=whose):
                pg.gather_object(obj)
        else:
            assert pg.gather_object(obj) is None
        given = [0, 1, Custom(2)] if bad else None
        if pg.rank() == 0:
            assert pg.scatter_object(given, 1) == 0
        else:
            with pytest.raises(InvalidUsageError, match="type Custom"):
                pg.scatter_object(given, 1)
        if bad:
            with pytest.raises(InvalidUsageError, match="type Custom"):
                pg.send_object(obj, 0)  # nothing is sent: rank 0 does not wait
        assert pg.all_gather_object(pg.rank()) == [0, 1, 2]  # the group goes on

    tenant.run(3, body)


def test_pickles_where_all_ranks_allow_them(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        found = pg.all_gather_object(Custom(pg.rank()), allow_pickle=True)
        assert [each.value for each in found] == [0, 1]
        if pg.rank() == 0:
            pg.send_object(Custom(5), 1, allow_pickle=True)
        else:
            with pytest.raises(InvalidUsageError, match="rank 0 was pickled"):
                pg.recv_object(0)

    tenant.run(2, body)


def test_bad_arguments_raise_before_anything_is_sent(tenant: BackendCase) -> None:
    def body(pg: ProcessGroup) -> None:
        with pytest.raises(InvalidUsageError, match="root must be"):
            pg.broadcast_object(1, 2)
        with pytest.raises(InvalidUsageError, match="root must be"):
            pg.gather_object(1, -1)
        for objects in ([1], [1, 2, 3], None, "ab"):
            with pytest.raises(InvalidUsageError, match="objects must be a list of 2 at the root"):
                pg.scatter_object(objects, pg.rank())

    tenant.run(2, body)
