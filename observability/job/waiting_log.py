"""One log line for a wait of the whole job, by the rank that has diagnosed it, however many ranks wait.

The line is repeated when the wait lasts a minute, and ten, and when ranks are the reason that it did not
name. A wait for other operations, none of which waited before, is another one, told with the first while it
is short: in a slow job, ranks wait in every step. A last line tells that the wait is over: nobody asks for
a diagnosis any more, as ranks do as long as they wait, or the program ends after it. The last lines are
kept, for ``/job`` and ``/events``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from observability.job.verdict import Diagnosis, Key

AGAIN_S = (0.0, 60.0, 600.0)
"""Ages of a wait at which it is logged."""
KEPT = 32
"""Lines that are kept."""

log = logging.getLogger("dist2.waiting")


class WaitingLog:
    """Logs the waits of the job.

    Args:
        quiet_s: A wait is over if no rank has asked for so long,
        rests: and for so many times the time that the latest diagnosis took, as ranks pause after a slow one.

    Attributes:
        lines: The last lines as data, the oldest first.
    """

    def __init__(self, quiet_s: float, rests: float = 0.0) -> None:
        self._quiet_s = quiet_s
        self._rests = rests
        self._over_after_s = quiet_s
        self._lock = threading.Lock()
        self._since = self._heard = 0.0
        self._logged = 0
        self._culprits: tuple[int, ...] = ()
        self._waiting: frozenset[Key] = frozenset()
        self.lines: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def diagnosed(self, rank: int, found: Diagnosis) -> None:
        """Take note of a diagnosis of this rank."""
        now = time.monotonic()
        with self._lock:
            if not found.waiting:
                self._end(rank)
                return
            waiting = frozenset(each.key for each in found.waiting)
            if not self._logged or not waiting & self._waiting:
                self._logged = min(self._logged, 1)
                self._since = now - max(each.age_s for each in found.waiting)
            self._over_after_s = self._quiet_s + self._rests * found.took_s
            self._heard, waited_s = now, now - self._since
            self._waiting = waiting
            due = sum(waited_s >= age_s for age_s in AGAIN_S)
            if due == self._logged and set(found.culprits) <= set(self._culprits):
                return
            self._logged, self._culprits = max(due, self._logged), found.culprits
        level = logging.ERROR if due == len(AGAIN_S) else logging.WARNING
        verdict = found.summary
        fields = {"rank": rank, "verdict": verdict, "culprits": list(found.culprits), "waited_s": waited_s}
        self._write(level, f"the job waits for {waited_s:.1f} s: {verdict}", fields)

    def look(self, rank: int) -> None:
        """Log the end of a wait, once no rank has asked for a while; not for a rank that waits itself."""
        with self._lock:
            if self._logged and time.monotonic() - self._heard > self._over_after_s:
                self._end(rank)

    def close(self, rank: int, completed: Callable[[], Mapping[str, int]]) -> None:
        """Log the end of a wait, if this rank has completed the collectives that waited.

        Args:
            rank: This one.
            completed: Returns the number of its last collective, by uid of the group.
        """
        with self._lock:
            if self._logged:
                last = completed()
                mine = {(uid, seq) for uid, seq, is_p2p, _ in self._waiting if not is_p2p and uid in last}
                if mine and all(last[uid] >= seq for uid, seq in mine):
                    self._end(rank)

    def _end(self, rank: int) -> None:
        if self._logged:
            waited_s = self._heard - self._since
            fields = {"rank": rank, "waited_s": waited_s}
            self._write(logging.WARNING, f"the job goes on, after a wait of about {waited_s:.1f} s", fields)
        self._logged, self._culprits = 0, ()

    def _write(self, level: int, message: str, fields: dict[str, Any]) -> None:
        line = {"at_s": time.time(), "level": logging.getLevelName(level), "message": message, **fields}
        self.lines.append(line)
        log.log(level, "%s", message, extra=fields)
