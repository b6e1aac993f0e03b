"""The rank that caused a slow step of the job, and the part of the step: functions of the ranks' answers.

Ranks of one job wait for each other, so a slow step is slow on all of them. The rank that caused it is the
one whose own time, which is the step without waiting for others, exceeds its usual own time most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from observability.job.answer import Answers, State

SLOW = 1.5
"""A step is slow if it takes this times as long as usual, and `LEAST_S` longer."""
LEAST_S = 0.02
CAUSE = 0.5
"""Share of the additional time that the own time of one rank has to explain."""
USUAL_STEPS = 4
"""Fewer steps say nothing about the usual time."""


@attrs.frozen
class _Part:
    """The steps of one rank: one of them, and the usual ones.

    Attributes:
        rank: The rank in the job.
        step: The step.
        usual: Medians of the last steps.
    """

    rank: int
    step: State
    usual: State

    @property
    def more_s(self) -> float:
        """Own time of the step beyond the usual, in seconds."""
        return _own_s(self.step) - _own_s(self.usual)

    def sentence(self) -> str:
        """Say the part of the step that took longer."""
        parts = [
            ("computed for", _computed_s(self.step), _computed_s(self.usual)),
            ("moved data for", _moved_s(self.step), _moved_s(self.usual)),
        ]
        words, took_s, usual_s = max(parts, key=lambda part: part[1] - part[2])
        return f"rank {self.rank} {words} {_time(took_s)} instead of {_time(usual_s)}"


def slow_step(answers: Answers) -> str | None:
    """Return a sentence about the last slow step that ranks tell; None if all took as long as usual."""
    sentences = (_sentence(parts) for parts in _steps(answers))
    return next((sentence for sentence in sentences if sentence), None)


def is_slow(took_s: float, usual_s: float) -> bool:
    """Return whether a step took much longer than usual."""
    return took_s >= SLOW * usual_s and took_s - usual_s >= LEAST_S


def _sentence(parts: list[_Part]) -> str | None:
    """Return a sentence about a step; None if it took as long as usual."""
    took_s = max(part.step["step_s"] for part in parts)
    usual_s = max(part.usual["step_s"] for part in parts)
    if not is_slow(took_s, usual_s):
        return None
    begin = f"step {parts[0].step['number']} took {_time(took_s)} instead of {_time(usual_s)}"
    cause = max(parts, key=lambda part: part.more_s)
    if cause.more_s < CAUSE * (took_s - usual_s):
        return f"{begin}; no rank computed or moved data for longer: all waited for each other in turn"
    waited = max(parts, key=lambda part: part.step["waited_s"])
    group = max(waited.step["groups"], key=lambda name: waited.step["groups"][name]["waited_s"], default="")
    others = f"; rank {waited.rank} waited {_time(waited.step['waited_s'])}, mostly in group {group}"
    return f"{begin}: {cause.sentence()}{others if waited is not cause and group else ''}"


def _steps(answers: Answers) -> Iterator[list[_Part]]:
    """Yield the steps that all ranks tell, the last one first; none where their loops differ."""
    loops: dict[int, Any] = {}
    for rank, answer in answers.items():
        if answer.state is not None and answer.state.get("steps"):
            loops[rank] = answer.state["steps"][0]
    if len({loop["name"] for loop in loops.values()}) != 1:
        return
    by_number = {rank: {step["number"]: step for step in loop["latest"]} for rank, loop in loops.items()}
    for number in sorted(set.intersection(*map(set, by_number.values())), reverse=True):
        if number > USUAL_STEPS:
            yield [_Part(rank, by_number[rank][number], loop["typical"]) for rank, loop in loops.items()]


def _own_s(times: State) -> float:
    return float(times["step_s"] - times["waited_s"])


def _computed_s(times: State) -> float:
    return max(0.0, float(times["step_s"] - times["operations_s"]))


def _moved_s(times: State) -> float:
    return _own_s(times) - _computed_s(times)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{max(0.0, seconds) * 1e3:.0f} ms"
