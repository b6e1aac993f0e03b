"""The rank that caused a slow step of the job, and the part of the step: functions of the ranks' answers.

Ranks of one job wait for each other, so a slow step is slow on all of them. The rank that caused it is the
one whose own time, which is the step without waiting for others, exceeds its usual own time most. In a job of
several groups they wait in turns: the ranks that wait for those of a slow step may do so in their next one.
So a slow step that no rank caused is explained by the slow one before it.
"""

from __future__ import annotations

from collections import defaultdict

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
    loops = {name: found for name, each in _loops(answers).items() if (found := _last_slow(each))}
    if not loops:
        return None
    name = max(loops, key=lambda name: loops[name][0])
    several = any(len((answer.state or {}).get("steps", ())) > 1 for answer in answers.values())
    return _sentence(loops[name][1], f" of {name}" if several else "")


def is_slow(took_s: float, usual_s: float) -> bool:
    """Return whether a step took much longer than usual."""
    return took_s >= SLOW * usual_s and took_s - usual_s >= LEAST_S


def _last_slow(loops: dict[int, State]) -> tuple[float, list[_Part]] | None:
    """Return when the last slow step of a loop ended, and the step that explains it; None if none was slow.

    Args:
        loops: The loop, as each rank tells it.
    """
    last: int = min(loop["latest"][-1]["number"] for loop in loops.values())
    steps: dict[int, list[_Part]] = defaultdict(list)
    for rank, loop in loops.items():
        for step in loop["latest"]:  # a rank tells slow steps, and the last ones
            if USUAL_STEPS < step["number"] <= last:
                steps[step["number"]].append(_Part(rank, step, loop["typical"]))
    slow = {number: parts for number, parts in steps.items() if is_slow(*_times(parts))}
    if not slow:
        return None
    number = first = max(slow)
    while _cause(slow[number]) is None and number - 1 in slow:
        number -= 1
    ended_s = max(part.step["ended_s"] for part in slow[first])
    return ended_s, slow[number if _cause(slow[number]) else first]


def _times(parts: list[_Part]) -> tuple[float, float]:
    """Return how long a step took, and its usual time, in seconds."""
    return max(part.step["step_s"] for part in parts), max(part.usual["step_s"] for part in parts)


def _cause(parts: list[_Part]) -> _Part | None:
    """Return the part of the rank that caused a slow step, if it was one rank."""
    took_s, usual_s = _times(parts)
    most = max(parts, key=lambda part: part.more_s)
    return most if most.more_s >= CAUSE * (took_s - usual_s) else None


def _sentence(parts: list[_Part], of: str) -> str:
    """Return a sentence about a slow step, after whose number the words ``of`` come."""
    took_s, usual_s = _times(parts)
    begin = f"step {parts[0].step['number']}{of} took {_time(took_s)} instead of {_time(usual_s)}"
    cause = _cause(parts)
    if cause is None:
        return f"{begin}; no rank computed or moved data for longer: all waited for each other in turn"
    waited = max(parts, key=lambda part: part.step["waited_s"])
    group = max(waited.step["groups"], key=lambda name: waited.step["groups"][name]["waited_s"], default="")
    others = f"; rank {waited.rank} waited {_time(waited.step['waited_s'])}, mostly in group {group}"
    return f"{begin}: {cause.sentence()}{others if waited is not cause and group else ''}"


def _loops(answers: Answers) -> dict[str, dict[int, State]]:
    """Return the loops that all ranks with steps are in, by name and rank."""
    told = {
        rank: {loop["name"]: loop for loop in answer.state["steps"] if _goes_on(loop, answer.state["steps"])}
        for rank, answer in answers.items()
        if answer.state is not None and answer.state.get("steps")
    }
    names = set.intersection(*map(set, told.values())) if told else ()
    return {name: {rank: loops[name] for rank, loops in told.items()} for name in names}


def _goes_on(loop: State, loops: list[State]) -> bool:
    """Return whether a loop of a rank goes on: no other one has ended a step for two steps of this one."""
    since_s = max(each["latest"][-1]["ended_s"] for each in loops) - loop["latest"][-1]["ended_s"]
    return bool(since_s <= 2 * max(loop["typical"]["step_s"], loop["latest"][-1]["step_s"]))


def _own_s(times: State) -> float:
    return float(times["step_s"] - times["waited_s"])


def _computed_s(times: State) -> float:
    return max(0.0, float(times["step_s"] - times["operations_s"]))


def _moved_s(times: State) -> float:
    return _own_s(times) - _computed_s(times)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{max(0.0, seconds) * 1e3:.0f} ms"
