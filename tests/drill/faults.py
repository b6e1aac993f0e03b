"""One rank fails at one point of one operation; the others get its reason in time, and continue."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import attrs
from support.time_limits import in_time

from dist2 import (
    Dist2Error,
    GroupAbortedError,
    GroupRevokedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
)
from drill.operations import OPERATIONS, something_else, verify
from drill.stage import EVENT_S, Stage, others

ROUNDS = 3
"""How often an operation succeeds before a fault."""

INSIDE_S = 0.05
"""Callers that said they would call are inside the call by then."""

TOLD_S = 1.1
AGAIN_S = 0.5


def kill(pg: ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(pg: ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(pg: ProcessGroup) -> NoReturn:
    os._exit(0)  # a good exit code, and no group was closed


def abort(pg: ProcessGroup) -> None:
    pg.abort()


def revoke(pg: ProcessGroup) -> None:
    pg.revoke()


@attrs.frozen
class Fault:
    """One way to fail.

    Attributes:
        kind: The error of the others.
        commit: Called by the failing rank, on any thread; None: it makes no call, or another one.
        fatal: The process ends.
        member: It goes on with the others afterwards.
        own_kind: The error of the failing rank itself, if it lives.
    """

    kind: type[Dist2Error]
    commit: Callable[[ProcessGroup], None] | None
    fatal: bool = False
    member: bool = False
    own_kind: type[Dist2Error] = Dist2Error


FAULTS = {
    "sigkill": Fault(PeerLostError, kill, fatal=True),
    "exit": Fault(PeerLostError, leave, fatal=True),
    "sigstop": Fault(OperationTimeoutError, stop),
    "abort": Fault(PeerLostError, abort, own_kind=GroupAbortedError),
    "mismatch": Fault(MismatchError, None, member=True, own_kind=MismatchError),
    "revoke": Fault(GroupRevokedError, revoke, member=True, own_kind=GroupRevokedError),
    "timeout": Fault(OperationTimeoutError, None, member=True),
}


@attrs.frozen
class Scene:
    """One fault of one rank in one operation, as played by one role.

    Attributes:
        stage: Its stage.
        operation: A key of `OPERATIONS`.
        phase: ``before``: it does not come to the first call, where the others wait; ``during``: inside of
            one of many calls; ``between``: after some calls, while no rank is in a call.
        name: A key of `FAULTS`.
        victim: The failing rank.
        world_size: Number of ranks.
    """

    stage: Stage
    operation: str
    phase: str
    name: str
    victim: int
    world_size: int

    @property
    def fault(self) -> Fault:
        return FAULTS[self.name]

    def play(self) -> float:
        """Fail or survive, and continue; return the seconds until a survivor got the error."""
        pg = self.stage.group(self.world_size)
        told_s = (self._fail if self.stage.role == self.victim else self._survive)(pg)
        if self.fault.member or self.stage.role != self.victim:
            self._recover(pg)
        if self.name == "sigstop" and self.stage.role == min(others(self.victim, self.world_size)):
            os.kill(self.stage.pid(self.victim), signal.SIGCONT)
        return told_s

    # The failing rank

    def _fail(self, pg: ProcessGroup) -> float:
        call = OPERATIONS[self.operation]
        if self.phase == "before":
            self.stage.hear(*(f"inside/{rank}" for rank in others(self.victim, self.world_size)))
            time.sleep(INSIDE_S)
            self._commit(pg)
        else:
            for _ in range(ROUNDS):
                call(pg)
            if self.phase == "between":
                pg.barrier()
                self.stage.hear(*(f"between/{rank}" for rank in others(self.victim, self.world_size)))
                self._commit(pg)
            elif self.fault.commit is None:
                self._commit(pg)
            else:
                threading.Timer(INSIDE_S, self._commit, [pg]).start()
        error, _ = self.stage.first_error(lambda: call(pg))
        assert isinstance(error, self.fault.own_kind), repr(error)
        self.stage.first_error(lambda: call(pg))
        return 0.0

    def _commit(self, pg: ProcessGroup) -> None:
        self.stage.tell("committed")
        if self.fault.commit is not None:
            self.fault.commit(pg)
        elif self.name == "mismatch":
            try:
                something_else(pg)
            except MismatchError as error:
                self.stage.note(f"as it should: {error}")
        else:
            self.stage.hear(*(f"failed/{rank}" for rank in others(self.victim, self.world_size)))
        self.stage.tell("done")

    # The survivors

    def _survive(self, pg: ProcessGroup) -> float:
        call = OPERATIONS[self.operation]
        self.stage.tell(f"inside/{self.stage.role}")
        if self.phase == "between":
            for _ in range(ROUNDS):
                call(pg)
            pg.barrier()
            self.stage.tell(f"between/{self.stage.role}")  # a barrier ends on one rank before another
            self._wait_for_fault()
        start = time.monotonic()
        error, took_s = self.stage.first_error(lambda: call(pg))
        told_at = time.monotonic()
        self.stage.tell(f"failed/{self.stage.role}")
        assert isinstance(error, self.fault.kind), repr(error)
        told_s = told_at - max(start, self.stage.hear("committed"))
        self._judge(error, took_s, told_s)
        again, took_s = self.stage.first_error(lambda: call(pg))
        assert isinstance(again, self.fault.kind), repr(again)
        in_time(took_s, AGAIN_S)
        assert isinstance(pg.get_error(), self.fault.kind)
        return told_s

    def _wait_for_fault(self) -> None:
        if self.fault.fatal:
            self.stage.see_end(self.victim)
        elif self.name == "sigstop":
            self.stage.see_stop(self.victim)
        elif self.fault.commit is None:
            self.stage.hear("committed")
        else:
            self.stage.hear("done")

    def _judge(self, error: Dist2Error, took_s: float, told_s: float) -> None:
        """Check that an error was raised in time and names the failed ranks."""
        if isinstance(error, OperationTimeoutError):
            limit_s = self.stage.timeout_s
            assert limit_s <= took_s, took_s
            in_time(took_s, 1.1 * limit_s + 0.1)
            assert error.missing, str(error)
            return
        in_time(told_s, TOLD_S)
        if isinstance(error, PeerLostError):
            assert error.ranks == (self.victim,), str(error)
        if isinstance(error, GroupRevokedError):
            assert error.by in range(self.world_size), str(error)  # the revoking rank, or a reporting one
        if isinstance(error, MismatchError):
            assert self.victim in error.actual, str(error)

    # Afterwards

    def _recover(self, pg: ProcessGroup) -> None:
        if self.fault.member:
            left = pg.split(range(self.world_size), timeout=EVENT_S)
        elif self.name == "sigstop":  # it is not gone, so that it has to be named
            left = pg.shrink([self.victim], timeout=EVENT_S)
        else:
            answer = pg.agree(0b100 | 1 << self.stage.role % 2, timeout=EVENT_S)
            assert answer.failed == (self.victim,), answer
            both = len({role % 2 for role in others(self.victim, self.world_size)}) == 2
            assert both == (answer.flags == 0b100), answer
            left = pg.shrink(timeout=EVENT_S)
        assert left is not None
        verify(left)
        self.stage.note(f"goes on as rank {left.rank()} of {left.size()}")
        left.shutdown()
