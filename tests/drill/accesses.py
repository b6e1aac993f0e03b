"""A rank is stopped right before it accesses another rank's memory, whose call raises meanwhile.

Then that memory belongs to its caller again. The stopped rank, once it continues, writes nothing there, and
does not return the bytes that it reads there as a result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs
import torch

from dist2 import Dist2Error, ProcessGroup
from drill.stage import Stage
from drill.tracing import Stopper

NUMEL = 1 << 17
WARM_UPS = 3
REUSED = -2.0
"""The value that callers write to their tensors after their call has raised."""

Access = Callable[[ProcessGroup, torch.Tensor, torch.Tensor], None]


def _all_reduce(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    pg.all_reduce(taken)


def _reduce(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    pg.reduce(taken, 0)


def _broadcast(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    pg.broadcast(taken, 0)


def _gather(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    parts = list(taken.split(NUMEL // 2)) if pg.rank() == 0 else []
    pg.gather(parts, given[: NUMEL // 2], root=0)


def _scatter(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    parts = list(given.split(NUMEL // 2)) if pg.rank() == 0 else []
    pg.scatter(taken[: NUMEL // 2], parts, root=0)


def _all_gather(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    pg.all_gather_single(taken, given[: NUMEL // 2])


def _reduce_scatter(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    pg.reduce_scatter_single(taken[: NUMEL // 2], given)


def _all_to_all(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    pg.all_to_all_single(taken, given)


def _send(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    if pg.rank() == 0:
        pg.send(given, 1)
    else:
        pg.recv(taken, 0)


def _isend(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    work = pg.isend(given, 1) if pg.rank() == 0 else pg.irecv(taken, 0)
    work.wait()


ACCESSES: dict[str, Access] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "isend": _isend,
}

_GIVERS = {("reduce", 1), ("broadcast", 0), ("gather", 1), ("scatter", 0), ("send", 0), ("isend", 0)}


@attrs.frozen
class AccessCell:
    """One rank is stopped before an access.

    Attributes:
        operation: A key of `ACCESSES`.
        victim: The stopped rank.
        moment: Number of the access before which it is stopped.
        roles: Number of ranks.
        timeout_s: Limit of an operation.
    """

    operation: str
    victim: int
    moment: int = 1
    roles: int = 2
    timeout_s: float = 0.5

    def __str__(self) -> str:
        return f"{self.operation}-access-{self.moment}-of-{self.victim}"

    @property
    def dies(self) -> frozenset[int]:
        return frozenset()

    @property
    def reaches(self) -> bool:
        """Whether the victim reads anything: else all goes well, and would not if it wrote."""
        return (self.operation, self.victim) not in _GIVERS

    def play(self, stage: Stage) -> None:
        """Be stopped, or stop the other and look after the own tensors."""
        pg = stage.group(self.roles, algorithm="single_copy")
        given, taken = torch.ones(NUMEL), torch.ones(NUMEL)
        call = ACCESSES[self.operation]
        for _ in range(WARM_UPS):
            call(pg, given, taken)
        (self._be_stopped if stage.role == self.victim else self._stop)(stage, pg, given, taken)

    def _be_stopped(self, stage: Stage, pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
        stage.tell_number("thread", threading.get_native_id())
        stage.hear("watched")
        try:
            ACCESSES[self.operation](pg, given, taken)
            reused = int((taken == REUSED).sum())
            assert not reused, f"{reused} elements of the result are what was read after the other's call"
        except Dist2Error as error:
            stage.note(f"{type(error).__name__}: {error}")
        stage.tell("ended")
        stage.hear("looked")

    def _stop(self, stage: Stage, pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
        stopper = Stopper(stage.number("thread"), self.moment)
        stage.tell("watched")
        try:
            ACCESSES[self.operation](pg, given, taken)
        except Dist2Error as error:
            stage.note(f"{type(error).__name__}: {error}")
            given.fill_(REUSED)
            taken.fill_(REUSED)
        else:
            assert not stopper.holds, "the call has ended well, though the other has not read yet"
            assert not self.reaches, "the other was not stopped"
            given = taken = torch.tensor(REUSED)
        stopper.let_go()
        stopper.join()
        stage.hear("ended")
        written = int((given != REUSED).sum()) + int((taken != REUSED).sum())
        stage.tell("looked")
        assert not written, f"{written} elements were written after the call has raised"


ACCESS_CELLS = (
    *(AccessCell(operation, victim) for operation in ACCESSES for victim in (0, 1)),
    AccessCell("all_reduce", 0, 2),
    AccessCell("all_reduce", 1, 2),
)
