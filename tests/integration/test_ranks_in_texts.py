"""Errors of a subgroup name the ranks of the job: every kind of failure, on ranks 1 and 2 of 3."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.processes import DIED, Crew, caught, hear, run_processes, tell
from support.rank_texts import misnamed

from dist2 import (
    Dist2Error,
    GroupRevokedError,
    HashStore,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
)

TP, MEMBERS = "tp", (1, 2)
CULPRIT = 1
SHORT_S = 0.3
Act = Callable[[ProcessGroup], object]


@attrs.frozen
class Kind:
    """A way to fail.

    Attributes:
        error: The error of the rank that is no culprit.
        call: Its call.
        deed: The culprit's act before that.
        says: Words in the message.
        field: The field of the error that has the job's rank of the culprit.
        waits: Whether the deed is done before the call.
    """

    error: type[Dist2Error]
    call: Act
    deed: Act
    says: str
    field: str = ""
    waits: bool = True


def _nothing(tp: ProcessGroup) -> None:
    """Do not come."""


def _reduce(tp: ProcessGroup) -> object:
    return tp.all_reduce(torch.ones(4), timeout=5)


def _leave_by_an_error(tp: ProcessGroup) -> None:
    tp.barrier()
    with pytest.raises(ZeroDivisionError), tp:
        raise ZeroDivisionError("no data")


def _after_a_barrier(act: Act) -> Act:
    def acted(tp: ProcessGroup) -> object:
        tp.barrier()
        return act(tp)

    return acted


def _swallow(act: Act) -> Act:
    def acted(tp: ProcessGroup) -> str:
        try:
            act(tp)
        except Dist2Error as error:
            return str(error)
        return ""

    return acted


def _recv(tp: ProcessGroup) -> object:
    return tp.recv(torch.empty(1), src=1, timeout=SHORT_S)


KINDS = {
    "missing": Kind(
        OperationTimeoutError,
        lambda tp: tp.all_reduce(torch.ones(4), timeout=SHORT_S),
        _nothing,
        "rank 2 (rank 1 of tp",
        "global_missing",
    ),
    "no message": Kind(OperationTimeoutError, _recv, _nothing, "peer=1", "global_missing"),
    "no vote": Kind(
        OperationTimeoutError,
        lambda tp: tp.agree(timeout=SHORT_S),
        _nothing,
        "did not arrive",
        "global_missing",
    ),
    "monitored": Kind(
        OperationTimeoutError,
        lambda tp: tp.monitored_barrier(timeout=SHORT_S),
        _nothing,
        "did not arrive",
        "global_missing",
    ),
    "no merge": Kind(
        OperationTimeoutError,
        lambda tp: tp.merge_remote_group(HashStore(), 2, timeout=SHORT_S),
        _nothing,
        "did not",
        "global_missing",
    ),
    "operations differ": Kind(
        MismatchError, _reduce, _swallow(lambda tp: tp.barrier()), "operation differs: rank", waits=False
    ),
    "roots differ": Kind(
        MismatchError,
        lambda tp: tp.broadcast(torch.ones(2), root=1, timeout=5),
        _swallow(lambda tp: tp.broadcast(torch.ones(2), root=0, timeout=5)),
        "root differs: rank",
        waits=False,
    ),
    "messages differ": Kind(
        MismatchError,
        lambda tp: tp.recv(torch.empty(3), src=1, timeout=5),
        _swallow(lambda tp: tp.send(torch.ones(2, dtype=torch.float64), dst=0, timeout=5)),
        "differs: rank",
        waits=False,
    ),
    "shrink and agree": Kind(
        MismatchError,
        lambda tp: tp.agree(timeout=5),
        _swallow(lambda tp: tp.shrink(timeout=5)),
        "operation differs: rank",
        waits=False,
    ),
    "left": Kind(
        PeerLostError,
        _after_a_barrier(_reduce),
        _after_a_barrier(lambda tp: tp.shutdown()),
        "left the group",
        "global_ranks",
        waits=False,
    ),
    "raised": Kind(
        PeerLostError,
        _after_a_barrier(_reduce),
        _leave_by_an_error,
        "aborted the group (ZeroDivisionError: no data)",
        "global_ranks",
        waits=False,
    ),
    "revoked": Kind(
        GroupRevokedError, _reduce, lambda tp: tp.revoke(), "was revoked by rank", "global_by", waits=False
    ),
    "bad object": Kind(
        InvalidUsageError,
        lambda tp: tp.all_gather_object(1),
        _swallow(lambda tp: tp.all_gather_object(object())),
        "the object of rank",
        waits=False,
    ),
    "sparse shapes": Kind(
        InvalidUsageError,
        lambda tp: tp.all_reduce(torch.ones(2, 2).to_sparse()),
        _swallow(lambda tp: tp.all_reduce(torch.ones(2, 3).to_sparse())),
        "has (2, 3)",
        waits=False,
    ),
    "excludes itself": Kind(
        InvalidUsageError, lambda tp: tp.shrink(exclude=[tp.rank()]), _nothing, "exclude names the calling"
    ),
}


def _fail(pg: ProcessGroup, name: str) -> tuple[Any, ...] | str | None:
    """Return the texts of the errors of the rank that is no culprit, and the fields of the first."""
    tp = pg.split(MEMBERS, name=TP)
    if tp is None:
        hear(pg, "told")
        return None
    try:
        return _do(pg, tp, KINDS[name]) if tp.rank() == CULPRIT else _meet(pg, tp, KINDS[name])
    finally:
        tp.abort()


def _do(pg: ProcessGroup, tp: ProcessGroup, kind: Kind) -> str | None:
    said = kind.deed(tp)
    tell(pg, "done")
    hear(pg, "told")
    return said if isinstance(said, str) else None


def _meet(pg: ProcessGroup, tp: ProcessGroup, kind: Kind) -> tuple[Any, ...]:
    if kind.waits:
        hear(pg, "done")
    try:
        error, _ = caught(kind.error, lambda: kind.call(tp))
        texts = [str(error)]
        if not error.group_usable and tp.get_error() is not None:
            again, _ = caught(Dist2Error, tp.barrier)
            texts.append(str(again))
    finally:
        tell(pg, "told")
    job = getattr(error, kind.field) if kind.field else None
    return texts, job, error.rank, error.global_rank, error.members


@pytest.fixture(params=["shm", "tcp"], scope="module")
def crew(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield processes, and the transport of their groups."""
    crew = Crew(3, tmp_path_factory.mktemp("stores"))
    try:
        yield crew, request.param
    finally:
        crew.close()


