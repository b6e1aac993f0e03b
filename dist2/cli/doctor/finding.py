"""`Finding`: the result of one check."""

from __future__ import annotations

from enum import StrEnum

import attrs


class Level(StrEnum):
    """The weight of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@attrs.frozen
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check.
        level: Its weight: with a problem, groups cannot be made or operations fail.
        found: The fact.
        consequence: The effect on a job; empty if all is well.
        remedy: The change that removes the cause; empty if all is well.
    """

    check: str
    level: Level
    found: str
    consequence: str = ""
    remedy: str = ""

    @classmethod
    def ok(cls, check: str, found: str) -> Finding:
        """Return a finding without consequences."""
        return cls(check, Level.OK, found)

    @classmethod
    def warning(cls, check: str, found: str, consequence: str, remedy: str) -> Finding:
        """Return a finding with which jobs run slower or with less information."""
        return cls(check, Level.WARNING, found, consequence, remedy)

    @classmethod
    def problem(cls, check: str, found: str, consequence: str, remedy: str) -> Finding:
        """Return a finding with which jobs fail."""
        return cls(check, Level.PROBLEM, found, consequence, remedy)

    @classmethod
    def skipped(cls, check: str, found: str) -> Finding:
        """Return the reason why a check was left out."""
        return cls(check, Level.SKIPPED, found)
