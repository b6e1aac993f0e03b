"""Fuzz the decoders with atheris: ``python -m fuzzing [TARGET ...] --seconds N``; `make fuzz` runs all.

Each target runs in a process of its own, guided by coverage, with a limit of time an input and of memory. A
finding is saved, and shown with how to run it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

INPUT_S = 10
MEMORY_MIB = 4096
LONGEST_BYTES = 4096


def fuzz(name: str, arguments: list[str]) -> None:
    """Run one target until it is stopped, or finds something."""
    import atheris

    logging.disable()  # refused inputs are logged
    with atheris.instrument_imports(include=["dist2"]):
        from fuzzing.targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="those of targets.py by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument(
        "--corpus", type=Path, default=Path(".fuzz"), help="kept between runs (default: .fuzz)"
    )
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        fuzz(options.targets[0], _limits(options.corpus / options.targets[0], options.seconds))
    from fuzzing.targets import SEEDS, TARGETS  # not earlier: `fuzz` imports them instrumented

    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("needs atheris: pip install 'dist2[fuzz]'")
    found = [name for name in options.targets or TARGETS if not _held(name, SEEDS, options)]
    print(f"findings in: {', '.join(found)}" if found else "no findings")
    return 1 if found else 0


def _limits(corpus: Path, seconds: int) -> list[str]:
    return [
        str(corpus),
        f"-artifact_prefix={corpus.parent}/finding-{corpus.name}-",
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={LONGEST_BYTES}",
        "-verbosity=0",
        "-print_final_stats=1",
    ]


def _held(name: str, seeds: list[bytes], options: argparse.Namespace) -> bool:
    """Fuzz a target in a process of its own; False if something was found."""
    corpus = options.corpus / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed[:LONGEST_BYTES])
    command = [sys.executable, "-m", "fuzzing", name, "--alone", "--seconds", str(options.seconds)]
    print(f"== {name}", flush=True)
    ended = subprocess.run([*command, "--corpus", str(options.corpus)], check=False)
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