@pytest.mark.parametrize("name", KINDS)
def test_an_error_names_the_ranks_of_the_job(crew: tuple[Crew, str], name: str) -> None:
    crowd, transport = crew
    _, (texts, job, rank, global_rank, members), culprit = crowd.run(_fail, name, transport=transport)
    for text in [*texts, *([culprit] if culprit else [])]:
        assert not misnamed(text, TP, MEMBERS), text
    assert KINDS[name].says in texts[0], texts
    if KINDS[name].error is not InvalidUsageError:
        assert (rank, global_rank, members) == (0, 1, MEMBERS), texts
    assert job in (None, 2, (2,)), texts


def _die(pg: ProcessGroup) -> tuple[list[str], tuple[int, ...], int] | None:
    tp = pg.split(MEMBERS, name=TP)
    if tp is None:
        hear(pg, "told")
        return None
    tp.barrier()
    if tp.rank() == CULPRIT:
        tell(pg, f"pid {os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        error, _ = caught(PeerLostError, lambda: tp.all_reduce(torch.ones(4), timeout=10))
        again, _ = caught(PeerLostError, tp.barrier)
    finally:
        tell(pg, "told")
    return [str(error), str(again)], error.global_ranks, error.members[CULPRIT]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_death_names_the_rank_of_the_job(transport: str, tmp_path: Path) -> None:
    _, survivor, died = run_processes(3, _die, tmp_path, transport=transport)
    assert died is DIED
    texts, ranks, _ = survivor
    assert ranks == (2,)
    for text in texts:
        assert not misnamed(text, TP, MEMBERS), text
        assert "pid " in text
