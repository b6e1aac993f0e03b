"""`Refusals`: connections that this process refused, counted and logged.

A metric reads the counts when it is scraped. Log lines are rationed: a scanner must not fill a disk.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from dist2.errors import Dist2Error
from dist2.runtime.deadline import Deadline

_LINES_AT_ONCE = 20
_SPAN_S = 1.0

log = logging.getLogger("dist2.security")


class Refusals:
    """Counts by plane and reason, and a ration of log lines."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._span = Deadline.after(_SPAN_S)
        self._lines = 0
        self._unsaid = 0

    def count(self, plane: str, reason: str) -> None:
        """Count a refused connection that is logged elsewhere."""
        with self._lock:
            self._counts[plane, reason] += 1

    def note(self, plane: str, reason: str, peer: str, why: str, **details: object) -> None:
        """Count a refused connection, and log it.

        Args:
            plane: ``data``, ``store``, ``card`` or ``control``.
            reason: One of a fixed set of words: it becomes a label.
            peer: The other side's address.
            why: Explanation for readers of the log.
            details: More fields of the log record.
        """
        with self._lock:
            self._counts[plane, reason] += 1
            if self._span.passed:
                self._span, self._lines = Deadline.after(_SPAN_S), 0
            self._lines += 1
            if self._lines > _LINES_AT_ONCE:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
        what = "card" if plane == "card" else f"{plane} connection"
        before = f"; {unsaid} refusals before it were not logged" if unsaid else ""
        fields = {"plane": plane, "reason": reason, "peer": peer, **details}
        log.warning("refused a %s from %s (%s): %s%s", what, peer, reason, why, before, extra=fields)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many connections were refused so far, by plane and reason."""
        with self._lock:
            return dict(self._counts)


refusals = Refusals()
"""Those of this process."""


def reason_of(error: BaseException) -> str:
    """Return the label of an error that ended a stranger's connection."""
    reason = getattr(error, "reason", "")
    return str(reason) if reason else "not_the_protocol" if isinstance(error, Dist2Error) else "ended"
