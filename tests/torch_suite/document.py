"""The part of docs/compatibility.md that is made of the outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_suite.differences import DIFFERENCES

BEGIN, END = "<!-- torch_suite: begin -->", "<!-- torch_suite: end -->"


Found = Mapping[Any, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""By world size, system and test: the fields of the outcome."""


def table(found: Found) -> str:
    """Return the table of outcomes by world size, and the differences."""
    titles = ("ranks", "tests", "pass on Gloo", "of these on dist2", "only on dist2", "skipped on both")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for size, systems in found.items():
        gloo, ours, beyond = systems["gloo"], systems["dist2"], systems["beyond"]
        passed = {name for name, each in gloo.items() if each["status"] == "passed"}
        both = sum(ours[name]["status"] == "passed" for name in passed)
        more = Counter(each["status"] for each in beyond.values())["passed"]
        skipped = Counter(each["status"] for each in gloo.values())["skipped"] - more
        lines.append(f"| {size} | {len(gloo)} | {len(passed)} | {both} | {more} | {skipped} |")
    lines += ["", "Pass on Gloo and not on dist2:", "", "| test | reason |", "|---|---|"]
    lines += [
        f"| `{name}` | {DIFFERENCES.get(name, '**not explained**')} |" for name in sorted(differing(found))
    ]
    return "\n".join(lines)


def differing(found: Found) -> set[str]:
    """Return the tests that passed on Gloo and not on dist2, and the differences that no world size shows."""
    failed, ran = set(), set()
    for systems in found.values():
        for name, each in systems["gloo"].items():
            if each["status"] == "passed":
                ran.add(name)
                if systems["dist2"][name]["status"] != "passed":
                    failed.add(name)
    return failed | DIFFERENCES.keys() - ran


def write_document(path: Path, found: Found) -> None:
    """Replace the part of a document between the two marks."""
    head, _, rest = path.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{BEGIN}\n{table(found)}\n{END}{tail}")
