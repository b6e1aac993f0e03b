"""Run torch's tests: ``python -m torch_suite --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from torch_suite.differences import OWN_NAME
from torch_suite.document import write_document
from torch_suite.mutants import MUTANTS, Mutant
from torch_suite.names import BACKEND, replace_in
from torch_suite.ranks import Job, Outcome, Suite

Outcomes = dict[str, Outcome]


def main() -> None:
    """Run the tests that the arguments name, and print the outcomes as JSON."""
    parser = argparse.ArgumentParser(prog="torch_suite", description="torch's tests on Gloo and on dist2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes")
    parser.add_argument("--mutants", action="store_true", help="run the wrong functions instead")
    parser.add_argument("--document", type=Path, help="write the table of outcomes to this document")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each outcome")
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of tests")
    given = parser.parse_args()
    runner = Runner(given.patterns, given.verbose)
    if given.mutants:
        print(json.dumps({f"{each.function} in {each.test}": runner.kill(each).status for each in MUTANTS}))
        return
    found = json.loads(json.dumps({size: runner.compare(size) for size in given.ranks}, default=attrs.asdict))
    if given.document is not None:
        write_document(given.document, found)
    print(json.dumps(found))


@attrs.frozen
class Runner:
    """Runs jobs one after the other, each in a process of its own: torch's tests read its environment.

    Attributes:
        patterns: Names of tests.
        verbose: Print each outcome to stderr.
    """

    patterns: Sequence[str]
    verbose: bool = False

    def compare(self, world_size: int) -> dict[str, Outcomes]:
        """Run the tests on Gloo, and on dist2; then on dist2 those that Gloo cannot run.

        Returns:
            Outcomes by test, for "gloo", "dist2" and "beyond" (on dist2, tests that torch skips for Gloo).
        """
        gloo = self.run(Job("gloo", world_size), self._asked)
        there = set(gloo)
        ours = self.run(Job("dist2", world_size), lambda name: name in there - set(OWN_NAME))
        own = self.run(Job("dist2", world_size, BACKEND), lambda name: name in there & set(OWN_NAME))
        missing = {name for name, each in gloo.items() if each.status == "skipped" and "MPI" in each.reason}
        beyond = self.run(Job("dist2", world_size, "mpi"), lambda name: name in missing)
        return {"gloo": gloo, "dist2": {**ours, **own}, "beyond": beyond}

    def kill(self, mutant: Mutant) -> Outcome:
        """Return the outcome of the test that must fail with a wrong function."""
        job = Job("dist2", mutant.world_size, mutant.played)
        return self.run(job, lambda name: name == mutant.test, mutant)[mutant.test]

    def run(self, job: Job, wanted: Callable[[str], bool], mutant: Mutant | None = None) -> Outcomes:
        """Run the tests of a job in a fork of this process."""

        def prepare(module: Any) -> None:
            if job.system == "dist2":
                replacement = replace_in(module, job.played)
                if mutant is not None:
                    replacement.changed[mutant.function] = mutant.wrong()

        with tempfile.NamedTemporaryFile("r") as results:
            pid = os.fork()
            if not pid:
                try:
                    Path(results.name).write_text(json.dumps(self._outcomes(job, wanted, prepare)))
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            return {name: Outcome(**each) for name, each in json.load(results).items()}

    def _outcomes(
        self, job: Job, wanted: Callable[[str], bool], prepare: Callable[[Any], None]
    ) -> dict[str, Any]:
        suite = Suite(job, prepare)
        outcomes = {}
        for name in filter(wanted, suite.names()):
            outcome = suite.run(name)
            outcomes[name] = attrs.asdict(outcome)
            if self.verbose:
                told = f"{outcome.status:8}{outcome.took_s:6.2f} s {job}: {name} {outcome.reason}"
                print(told, file=sys.stderr, flush=True)
        return outcomes

    def _asked(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


if __name__ == "__main__":
    main()
