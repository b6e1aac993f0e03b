"""The commands. ``bench`` needs the extra ``bench``, ``doctor`` none, the others ``control-plane``."""

from __future__ import annotations

import sys
from importlib.metadata import version
from io import TextIOWrapper

from dist2.errors import InvalidUsageError
from dist2.runtime.signals import package_is_a_program

UNUSABLE_ENVIRONMENT = 2
"""Exit status if a variable ``DIST2_...`` has an invalid value."""

_OF_ALL = ("click", "rich")
_OF_BENCH = ("matplotlib", "numpy")


_HELP = """Usage: dist2 COMMAND [ARGS]...

  doctor                       checks this machine and environment

Not installed yet:

  ps, query, report, top,
  trace, why                   ask the ranks of a job: pip install 'dist2[control-plane]'
  bench                        measures operations: pip install 'dist2[bench]'

dist2 COMMAND --help describes a command.
"""
"""The help where click is not installed; a test compares it with the commands."""


package_is_a_program(__spec__)


def main() -> None:
    """Run the command that the arguments name; where a package is missing, print the install line."""
    if isinstance(sys.stdout, TextIOWrapper):  # names of groups and messages of errors may have any character
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] == ["doctor"]:  # works without the extra
        from dist2.cli.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    try:
        from dist2.cli.app import cli
        from dist2.cli.bench.stopping import stop_as_by_ctrl_c

        stop_as_by_ctrl_c()
        cli()
    except InvalidUsageError as error:  # of the environment: instruments read it when they are imported
        sys.stderr.write(f"{error}\n")
        sys.exit(UNUSABLE_ENVIRONMENT)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OF_ALL and sys.argv[1:] in ([], ["-h"], ["--help"]):
            sys.stdout.write(_HELP)
            return
        if package in _OF_ALL and sys.argv[1:] == ["--version"]:
            sys.stdout.write(f"dist2 {version('dist2')}\n")
            return
        if package not in (*_OF_ALL, *_OF_BENCH):
            raise
        extra = "bench" if package in _OF_BENCH or sys.argv[1:2] == ["bench"] else "control-plane"
        sys.exit(f"dist2's commands need {package}, which is not installed: pip install 'dist2[{extra}]'")
