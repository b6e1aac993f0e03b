"""Overlap of a long asynchronous all_reduce with other work, and the loss of either.

    python benchmarks/overlap.py                 # 2 ranks, 64 MiB, three situations
    python benchmarks/overlap.py --situation wire --gbit 5

Each round times the all_reduce alone, the other work alone, both one after the other, and both at once. With
C and W the first two and B the last, the efficiency is (C + W - B) / min(C, W): 1 where the shorter one is
free, 0 where nothing is gained. The possible gain depends on the resources that each of the two needs:

* ``cores``: each rank has one core, and multiplies matrices on it. Inside a host an all_reduce is copying and
  adding by the same core, so there is nothing to gain; 0 says that nothing is lost either.
* ``device``: the other work needs no core, as that of an accelerator; the rank sleeps for its time.
* ``wire``: each rank is a host of its own (a network namespace, which takes root) with a core, and multiplies
  matrices on it. The wire between them carries so many Gbit/s and no more (a token bucket of the kernel's),
  so that an all_reduce mostly waits for it. Its own computation still takes time from the core.

Then, in each situation: many small asynchronous operations at once, and small ones beside messages in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from namespaces import INTERFACE, Hosts, NoPrivilegeError

from dist2.cli.bench.stopping import stop_as_by_ctrl_c

RESULTS = Path(__file__).parent / "results" / "overlap.json"
SITUATIONS = {"cores": "products", "device": "device", "wire": "products"}
"""The work of each."""

SCRIPT = str(Path(__file__).with_name("overlap_rank.py"))


def start_here(command: list[str]) -> subprocess.Popen[str]:
    """Start a rank on this host."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def environment() -> dict[str, str]:
    """Return that of a rank: one thread for products."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def narrow(hosts: Hosts, gbit: float) -> None:
    """Let the wire carry so much and no more, both ways."""
    bucket = ("rate", f"{gbit}gbit", "burst", "512kb", "latency", "100ms")
    for namespace in hosts.namespaces:
        namespace.run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket)


def run(situation: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of a situation; return the results of the first one.

    Raises:
        NoPrivilegeError: It takes network namespaces, which cannot be made here.
        RuntimeError: A rank failed; its output is on the terminal.
    """
    ranks = 2 if situation == "wire" else options.ranks
    with tempfile.TemporaryDirectory(prefix="dist2-overlap-") as folder, ExitStack() as stack:
        command = [sys.executable, SCRIPT, "--ranks", str(ranks), "--store", f"{folder}/store"]
        command += [
            "--work",
            SITUATIONS[situation],
            "--mib",
            str(options.mib),
            "--rounds",
            str(options.rounds),
        ]
        command += ["--shared"] * options.shared
        if situation == "wire":
            hosts = stack.enter_context(Hosts(2))
            narrow(hosts, options.gbit)
            processes = [
                hosts.start(
                    rank, [*command, "--rank", str(rank), "--address", hosts.address(rank)], environment()
                )
                for rank in range(ranks)
            ]
        else:
            processes = [start_here([*command, "--rank", str(rank)]) for rank in range(ranks)]
        outputs = outputs_of(processes)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in processes]}")
    found: dict[str, Any] = json.loads(outputs[0])
    return found


def outputs_of(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Return the standard output of processes, once all have ended; end them if interrupted."""
    try:
        return [process.communicate()[0] for process in processes]
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
            process.wait()
        raise


def report(situation: str, found: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Print the results; return the medians in seconds, and the efficiency."""
    medians = {name: statistics.median(rounds) for name, rounds in found["rounds_s"].items()}
    used = {name: statistics.median(rounds) for name, rounds in found["processor_s"].items()}
    reduce_s, work_s, both_s = (medians[name] for name in ("all_reduce", "work", "at once"))
    efficiency = (reduce_s + work_s - both_s) / min(reduce_s, work_s)
    wire = f", {options.gbit:g} Gbit/s" if situation == "wire" else ""
    print(f"\n{situation}{wire}: all_reduce of {options.mib} MiB and other work, median ms (of a processor)")
    for name, median_s in medians.items():
        print(f"  {name:<12}{median_s * 1e3:>9.2f} ({used[name] * 1e3:.2f})")
    print(f"  overlap efficiency {efficiency:.2f}; at once / sum {both_s / (reduce_s + work_s):.2f}")
    for title, key in (("100 of 8 bytes, each", "outstanding_us"), ("8 bytes beside messages", "beside_us")):
        print(f"  {title}: " + ", ".join(f"{name} {value:.1f} us" for name, value in found[key].items()))
    return {**medians, "efficiency": efficiency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--situation", nargs="+", choices=SITUATIONS, default=list(SITUATIONS))
    parser.add_argument("--ranks", type=int, default=2, help="of those that share this host")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gbit", type=float, default=2.0, help="rate of the wire")
    parser.add_argument("--shared", action="store_true", help="tensors of dist2.shared_empty")
    options = parser.parse_args()
    results: dict[str, Any] = {"options": vars(options)}
    for situation in options.situation:
        try:
            found = run(situation, options)
        except NoPrivilegeError as error:
            print(f"\n{situation}: not measured: {error}")
            continue
        results[situation] = {**report(situation, found, options), **found}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1))
    print(f"\nrounds: {RESULTS}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
