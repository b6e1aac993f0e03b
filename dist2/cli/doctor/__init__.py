"""``dist2 doctor``: checks of a machine and an environment, before a job is started there.

It needs the core installation only: arguments are read by argparse, since click is in the extra ``bench``. It
starts no ranks and changes nothing. Permissions are tried, not derived from settings: a child process opens
shared memory of this one and reads its memory, as ranks do to each other.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dist2.cli.doctor.finding import Finding, Level
from dist2.cli.doctor.machine import CHECKS as MACHINE
from dist2.cli.doctor.network import CHECKS as NETWORK
from dist2.cli.doctor.software import CHECKS as SOFTWARE

HEALTHY, PROBLEMS = 0, 1
"""Exit statuses."""

_COLUMN = 22


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return the exit status.

    Args:
        arguments: Those after ``dist2 doctor``; by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="dist2 doctor",
        description="Check this machine and environment for dist2. Ends with 0 unless there is a problem.",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    as_json = parser.parse_args(arguments).as_json
    findings = examine()
    sys.stdout.write(_json(findings) if as_json else _text(findings))
    return PROBLEMS if any(each.level is Level.PROBLEM for each in findings) else HEALTHY


def examine(
    checks: Iterable[Callable[[], Iterable[Finding]]] = (*MACHINE, *NETWORK, *SOFTWARE),
) -> list[Finding]:
    """Return the findings of all checks. A check that fails is a finding itself."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001 - the remaining checks are still of use
            name = check.__name__.replace("_", " ")
            reason = f"cannot be checked: {type(error).__name__}: {error}"
            findings.append(Finding.skipped(name, reason))
    return findings


def _text(findings: Iterable[Finding]) -> str:
    lines, counts = [], Counter[Level]()
    for each in findings:
        counts[each.level] += 1
        lines.append(f"{each.level:<9}{each.check:<{_COLUMN}}{each.found}")
        indent = " " * (9 + _COLUMN)
        if each.consequence:
            lines.append(f"{indent}consequence: {each.consequence}")
        if each.remedy:
            lines.append(f"{indent}remedy: {each.remedy}")
    lines.append(", ".join(f"{level}: {counts[level]}" for level in Level))
    return "\n".join(lines) + "\n"


def _json(findings: Sequence[Finding]) -> str:
    rows = [
        {
            "check": each.check,
            "level": each.level.value,
            "finding": each.found,
            "consequence": each.consequence,
            "remedy": each.remedy,
        }
        for each in findings
    ]
    healthy = not any(each.level is Level.PROBLEM for each in findings)
    return json.dumps({"host": socket.gethostname(), "healthy": healthy, "findings": rows}, indent=1) + "\n"
