"""`Answer`: the knowledge of one rank, or the reason of its silence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

State = dict[str, Any]
"""The description of one rank by itself: plain data, see `observability.job.state`."""

RANK_S = 1.0
"""How long a rank may take to answer for itself."""
NO_ANSWER = "no answer within"
"""Begins the reason of a silence that ended with the time limit."""
ELSEWHERE = "its part is on"
"""Begins the reason of a silence of a rank of another host, of whose state this one knows nothing."""
NO_PART = "it left no part in this incident"
"""The silence of a rank in an incident: the disk may have been full, so this alone accuses no rank."""
NOT_REGISTERED = "it has not registered for the group"
"""The silence of a rank that the others wait for in the first `new_group`."""
RUNNABLE = frozenset("RS")
"""States of a process that may yet answer."""


@attrs.frozen
class Answer:
    """The knowledge of one rank.

    Attributes:
        state: Its own description; None without an answer.
        silence: The reason of a missing answer.
        url: Its control plane; empty where it has none.
        offset_s: Its clock minus that of the asking process.
        error_s: How far that may be off.
        outside: How its process looks from another one of its host, where it is silent: `Outside`.
        host: Where it is silent: its host, as far as it is known.
        seen: Where it is silent: by the uid of a group, the operation at which another rank saw it last.
    """

    state: State | None = None
    silence: str = ""
    url: str = ""
    offset_s: float = 0.0
    error_s: float = 0.0
    outside: dict[str, Any] | None = None
    host: str = ""
    seen: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def is_gone(self) -> bool:
        """Whether nothing listens there, or its process cannot run: its silence is not slowness."""
        may_be_well = self.silence.startswith((NO_ANSWER, ELSEWHERE, NO_PART))
        return not may_be_well or (self.outside is not None and not self.runs)

    def has_entered(self, uid: str, seq: int) -> bool:
        """Whether another rank saw it in a collective of a group, or in a later one."""
        number = re.search(r"#(\d+)", self.seen.get(uid, ""))
        return number is not None and int(number[1]) >= seq

    @property
    def runs(self) -> bool:
        """Whether its process is seen to run, also if nothing listens there any more."""
        return self.outside is not None and self.outside["state"] in RUNNABLE

    @property
    def why_silent(self) -> str:
        """All that is known of its silence, in words."""
        if self.outside is None:
            return self.silence
        cause = self.outside["cause"] if self.silence.startswith(NO_ANSWER) else ""
        stands = self.outside.get("stands", "")
        return (
            f"{self.silence}; {self.outside['words']}"
            + (f": {cause}" if cause else "")
            + (f"; {stands}" if stands else "")
        )


Answers = Mapping[int, Answer]


def how_ended(pid: int, answers: Answers) -> str:
    """Return how a process ended, as failures of its peers say it: ``was killed by SIGSEGV``; else empty."""
    states = (answer.state for answer in answers.values() if answer.state is not None)
    return end_in(pid, (failure["message"] for state in states for failure in state["failures"]))


def end_in(pid: int, messages: Iterable[str]) -> str:
    """Return how a process ended, as messages say it; else empty."""
    ends = r"was killed by (?:SIG\w+(?: \(the kernel [^)]*\))?|signal \d+)|exited with code \d+"
    words = re.compile(rf"\b{pid}\b[^;:,]*? ({ends})")
    return next((found[1] for text in messages if (found := words.search(text))), "")
