"""The outputs of a failed operation hold nothing that looks like a result. Real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import torch
from support.processes import DIED, Crew, caught, run_processes

from dist2 import (
    Dist2Error,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
    Work,
    shared_empty,
)

RANKS = 3
ODD = 1  # the rank that does not do as the others
SMALL, LARGE = 6, 3 << 17  # elements a rank: the large ones are read and written across processes


@attrs.frozen
class Case:
    """One call.

    Attributes:
        call: Runs it.
        written: The tensors that it writes.
        read: The tensors that it must not change.
    """

    call: Callable[[], object]
    written: list[torch.Tensor]
    read: list[torch.Tensor]


Make = Callable[[ProcessGroup, Callable[[int], torch.Tensor], int], Case]


def _all_reduce(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensor = new(numel)
    return Case(lambda: pg.all_reduce(tensor), [tensor], [])


def _all_reduce_async(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    issued: list[torch.Tensor] = []

    def call() -> None:
        works = []
        try:
            for tensor in (new(numel), new(numel)):
                works.append(pg.all_reduce(tensor, async_op=True))
                issued.append(tensor)
        finally:  # the group may have failed meanwhile, and refuse the second
            for error in [work.exception() for work in works if not _ends_well(work)]:
                raise error

    return Case(call, issued, [])


def _ends_well(work: Work) -> bool:
    with suppress(Dist2Error):
        work.wait()
    return work.is_success()


def _all_reduce_coalesced(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensors = [new(numel), new(3)]
    return Case(lambda: pg.all_reduce_coalesced(tensors), tensors, [])


def _strided(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensor = new(2 * numel)[::2]
    return Case(lambda: pg.all_reduce(tensor), [tensor], [])


def _broadcast(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensor = new(numel)
    at_root = pg.rank() == 0
    return Case(lambda: pg.broadcast(tensor, 0), [] if at_root else [tensor], [tensor] if at_root else [])


def _reduce(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensor = new(numel)
    at_root = pg.rank() == 0
    return Case(lambda: pg.reduce(tensor, 0), [tensor] if at_root else [], [] if at_root else [tensor])


def _all_gather(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    outputs, mine = [new(numel) for _ in range(pg.size())], new(numel)
    return Case(lambda: pg.all_gather(outputs, mine), outputs, [mine])


def _all_gather_in_place(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    output = new(numel * pg.size())
    parts = list(output.split(numel))
    mine = parts.pop(pg.rank())
    return Case(lambda: pg.all_gather_single(output, mine), parts, [mine])


def _reduce_scatter(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    output, mine = new(numel), new(numel * pg.size())
    return Case(lambda: pg.reduce_scatter_single(output, mine), [output], [mine])


def _gather(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    outputs, mine = [new(numel) for _ in range(pg.size())] if pg.rank() == 0 else [], new(numel)
    return Case(lambda: pg.gather(outputs, mine, 0), outputs, [mine])


def _scatter(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    output, inputs = new(numel), [new(numel) for _ in range(pg.size())] if pg.rank() == 0 else []
    return Case(lambda: pg.scatter(output, inputs, 0), [output], inputs)


def _all_to_all(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    output, mine = new(numel * pg.size()), new(numel * pg.size())
    return Case(lambda: pg.all_to_all_single(output, mine), [output], [mine])


def _recv(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensor = new(numel)
    return Case(lambda: pg.recv(tensor, ODD), [tensor], [])


def _irecv(pg: ProcessGroup, new: Callable[[int], torch.Tensor], numel: int) -> Case:
    tensor = new(numel)
    return Case(lambda: pg.irecv(tensor, ODD).wait(), [tensor], [])


COLLECTIVES: dict[str, Make] = {
    "all_reduce": _all_reduce,
    "all_reduce_async": _all_reduce_async,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "strided": _strided,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_in_place": _all_gather_in_place,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
MESSAGES: dict[str, Make] = {"recv": _recv, "irecv": _irecv}
MAKES = COLLECTIVES | MESSAGES


def _own(numel: int) -> torch.Tensor:
    return torch.full((numel,), 5.0)


def _shared(numel: int) -> torch.Tensor:
    return shared_empty(numel).fill_(5.0)


def _outcome(case: Case, kind: type[Dist2Error]) -> str:
    """Make the call, and describe its tensors afterwards."""
    try:
        case.call()
    except kind:
        outcome = "failed"
        assert all(torch.isnan(each).all() for each in case.written), case.written
    else:
        outcome = "ended well"
        assert not any(torch.isnan(each).any() for each in case.written), case.written
    assert all((each == 5).all() for each in case.read), case.read
    return outcome


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(RANKS, tmp_path_factory.mktemp("crew"))
    yield made
    made.close()


def _mistaken(pg: ProcessGroup, name: str, numel: int, shared: bool) -> str:
    pg.barrier()
    case = MAKES[name](pg, _shared if shared else _own, numel)
    wrong = Case(lambda: pg.all_reduce(torch.ones(3, dtype=torch.int16)), [], [])
    if name in MESSAGES:
        wrong = Case(lambda: [pg.send(torch.ones(3), rank) for rank in (0, 2)], [], [])
    outcome = _outcome(wrong if pg.rank() == ODD else case, MismatchError)
    if outcome == "ended well":  # it had done its part, and stays until it gets the error
        caught(MismatchError, pg.barrier)
    return outcome


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("name", MAKES)
def test_a_mismatch_leaves_nothing_that_looks_like_a_result(
    crew: Crew, name: str, numel: int, transport: str
) -> None:
    for shared in {False, transport == "shm" and numel == LARGE}:
        outcomes = crew.run(_mistaken, name, numel, shared, transport=transport)
        assert "failed" in outcomes


def _waiting(pg: ProcessGroup, name: str, numel: int, fault: str) -> str:
    pg.barrier()
    if fault == "timeout":
        pg.set_timeout(0.2)
    case = MAKES[name](pg, _own, numel)
    if pg.rank() != ODD:
        return _outcome(case, Dist2Error)
    if fault == "revoke":
        time.sleep(0.1)
        pg.revoke()
    elif fault == "abort":
        threading.Timer(0.1, pg.abort).start()
        return _outcome(MAKES["all_gather"](pg, _own, numel + 1), Dist2Error)
    return "failed"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("fault", ["timeout", "revoke", "abort"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "irecv"])
def test_nor_does_any_other_failure(crew: Crew, name: str, fault: str, transport: str) -> None:
    for numel in (SMALL, LARGE):
        outcomes = crew.run(_waiting, name, numel, fault, transport=transport)
        assert name == "broadcast" or "failed" in [each for rank, each in enumerate(outcomes) if rank != ODD]


def _bereaved(pg: ProcessGroup, name: str) -> str:
    case = MAKES[name](pg, _own, LARGE)
    pg.barrier()
    if pg.rank() == ODD:
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(10_000):
        if _outcome(case, PeerLostError) == "failed":
            return "failed"
        for each in case.written:
            each.fill_(5)
    return "nobody died"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_who_is_bereaved_in_the_middle_is_left_with_nothing(
    name: str, transport: str, tmp_path: Path
) -> None:
    results = run_processes(RANKS, _bereaved, tmp_path, name, transport=transport)
    assert results[ODD] is DIED
    assert [each for rank, each in enumerate(results) if rank != ODD] == ["failed"] * (RANKS - 1)


# Each dtype has a mark of its own


def _of_dtype(pg: ProcessGroup, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.ones(4, dtype=dtype)
    if pg.rank() == 0:
        with pytest.raises(Dist2Error):  # its limit passes, or the others are gone already
            pg.broadcast(tensor, 1, timeout=0.05)
    return tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_floating_dtypes_are_marked(crew: Crew, dtype: torch.dtype) -> None:
    tensor = crew.run(_of_dtype, dtype)[0]
    assert torch.isnan(tensor if dtype.is_complex else tensor.float()).all()


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int64, -(1 << 63)), (torch.uint8, 255), (torch.bool, False)]
)
def test_others_have_the_value_that_is_least_often_a_result(
    crew: Crew, dtype: torch.dtype, value: int
) -> None:
    assert crew.run(_of_dtype, dtype)[0].tolist() == [value] * 4


def _refused(pg: ProcessGroup) -> torch.Tensor:
    tensor = torch.ones(4)
    for call in (lambda: pg.recv(torch.ones(1), pg.rank(), timeout=0.01), lambda: pg.all_reduce(tensor)):
        with pytest.raises(OperationTimeoutError):
            call()
    return tensor


def test_a_call_that_is_refused_touches_nothing(crew: Crew) -> None:
    for tensor in crew.run(_refused):
        assert torch.equal(tensor, torch.ones(4))
