"""Calls with arrays as type checkers see them: none is made. A missing error is an unused `ignore`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dist2 import ProcessGroup


class Exported:
    """An array of another library."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise NotImplementedError


def arrays_that_operations_take(pg: ProcessGroup, x: np.ndarray[Any, Any], other: Exported) -> None:
    pg.all_reduce(x)
    pg.all_reduce(x[::2], async_op=True).wait()
    pg.broadcast(other, root=0)
    pg.reduce(other, 0)
    pg.all_reduce_coalesced([x, torch.ones(1), other])
    pg.all_gather([np.empty(2), np.empty(2)], x)
    pg.all_gather_v(np.split(x, 2), x)
    pg.all_gather_single(x, other)
    pg.reduce_scatter(x, [x, x])
    pg.reduce_scatter_single(x, other)
    pg.gather([x, x] if pg.rank() == 0 else None, other)
    pg.scatter(x, [other, other] if pg.rank() == 0 else None)
    pg.all_to_all([x, x], [x, x])
    pg.all_to_all_single(x, other)
    pg.send(x, 1)
    pg.recv(other, 0)
    pg.isend(x, 1).wait()
    pg.irecv(x, 0).wait()
    with pg.coalescing() as batch:
        pg.all_reduce(x)
    batch.wait()


def objects_that_they_refuse(pg: ProcessGroup) -> None:
    pg.all_reduce([1.0])  # type: ignore[arg-type]
    pg.all_gather_single("output", b"input")  # type: ignore[arg-type]
    pg.send(1.0, 1)  # type: ignore[arg-type]
