"""The job as a frame for a terminal, from two answers of ``/job`` and one of ``/stragglers``.

A pure function of the answers: the rates are differences of the totals in the two answers of a rank, divided
by the time between them on the clock of that rank. Text from the job is made printable, as an escape
sequence in the name of a group would reach the terminal otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dist2.cli.bench.sizes import rate_text, time_text
from observability.job.rank_text import named
from observability.job.verdict import Key, key_of

Document = Mapping[str, Any]

SHOWN_VERDICTS = 4
SHOWN_STRAGGLERS = 5
STYLES = {
    "waited for": "bold red",
    "broken": "bold red",
    "silent": "bold red",
    "waiting": "yellow",
    "ok": "none",
}
"""Of a rank by its state; the most urgent state first, as on the page."""
TONES = {"bad": "bold white on red", "good": "bold green"}
"""Of the headline of a launcher."""
ORDER = {state: place for place, state in enumerate(STYLES)}
COLUMNS = ("rank", "state", "group", "last operation", "in flight", "age", "missing", "step")
NUMBERS = ("ops/s", "payload", "bus")
LEFT_OUT = ("bus", "payload", "step", "ops/s", "last operation", "group")
"""Columns that a narrow terminal leaves out, in this order: the ranks in trouble stay legible."""
WHOLE = {"rank": 4, "state": 10}
"""Columns that are never cut, with their widths: they say whom it is about."""
NARROW = 72
"""Below this width, late ranks are told with their share of the time alone."""
BETWEEN = 3
"""Spaces between two columns."""


@attrs.frozen
class Frame:
    """The content of one frame.

    Attributes:
        base: The control plane that answered.
        job: Its latest answer at ``/job``; None before the first.
        before: An earlier one, the base of the rates; None if there is none.
        stragglers: The latest answer at ``/stragglers``; None without one.
        trouble: The reason why there is no newer answer; empty if the latest request was answered.
        age_s: Age of the latest answer in seconds.
        again: Whether it is asked again, in a sentence.
    """

    base: str
    job: Document | None
    before: Document | None = None
    stragglers: Document | None = None
    trouble: str = ""
    age_s: float = 0.0
    again: str = ""

    def render(self, most_rows: int | None = None, width: int | None = None) -> RenderableType:
        """Return the frame.

        Args:
            most_rows: Number of rows of the table of ranks, of ranks in trouble first; all rows by default.
            width: Width of the terminal; unlimited by default.
        """
        parts: list[RenderableType] = [self._title()]
        if self.trouble:
            old = f"; the data below is {self.age_s:.0f} s old" if self.job else ""
            line = f"No answer: {self.trouble}{old}. {self.again}"
            parts.append(_banner(line.rstrip(), TONES["bad"]))
        if self.job is not None:
            if self.job.get("headline"):
                parts.append(
                    _banner(self.job["headline"], TONES.get(self.job.get("tone", ""), "bold yellow"))
                )
            parts.extend(_banner(line, "bold red") for line in self.job["verdict"][:SHOWN_VERDICTS])
            hidden = len(self.job["verdict"]) - SHOWN_VERDICTS
            if hidden > 0:
                parts.append(_text(f"  and {hidden} more: dist2 why {self.base}"))
            if self.job.get("slow_step"):
                parts.append(_banner(f"Slow: {self.job['slow_step']}", "yellow"))
            parts.append(self._ranks(most_rows, width))
            parts.extend(self._stragglers(width))
        return Group(*parts)

    def _title(self) -> Text:
        title = Text("dist2 top", style="bold")
        title.append(f"  {_printable(self.base)}", style="none")
        job = self.job
        if job is not None and job.get("ended"):
            title.append(f"  {job['world_size']} ranks, as they were last seen", style="none")
        elif job is not None:
            condition = "no trouble" if not job["verdict"] else "trouble"
            style = "none" if job["verdict"] else "green"
            title.append(f"  {job['answered']} of {job['world_size']} ranks answer  ", style="none")
            title.append(condition, style=style)
        return title

    def _ranks(self, most_rows: int | None, width: int | None) -> RenderableType:
        assert self.job is not None
        rows = sorted(_rows(self.job, self.before), key=lambda row: (ORDER[row.state], row.rank))
        left_out = 0 if most_rows is None else len(rows) - most_rows
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        cells = [row.cells() for row in rows[:most_rows]]
        names = _fitting(cells, width)
        for name in names:
            right = name in ("rank", "age", "step", *NUMBERS)
            least = WHOLE.get(name)
            table.add_column(name, justify="right" if right else "left", no_wrap=True, min_width=least)
        for row, each in zip(rows, cells, strict=False):
            table.add_row(*(_text(each[name]) for name in names), style=STYLES[row.state])
        shown = Padding(table, (1, 0, 0, 0))
        if left_out <= 0:
            return shown
        return Group(shown, _text(f"  {left_out} more rows; those of ranks in trouble come first"))

    def _stragglers(self, width: int | None) -> Iterator[RenderableType]:
        if self.stragglers is None:
            return
        ranking = [each for each in self.stragglers["ranking"] if each["share"] > 0][:SHOWN_STRAGGLERS]
        found = {(each["rank"], each["group"]) for each in self.stragglers["stragglers"]}
        if not ranking:
            return
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        names: tuple[str, ...] = ("late rank", "group", "share", "late by", "verdict")
        if width is not None and width < NARROW:
            names = names[:3]
        for name in names:
            justify: Literal["left", "right"] = "left" if name in ("group", "verdict") else "right"
            table.add_column(name, justify=justify, no_wrap=True)
        for each in ranking:
            is_straggler = (each["rank"], each["group"]) in found
            is_judged = each.get("judged", True)  # earlier versions do not tell
            cells = (
                str(each["rank"]),
                _text(each["group"]),
                f"{each['share']:.1%}",
                time_text(each["late_s"]),
                "straggler" if is_straggler else "within the noise" if is_judged else "too early to say",
            )
            table.add_row(*cells[: len(names)], style="yellow" if is_straggler else "none")
        yield Padding(table, (1, 0, 0, 0))


@attrs.frozen
class Row:
    """A rank in one of its groups.

    Attributes:
        rank: The rank in the job.
        state: The state of the rank, or of the group if that is broken.
        group: Name of the group.
        last: The last collective.
        in_flight: The oldest operation in flight, and the number of others.
        age_s: Its age in seconds; None without an operation in flight.
        missing: The ranks that it waits for.
        step: The last step: number, time, and share of waiting for others in this group.
        operations: Operations a second; None if there is no earlier answer. So are the next two.
        payload: Payload bytes a second.
        bus: Bytes a second over the bus, as nccl-tests counts them.
    """

    rank: int
    state: str
    group: str = ""
    last: str = ""
    in_flight: str = ""
    age_s: float | None = None
    missing: str = ""
    step: str = ""
    operations: float | None = None
    payload: float | None = None
    bus: float | None = None

    def cells(self) -> dict[str, str]:
        """Return the cells of the table by column."""
        age = "" if self.age_s is None else f"{self.age_s:.1f} s"
        words = (
            str(self.rank),
            self.state,
            self.group,
            self.last,
            self.in_flight,
            age,
            self.missing,
            self.step,
        )
        operations = "-" if self.operations is None else f"{self.operations:,.0f}"
        numbers = operations, rate_text(self.payload), rate_text(self.bus)
        return dict(zip((*COLUMNS, *NUMBERS), (*words, *numbers), strict=True))


def _fitting(cells: list[dict[str, str]], width: int | None) -> list[str]:
    """Return the columns that fit into a width; cut the reasons of silent ranks to what fits."""
    elastic = "last operation"
    spoken = [each for each in cells if each["state"] != "silent"]
    widths = {
        name: max(map(cell_len, [name, *(each[name] for each in (spoken if name == elastic else cells))]))
        for name in (*COLUMNS, *NUMBERS)
    }
    if width is None:
        return list(widths)
    has_silent = len(spoken) < len(cells)
    for name in LEFT_OUT:
        if _total(widths) <= width:
            break
        if name != elastic or not has_silent:
            del widths[name]
    if _total(widths) > width:
        widths.pop(elastic, None)
    if elastic in widths:
        room = max(width - _total(widths) + widths[elastic], 0)
        for each in cells:
            each[elastic] = set_cell_size(each[elastic], min(room, cell_len(each[elastic])))
    return list(widths)


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + BETWEEN * (len(widths) - 1)


def _rows(job: Document, before: Document | None) -> Iterator[Row]:
    earlier = {} if before is None else {each["rank"]: each for each in before["ranks"]}
    missing: dict[Key, str] = {
        (each["uid"], each["seq"], each["p2p"], each["caller"]): _missing(each) for each in job["waiting"]
    }
    for each in job["ranks"]:
        rank, state = each["rank"], each["state"]
        if state == "silent":
            yield Row(rank, state, last=each["silence"])
            continue
        groups = [group for group in each["groups"] if group["state"] != "closed"]
        if not groups:
            yield Row(rank, state, last="no open group")
        for group in groups:
            yield _row(each, group, earlier.get(rank), missing)


def _row(each: Document, group: Document, earlier: Document | None, missing: Mapping[Key, str]) -> Row:
    in_flight = [one for one in each["in_flight"] if one["uid"] == group["uid"]]
    oldest = in_flight[0] if in_flight else None
    last = group["last"]
    others = f" and {len(in_flight) - 1} more" if len(in_flight) > 1 else ""
    return Row(
        rank=each["rank"],
        state="broken" if group["state"] == "broken" else each["state"],
        group=group["name"],
        last="" if last is None else f"{last['op']} #{last['seq']}",
        in_flight="" if oldest is None else f"{oldest['op']} #{oldest['seq']}{others}",
        age_s=None if oldest is None else oldest["age_s"],
        missing="" if oldest is None else missing.get(key_of(oldest, each["rank"]), ""),
        step=_step(each, group["name"]),
        **_rates(each, group, earlier),
    )


def _step(each: Document, group: str) -> str:
    """Return the last step of a rank in a few characters; empty where its program counts none."""
    if not each.get("steps"):
        return ""
    step = each["steps"][0]["latest"][-1]
    share = step["groups"].get(group, {"waited_s": 0.0})["waited_s"] / max(step["step_s"], 1e-9)
    loop = f"{each['steps'][0]['name']} " if len(each["steps"]) > 1 else ""
    return f"{loop}#{step['number']} {time_text(step['step_s'])}, {share:.0%} waiting"


def _rates(each: Document, group: Document, earlier: Document | None) -> dict[str, float]:
    """Return the rates of a rank in a group; none if the process is another one than before."""
    if earlier is None or earlier.get("pid") != each["pid"]:
        return {}
    past = {one["uid"]: one.get("traffic") for one in earlier["groups"]}.get(group["uid"])
    now, span_s = group.get("traffic"), each["at_s"] - earlier["at_s"]
    if not past or not now or span_s <= 0:
        return {}
    return {
        name: max(0, now[total] - past[total]) / span_s
        for name, total in (("operations", "operations"), ("payload", "bytes"), ("bus", "bus_bytes"))
    }


def _missing(waiting: Document) -> str:
    if not waiting["missing"]:
        return "none: all are inside"
    more = f" and {waiting['more']} more" if waiting["more"] else ""
    return named([each["rank"] for each in waiting["missing"]], most=4) + more


def _banner(line: str, style: str) -> Text:
    return Text(_printable(line), style=style)


def _text(text: str) -> Text:
    return Text(_printable(text))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
