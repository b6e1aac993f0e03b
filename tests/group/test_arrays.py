"""Arrays of other libraries as arguments of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import TENANTS, Tenant, run_ranks

import dist2
from dist2 import InvalidUsageError, ProcessGroup

INPROC = TENANTS[0]


class Exported:
    """An array of a library that shares nothing with numpy but DLPack, and may be read-only."""

    def __init__(self, array: Any, read_only: bool = False) -> None:
        self.array = array
        self.read_only = read_only
        self.strides = array.strides

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        view = self.array.view()
        view.flags.writeable = not self.read_only
        return view


def filled(pg: ProcessGroup, *shape: int) -> Any:
    return np.full(shape, pg.rank() + 1.0, dtype=np.float32)


def empties(*shape: int) -> list[Any]:
    return [np.zeros(shape, dtype=np.float32) for _ in range(2)]


@pytest.mark.parametrize("tenant", TENANTS, ids=str)
def test_arrays_are_read_and_written_in_place(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        mine, other, root = filled(pg, 2), np.zeros(2, np.float32), pg.rank() == 0
        x = filled(pg, 2)
        pg.all_reduce(x)
        assert x.tolist() == [3, 3]
        pg.all_reduce(x[::2], async_op=True).wait()  # a view with strides
        assert x.tolist() == [6, 3]
        pg.all_reduce(torch.from_numpy(x))  # its plan is found, and tensors and arrays mix
        assert x.tolist() == [12, 6]
        pg.broadcast(x, root=1)
        pg.reduce(x, root=0)
        assert x.tolist() == ([24, 12] if root else [12, 6])
        parts = empties(2)
        pg.all_gather(parts, mine)
        assert [part.tolist() for part in parts] == [[1, 1], [2, 2]]
        whole = np.zeros((2, 2), np.float32)
        pg.all_gather_single(whole, mine)
        assert whole.tolist() == [[1, 1], [2, 2]]
        pg.reduce_scatter_single(other, whole)
        assert other.tolist() == ([2, 2] if root else [4, 4])
        pg.reduce_scatter(other, [mine, mine])
        assert other.tolist() == [3, 3]
        pg.gather(parts if root else None, other)
        pg.scatter(other, [mine, 2 * mine] if root else None)
        assert other.tolist() == ([1, 1] if root else [2, 2])
        pg.all_to_all(parts, [mine, mine])
        assert [part.tolist() for part in parts] == [[1, 1], [2, 2]]
        pg.all_to_all_single(other, mine)
        assert other.tolist() == [1, 2]

    run_ranks(2, body, tenant)


def test_the_other_operations_take_arrays() -> None:
    def body(pg: ProcessGroup) -> None:
        mine, other = filled(pg, 2), np.zeros(2, np.float32)
        first, second = filled(pg, 1), np.ones(3, np.int64)
        pg.all_reduce_coalesced([first, second])
        assert (first.tolist(), second.tolist()) == ([3], [2, 2, 2])
        parts = np.split(np.zeros(3, np.float32), np.cumsum([1, 2])[:-1])
        pg.all_gather_v(parts, filled(pg, pg.rank() + 1))
        assert [part.tolist() for part in parts] == [[1], [2, 2]]
        pg.reduce_scatter_v(parts[pg.rank()], [np.ones(1, np.float32), np.ones(2, np.float32)])
        assert set(parts[pg.rank()].tolist()) == {2}
        outputs = [np.zeros(4, np.float32)]
        pg.all_gather_single_coalesced(outputs, [mine])
        assert outputs[0].tolist() == [1, 1, 2, 2]
        pg.reduce_scatter_single_coalesced([other], outputs)
        assert other.tolist() == ([2, 2] if pg.rank() == 0 else [4, 4])
        works = [pg.isend(mine, 1 - pg.rank()), pg.irecv(other, 1 - pg.rank())]
        assert all(work.wait() for work in works)
        assert other.tolist() == [2 - pg.rank()] * 2
        flags = np.array([pg.rank() == 0])
        pg.all_reduce(flags, dist2.ReduceOp.BOR)
        assert flags.tolist() == [True]

    run_ranks(2, body, INPROC)


def test_plans_are_found_again() -> None:
    def body(pg: ProcessGroup) -> None:
        planned: list[Any] = []
        for name in ("plan", "plan_plain"):
            prepare = getattr(pg.backend, name)
            setattr(
                pg.backend, name, lambda signature, prepare=prepare: planned.append(1) or prepare(signature)
            )
        for _ in range(3):
            pg.all_reduce(filled(pg, 2))
            pg.send(filled(pg, 2), pg.rank())
            pg.recv(filled(pg, 2), pg.rank())
        assert len(planned) == 3

    run_ranks(2, body, INPROC)


def test_arrays_of_any_library_by_dlpack() -> None:
    def body(pg: ProcessGroup) -> None:
        x = filled(pg, 2)
        pg.all_reduce(Exported(x))
        assert x.tolist() == [3, 3]
        pg.all_gather_single(np.zeros(4, np.float32), Exported(x, read_only=True))
        with pytest.raises(InvalidUsageError, match=r"tensor is a read-only array \(Exported\)"):
            pg.all_reduce(Exported(x, read_only=True))

    run_ranks(2, body, INPROC)


def test_a_read_only_array_is_read_and_never_written() -> None:
    def body(pg: ProcessGroup) -> None:
        fixed = filled(pg, 2)
        fixed.flags.writeable = False
        calls: list[Callable[[], object]] = [
            lambda: pg.all_reduce(fixed),
            lambda: pg.broadcast(fixed, root=1 - pg.rank()),
            lambda: pg.reduce(fixed, root=pg.rank()),
            lambda: pg.all_gather([fixed, *empties(2)[1:]], np.zeros(2, np.float32)),
            lambda: pg.recv(fixed, 1 - pg.rank()),
        ]
        for call in calls:
            with pytest.raises(
                InvalidUsageError, match=r"is a read-only array \(ndarray\), and the operation"
            ):
                call()
        pg.broadcast(fixed if pg.rank() == 0 else np.zeros(2, np.float32), root=0)
        pg.send(fixed, pg.rank())
        got = np.zeros(2, np.float32)
        pg.recv(got, pg.rank())
        assert got.tolist() == fixed.tolist() == [pg.rank() + 1.0] * 2

    run_ranks(2, body, INPROC)


class OnDevice:
    """An array on a device that this process cannot reach, as cupy's without a GPU."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch reaches the device")
