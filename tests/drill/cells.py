"""The cells of the drill: operation x phase x fault, and changes of membership."""

from __future__ import annotations

from pathlib import Path

import attrs

import dist2
from drill.crew import Note
from drill.faults import FAULTS, Scene
from drill.holdings import holdings, kept_since
from drill.membership import STORIES
from drill.stage import Stage


@attrs.frozen
class FaultCell:
    """One rank fails in one operation.

    Attributes:
        operation: A key of `OPERATIONS`.
        phase: ``before``, ``during`` or ``between``.
        fault: A key of `FAULTS`.
        victim: The failing rank.
        roles: Number of ranks.
        timeout_s: Limit of an operation.
    """

    operation: str
    phase: str
    fault: str
    victim: int = 1
    roles: int = 3

    def __str__(self) -> str:
        among = "" if self.roles == 3 else f"-among-{self.roles}"
        return f"{self.operation}-{self.phase}-{self.fault}-of-{self.victim}{among}"

    @property
    def timeout_s(self) -> float:
        return 0.25 if self.fault in ("sigstop", "timeout") else 5.0

    @property
    def dies(self) -> frozenset[int]:
        return frozenset([self.victim]) if FAULTS[self.fault].fatal else frozenset()

    def play(self, stage: Stage) -> float:
        return Scene(stage, self.operation, self.phase, self.fault, self.victim, self.roles).play()


@attrs.frozen
class StoryCell:
    """A change of the group's membership.

    Attributes:
        name: A key of `STORIES`.
        timeout_s: Limit of an operation.
    """

    name: str
    timeout_s: float = 5.0

    def __str__(self) -> str:
        return self.name

    @property
    def roles(self) -> int:
        return STORIES[self.name].roles

    @property
    def dies(self) -> frozenset[int]:
        return STORIES[self.name].dies

    def play(self, stage: Stage) -> float | None:
        STORIES[self.name].play(stage)
        return None


Cell = FaultCell | StoryCell


@attrs.frozen
class Performance:
    """A cell over one transport: the task of a crew.

    Attributes:
        cell: The cell.
        transport: ``tcp`` or ``shm``.
        path: File of the store.
    """

    cell: Cell
    transport: str
    path: Path

    def perform(self, role: int, note: Note) -> float | None:
        """Play one role, and check that it leaves nothing open; return when it got the error."""
        before = holdings()
        store = dist2.FileStore(str(self.path), self.cell.roles)
        stage = Stage(role, self.transport, self.cell.timeout_s, self.path, note, store)
        try:
            told_s = self.cell.play(stage)
        finally:
            stage.leave()
        del stage, store
        kept = kept_since(before)
        assert not kept, f"kept: {dict(kept)}"
        return told_s


STORY_CELLS = tuple(map(StoryCell, STORIES))

FAULT_CELLS = (
    FaultCell("all_reduce_small", "before", "sigkill"),
    FaultCell("all_reduce_small", "during", "sigkill", victim=0),
    FaultCell("all_reduce_small", "between", "sigkill", victim=2),
    FaultCell("all_reduce_small", "before", "sigstop"),
    FaultCell("all_reduce_small", "during", "sigstop"),
    FaultCell("all_reduce_small", "between", "sigstop", victim=0),
    FaultCell("all_reduce_small", "before", "abort"),
    FaultCell("all_reduce_small", "during", "abort", victim=0),
    FaultCell("all_reduce_small", "between", "abort"),
    FaultCell("all_reduce_small", "before", "mismatch"),
    FaultCell("all_reduce_small", "during", "mismatch", victim=0),
    FaultCell("all_reduce_small", "before", "timeout"),
    FaultCell("all_reduce_small", "during", "timeout", victim=2),
    FaultCell("all_reduce_small", "between", "exit"),
    FaultCell("all_reduce_small", "before", "revoke"),
    FaultCell("all_reduce_large", "before", "sigkill", victim=0),
    FaultCell("all_reduce_large", "during", "sigkill"),
    FaultCell("all_reduce_large", "between", "sigkill"),
    FaultCell("all_reduce_large", "during", "sigstop"),
    FaultCell("all_reduce_large", "before", "mismatch", victim=2),
    FaultCell("all_reduce_large", "during", "timeout"),
    FaultCell("all_reduce_large", "during", "exit", victim=0),
    FaultCell("all_reduce_large", "during", "revoke", victim=0),
    FaultCell("all_reduce_large", "during", "mismatch"),
    FaultCell("async_all_reduce", "before", "sigkill"),
    FaultCell("async_all_reduce", "during", "sigkill", victim=2),
    FaultCell("async_all_reduce", "between", "sigkill"),
    FaultCell("async_all_reduce", "during", "sigstop"),
    FaultCell("async_all_reduce", "before", "mismatch"),
    FaultCell("async_all_reduce", "during", "timeout"),
    FaultCell("async_all_reduce", "during", "revoke", victim=2),
    FaultCell("broadcast", "before", "sigkill", victim=0),
    FaultCell("broadcast", "during", "sigkill"),
    FaultCell("broadcast", "between", "sigkill", victim=2),
    FaultCell("broadcast", "before", "sigstop", victim=0),
    FaultCell("broadcast", "during", "mismatch"),
    FaultCell("broadcast", "before", "timeout", victim=0),
    FaultCell("broadcast", "before", "revoke", victim=2),
    FaultCell("all_to_all", "before", "sigkill"),
    FaultCell("all_to_all", "during", "sigkill", victim=0),
    FaultCell("all_to_all", "between", "abort"),
    FaultCell("all_to_all", "during", "mismatch"),
    FaultCell("all_to_all", "before", "timeout"),
    FaultCell("all_to_all", "during", "revoke"),
    FaultCell("barrier", "before", "sigkill"),
    FaultCell("barrier", "during", "sigkill", victim=0),
    FaultCell("barrier", "between", "exit"),
    FaultCell("barrier", "during", "sigstop"),
    FaultCell("barrier", "before", "abort"),
    FaultCell("barrier", "before", "mismatch"),
    FaultCell("barrier", "between", "revoke"),
    FaultCell("send_recv", "before", "sigkill"),
    FaultCell("send_recv", "during", "sigkill", victim=2),
    FaultCell("send_recv", "between", "sigkill"),
    FaultCell("send_recv", "during", "sigstop"),
    FaultCell("send_recv", "before", "abort"),
    FaultCell("send_recv", "before", "timeout"),
    FaultCell("send_recv", "during", "exit"),
    FaultCell("send_recv", "before", "revoke"),
    FaultCell("send_recv", "during", "revoke", victim=0),
    FaultCell("monitored_barrier", "before", "sigkill", victim=0),
    FaultCell("monitored_barrier", "during", "sigkill"),
    # Many ranks: some that exchange no messages with the dead one, and some that have issued and not waited
    # yet.
    FaultCell("pairs", "before", "sigkill", victim=3, roles=4),
    FaultCell("pairs", "during", "sigkill", victim=6, roles=8),
    FaultCell("async_pairs", "during", "sigkill", victim=5, roles=8),
    FaultCell("async_broadcast", "before", "sigkill", victim=7, roles=8),
    FaultCell("async_all_reduce", "during", "sigkill", roles=8),
)
