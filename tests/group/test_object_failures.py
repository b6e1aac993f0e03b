"""Object collectives that fail on one rank before or between their two steps: the others are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import caught
from support.raising_handlers import Interrupted
from support.ranks import Tenant, run_ranks
from support.time_limits import in_time
from torch import Tensor

from dist2 import GroupRevokedError, InvalidUsageError, ProcessGroup
from dist2.group import objects
from dist2.group.serialization import encode

TCP = Tenant("tcp", "socket", {"transport": "tcp"})
SHM = Tenant("shm", "socket", {"transport": "shm"})
TOLD_S = 2.0

CALLS: dict[str, Callable[[ProcessGroup], Any]] = {
    "all_gather_object": lambda pg: pg.all_gather_object("x" * 100_000),
    "broadcast_object": lambda pg: pg.broadcast_object("x" * 100_000, 0),
    "gather_object": lambda pg: pg.gather_object("x" * 100_000, 1),
    "scatter_object": lambda pg: pg.scatter_object(["x" * 100_000] * 2 if pg.rank() == 0 else None, 0),
}


@pytest.mark.parametrize("tenant", [SHM, TCP], ids=str)
@pytest.mark.parametrize("raised", [MemoryError, Interrupted], ids=lambda kind: kind.__name__)
def test_an_exception_between_the_steps_is_told(
    tenant: Tenant, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, failing = objects._buffer, threading.local()

    def buffer(size: int) -> Tensor:
        if size and getattr(failing, "fails", False):
            raise raised
        return make(size)

    monkeypatch.setattr(objects, "_buffer", buffer)

    def body(pg: ProcessGroup, call: Callable[[ProcessGroup], Any]) -> str:
        failing.fails = pg.rank() == 1
        if failing.fails:
            caught(raised, lambda: call(pg))
            failing.fails = False
        error, took_s = caught(GroupRevokedError, lambda: (call(pg), pg.barrier()))
        in_time(took_s, TOLD_S)
        assert pg.shrink().size() == 2
        return str(error)

    for name, call in CALLS.items():
        told = run_ranks(2, lambda pg, c=call: body(pg, c), tenant)[0]
        assert raised.__name__ in told, (name, told)


class _Unwilling:
    def __reduce__(self) -> tuple[Any, ...]:
        raise LookupError("no such state")


@pytest.mark.parametrize("call", ["all_gather_object", "gather_object"])
def test_whatever_pickling_raises_is_told(call: str) -> None:
    def body(pg: ProcessGroup) -> str:
        obj = _Unwilling() if pg.rank() == 1 else 7
        gather = getattr(pg, call)
        error, _ = caught(InvalidUsageError, lambda: gather(obj, allow_pickle=True))
        pg.barrier()
        return str(error)

    for text in run_ranks(2, body, SHM):
        assert "cannot be pickled: LookupError('no such state')" in text


def _missing() -> object:
    raise AttributeError("module 'model' has no attribute 'Layer'")


class _OnlyHere:
    """Can be pickled, but not unpickled: its class is missing there, say."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _missing, ()


def test_whatever_unpickling_raises_names_the_sender() -> None:
    def body(pg: ProcessGroup) -> None:
        words = r"the object of rank 1.* cannot be unpickled here: AttributeError\(.*'Layer'"
        obj = _OnlyHere() if pg.rank() == 1 else 7
        with pytest.raises(InvalidUsageError, match=words):
            pg.all_gather_object(obj, allow_pickle=True)
        if pg.rank() == 1:
            pg.send_object(obj, 0, allow_pickle=True)
        else:
            with pytest.raises(InvalidUsageError, match=words):
                pg.recv_object(allow_pickle=True)
        pg.barrier()

    run_ranks(2, body, SHM)


def test_memory_that_encoding_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.local()

    def scarce(obj: object, *, allow_pickle: bool) -> bytes:
        if getattr(failing, "fails", False):
            raise MemoryError
        return encode(obj, allow_pickle=allow_pickle)

    monkeypatch.setattr(objects, "encode", scarce)

    def body(pg: ProcessGroup) -> str:
        failing.fails = pg.rank() == 1
        kind: type[Exception] = MemoryError if failing.fails else InvalidUsageError
        error, _ = caught(kind, lambda: pg.all_gather_object(1))
        pg.barrier()
        return str(error)

    assert "the object of rank 1 was not sent: its rank lacks the memory" in run_ranks(2, body, SHM)[0]