@pytest.mark.parametrize(("device", "name"), [(2, "CUDA"), (10, "ROCm"), (8, "DLPack's type 8")])
def test_arrays_on_a_device_that_torch_does_not_know_are_refused(device: int, name: str) -> None:
    with (
        dist2.new_group("fake", rank=0, world_size=2) as pg,
        pytest.raises(
            InvalidUsageError, match=rf"tensor is an array \(OnDevice\) .* on a device \({name}\): pass"
        ),
    ):
        pg.all_reduce(OnDevice(device))


def test_arrays_that_torch_cannot_take_are_refused() -> None:
    with dist2.new_group("fake", rank=0, world_size=2) as pg:
        for array in (np.ones(2)[::-1], np.ones(2, ">f4"), np.array(["a"]), np.array([object()])):
            with pytest.raises(
                InvalidUsageError, match=r"tensor is an array \(ndarray\) that torch cannot take \("
            ):
                pg.all_reduce(array)
        with pytest.raises(InvalidUsageError, match="a stride is negative"):
            pg.all_reduce(Exported(np.ones(2)[::-1]))
        with pytest.raises(InvalidUsageError, match=r"its mask would be lost\): pass its data"):
            pg.all_reduce(np.ma.masked_equal(np.ones(2), 1))
        with pytest.raises(InvalidUsageError, match=r"outputs\[1\] must be a torch.Tensor, got NoneType"):
            pg.all_gather([np.ones(2), None], np.ones(2))
