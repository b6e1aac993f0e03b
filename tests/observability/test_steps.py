"""Steps of a loop: their parts, the metrics, and the rank that caused a slow one."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from typing import Any

import attrs
import pytest
import torch
from support.fake_groups import FakeGroup, info_of
from support.programs import ROOT
from support.ranks import Tenant, run_ranks
from support.time_limits import in_time

import observability
import observability.steps
from dist2 import ProcessGroup
from observability.client import Asker
from observability.commands.job_table import Frame
from observability.job.answer import Answer
from observability.job.steps import slow_step
from observability.metrics import Metrics
from observability.steps import Steps

SHM = Tenant("shm", "socket", {"transport": "shm"})
SLOW_S = 0.3


def state(
    step_s: float,
    operations_s: float,
    waited_s: float,
    number: int = 9,
    usual: tuple[float, float] = (0.1, 0.02),
) -> dict[str, Any]:
    """Return the answer of a rank whose usual step takes 100 ms, of which it waits 10 ms and moves 10 ms."""
    times = {"step_s": step_s, "operations_s": operations_s, "waited_s": waited_s}
    groups = {"tp": {"operations_s": operations_s, "waited_s": waited_s}}
    typical = {"step_s": usual[0], "operations_s": usual[1], "waited_s": 0.01}
    latest = [{"number": number, "ended_s": 0.0, **times, "groups": groups}]
    return {"steps": [{"name": "train", "typical": typical, "latest": latest}]}


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            [state(1.0, 0.92, 0.91), state(1.0, 0.02, 0.01)],
            "step 9 took 1.00 s instead of 100 ms: rank 1 computed for 980 ms instead of 80 ms; "
            "rank 0 waited 910 ms, mostly in group tp",
        ),
        (
            [state(1.0, 0.92, 0.91), state(1.0, 0.92, 0.01)],
            "step 9 took 1.00 s instead of 100 ms: rank 1 moved data for 910 ms instead of 10 ms; "
            "rank 0 waited 910 ms, mostly in group tp",
        ),
        (
            [state(1.0, 0.92, 0.8), state(1.0, 0.92, 0.8), state(1.0, 0.92, 0.8)],
            "step 9 took 1.00 s instead of 100 ms; "
            "no rank computed or moved data for longer: all waited for each other in turn",
        ),
        ([state(0.11, 0.03, 0.02), state(0.11, 0.02, 0.01)], None),
        ([state(1.0, 0.02, 0.01, 4), state(1.0, 0.02, 0.01, 4)], None),
        (  # rank 0 does not tell step 8, as it was not slow there: it needed rank 1 later
            [state(0.1, 0.02, 0.01, 9), state(1.0, 0.02, 0.01, 8)],
            "step 8 took 1.00 s instead of 100 ms: rank 1 computed for 980 ms instead of 80 ms",
        ),
        ([state(0.1, 0.02, 0.01, 8), state(1.0, 0.02, 0.01, 9)], None),
    ],
)
def test_a_slow_step_names_the_rank_and_its_part(ranks: list[dict[str, Any]], sentence: str | None) -> None:
    assert slow_step({rank: Answer(state=state) for rank, state in enumerate(ranks)}) == sentence
    assert slow_step({0: Answer(silence="it is gone")}) is None


def both(name: str, *states: dict[str, Any], ended_s: float = 0.0) -> dict[str, Any]:
    """Return a loop of a rank that tells the steps of several states."""
    loops = [state["steps"][0] for state in states]
    return {**loops[0], "name": name, "latest": [{**loop["latest"][0], "ended_s": ended_s} for loop in loops]}


def test_a_slow_step_that_ranks_of_another_group_feel_a_step_later_is_that_of_its_cause() -> None:
    caused, waited = state(1.0, 0.02, 0.01, 8), state(1.0, 0.92, 0.91, 8)
    usual, felt = state(0.1, 0.02, 0.01, 9), state(1.0, 0.92, 0.91, 9)
    ranks = [felt, {"steps": [both("train", waited, usual)]}, felt, {"steps": [both("train", caused, usual)]}]
    assert slow_step({rank: Answer(state=state) for rank, state in enumerate(ranks)}) == (
        "step 8 took 1.00 s instead of 100 ms: rank 3 computed for 980 ms instead of 80 ms; "
        "rank 1 waited 910 ms, mostly in group tp"
    )


@pytest.mark.parametrize(("since_s", "is_told"), [(0.1, True), (60.0, False)])
def test_a_slow_step_is_told_while_its_loop_goes_on(since_s: float, is_told: bool) -> None:
    slow, usual = state(1.0, 0.02, 0.01), state(0.1, 0.02, 0.01)
    ranks = [{"steps": [both("part", usual, ended_s=since_s), both("train", slow)]}] * 2
    told = slow_step({rank: Answer(state=state) for rank, state in enumerate(ranks)})
    assert (told is not None) == is_told
    assert told is None or told.startswith("step 9 of train took 1.00 s instead of 100 ms: rank 0 computed")


def test_the_documented_sentence() -> None:
    usual = 812, (0.41, 0.19)
    ranks = [
        state(1.9, 1.5, 1.49, *usual),
        *[state(1.9, 1.4, 1.3, *usual)] * 4,
        state(1.9, 0.19, 0.1, *usual),
    ]
    told = slow_step({rank: Answer(state=state) for rank, state in enumerate(ranks)})
    assert f"```\nSlow: {told}\n```" in (ROOT / "docs" / "metrics.md").read_text(), told


@attrs.define(eq=False)
class Job:
    """Two ranks that take steps; in the eighth of 20, rank 1 computes for longer."""

    asked: threading.Event = attrs.field(factory=threading.Event)
    answers: dict[str, bytes] = attrs.field(factory=dict)

    def body(self, pg: ProcessGroup) -> None:
        """Be one rank."""
        with observability.start(pg) as server:
            for number in range(20):
                with observability.step(pg, name="job"):
                    if number == 7 and pg.rank() == 1:
                        time.sleep(SLOW_S)  # its computation
                    pg.all_reduce(torch.ones(2))
            pg.barrier()
            if pg.rank() == 0:
                for path in ("/job", "/metrics"):
                    self.answers[path] = Asker().ask(f"{server.url}{path}", server.token)
            pg.barrier()


def test_a_job_tells_its_slow_step_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.job.steps.LEAST_S", SLOW_S / 2)  # a busy machine delays steps, too
    job = Job()
    run_ranks(2, job.body, SHM)
    told = json.loads(job.answers["/job"])
    took = re.compile("step 8( of job)? took")  # the name where other tests have others
    assert took.search(told["slow_step"])
    assert "rank 1 computed for" in told["slow_step"]
    assert "rank 0 waited" in told["slow_step"]
    (loop,) = [each for each in told["ranks"][0]["steps"] if each["name"] == "job"]
    assert [step["number"] for step in loop["latest"]] == [8, 17, 18, 19, 20]
    latest = loop["latest"][0]
    assert SLOW_S * 0.5 < latest["waited_s"] <= latest["operations_s"] <= latest["step_s"]
    metrics = observability.parse_metrics(job.answers["/metrics"].decode())
    assert metrics.value("dist2_step_duration_seconds_count", loop="job", rank="0") == 20
    assert metrics.value("dist2_step_peer_wait_seconds_total", loop="job", rank="0") > SLOW_S * 0.5
    shown = Frame("http://here", told).render()
    from rich.console import Console

    console = Console(width=240)
    with console.capture() as captured:
        console.print(shown)
    assert re.search(f"Slow: {took.pattern}", captured.get())
    assert "% waiting" in captured.get()


def test_a_step_that_raises_does_not_count_and_another_loop_is_apart() -> None:
    before = {loop.name for loop in observability.steps.steps.loops()}
    with pytest.raises(ZeroDivisionError), observability.step(name="raises"):
        raise ZeroDivisionError
    with observability.step(name="validate"):
        pass
    assert {loop.name for loop in observability.steps.steps.loops()} - before == {"validate"}


def loop_of(name: str) -> Any:
    """Return a loop of this process."""
    (loop,) = [each for each in observability.steps.steps.loops() if each.name == name]
    return loop


def test_a_step_that_raises_keeps_its_number_as_other_ranks_go_on() -> None:
    for number in range(3):
        with suppress(ZeroDivisionError), observability.step(name="keeps"):
            assert number != 1 or 1 / 0
    assert [each.number for each in loop_of("keeps").latest] == [1, 3]


def test_a_step_inside_of_one_of_the_same_name_is_part_of_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    handle = observability.steps_of(optimizer, name="outer")
    with observability.step(name="outer"):
        for _ in range(3):
            with observability.step(name="outer"), observability.step(name="inner"):
                optimizer.step()
    handle.remove()
    assert [each.number for each in loop_of("outer").latest] == [1]
    assert [each.number for each in loop_of("inner").latest] == [1, 2, 3]


def test_the_steps_of_an_optimizer_are_counted_until_they_are_not() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    handle = observability.steps_of(optimizer, name="sgd")
    for _ in range(3):
        optimizer.step()
    handle.remove()
    optimizer.step()
    (loop,) = [each for each in observability.steps.steps.loops() if each.name == "sgd"]
    assert loop.latest[-1].number == 3


def test_a_step_costs_little() -> None:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    group.run()
    steps, number = Steps(metrics), 200
    began = time.process_time()
    for _ in range(number):
        steps.end(steps.begin(), "train", 0)
    in_time((time.process_time() - began) / number, 200e-6)


def test_the_usual_step_is_asked_for_while_a_step_ends() -> None:
    loop = observability.steps.Loop("train", 0)

    @attrs.frozen
    class Ends:
        """A step that ended; another one ends while it is looked at."""

        @property
        def times(self) -> observability.steps.Times:
            loop.add(1, {})
            return observability.steps.Times(3.0, 0.0, 0.0)

    loop.latest.append(Ends())  # type: ignore[arg-type]  # in place of a step
    assert loop.typical().step_s == 3.0
