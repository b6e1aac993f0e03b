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


def _send(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    if pg.rank() == 0:
        pg.send(given, 1)
    else:
        pg.recv(taken, 0)


def _isend(pg: ProcessGroup, given: torch.Tensor, taken: torch.Tensor) -> None:
    work = pg.isend(given, 1) if pg.rank() == 0 else pg.irecv(taken, 0)
    work.wait()


ACCESSES: dict[str, Access] = {
    "send": _send,
    "isend": _isend,
}

_GIVERS = {("send", 0), ("isend", 0)}


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
        pg = stage.group(self.roles)
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


ACCESS_CELLS = tuple([AccessCell(operation, victim) for operation in ACCESSES for victim in (0, 1)])
