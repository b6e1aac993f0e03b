"""Speed of dist2 between hosts, beside Gloo. Hosts are network namespaces on this machine, two ranks each.

    python benchmarks/hosts.py                              # two hosts
    python benchmarks/hosts.py --hosts 4 --op all_reduce --sizes 1MiB
    python benchmarks/hosts.py --delay-ms 1                 # latency: how many times does an operation cross?
    python benchmarks/hosts.py --congestion cubic           # where the machine's own is another

Both contenders run in the same processes, take turns round by round, and are checked first. Bytes on the
wire are counted by the first host's interface, all headers included. Requires root, or unshare --net
--map-root-user; without, it prints the reason and skips.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from drawing import draw
from namespaces import Hosts, NoPrivilegeError
from rich.console import Console
from rich.table import Table

from dist2.cli.bench.report import machine
from dist2.cli.bench.sizes import parse_size, rate_text, ratio_text, size_text, time_text
from dist2.cli.bench.stopping import stop_as_by_ctrl_c
from dist2.cli.bench.workloads import OPERATIONS

RESULTS = Path(__file__).parent / "results"
BESIDE = 2
STREAM = "stream"
STREAM_MESSAGES = 8
SIZES = ("8", "4KiB", "64KiB", "256KiB", "1MiB", "8MiB", "32MiB")
SHORT = ("8", "1KiB", "16KiB")
IPERF_S = 1.0
IPERFS = {"iperf3": (), "iperf3 -C reno": ("-C", "reno")}

_CROSSINGS = {
    "all_reduce": 1,
    "reduce": 1,
    "reduce_scatter_single": 1,
    "all_gather_single": 1,
    "broadcast": 1,
    "gather": 1,
    "scatter": 1,
    "all_to_all_single": 1,
    "send_recv": 2,
    "barrier": 1,
}
"""How often something must cross between hosts, one after the other: each may send to all others at once."""


def wire_bytes(op: str, nbytes: int, hosts: int) -> float | None:
    """Return the bytes that the first host must send, for one rank a host; None if not of interest."""
    others = hosts - 1
    if op == "all_reduce":
        return 2 * others / hosts * nbytes
    if op in ("reduce_scatter_single", "all_gather_single"):
        return others / hosts * nbytes * (1 if op == "reduce_scatter_single" else others)
    if op == "broadcast":
        return nbytes * (1 if hosts == 2 else (hosts - 1).bit_length())
    return None


def run_ranks(hosts: Hosts, cases: list[tuple[str, int]], rounds: int) -> list[dict[str, Any]]:
    """Start a rank in each place and return the results of the first one.

    Raises:
        RuntimeError: A rank failed; its output is on the terminal.
    """
    world_size = hosts.count * BESIDE
    script = str(Path(__file__).with_name("hosts_rank.py"))
    with tempfile.TemporaryDirectory(prefix="dist2-hosts-") as folder:
        common = ["--ranks", world_size, "--beside", BESIDE, "--rounds", rounds]
        common += ["--store", f"{folder}/store", "--cases", json.dumps(cases)]
        ranks = [
            hosts.start(
                rank // BESIDE,
                [sys.executable, script, "--rank", str(rank), "--address", hosts.address(rank // BESIDE)]
                + [str(each) for each in common],
                {**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world_size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    found: list[dict[str, Any]] = json.loads(outputs[0])
    return found


def iperf(hosts: Hosts, rates: dict[str, list[float]]) -> None:
    """Add the rate of one stream of iperf3 from the first to the last host, in bytes per second.

    By the system's congestion control and by that of dist2's links to near hosts.
    """
    if shutil.which("iperf3") is None:
        return
    for name, arguments in IPERFS.items():
        rates.setdefault(name, []).append(_iperf(hosts, arguments))


def _iperf(hosts: Hosts, arguments: tuple[str, ...]) -> float:
    last = hosts.count - 1
    server = hosts.start(last, ["iperf3", "-s", "-1", "-B", hosts.address(last), "--forceflush"])
    assert server.stdout is not None  # it is a pipe
    for line in server.stdout:
        if "listening" in line:
            break
    client = hosts.start(0, ["iperf3", "-c", hosts.address(last), "-t", str(IPERF_S), "-J", *arguments])
    report = json.loads(client.communicate()[0])
    server.wait()
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


def bare(hosts: Hosts, sizes: list[int], rounds: int) -> dict[int, float]:
    """Return the rate of a bare stream from the first to the last host, in bytes per second, by size."""
    last = hosts.count - 1
    common = ["--rounds", str(rounds), "--sizes", *(str(size) for size in sizes)]
    command = [sys.executable, str(Path(__file__).with_name("hosts_bare.py")), hosts.address(last)]
    receiver = hosts.start(last, [*command, *common])
    assert receiver.stdout is not None  # it is a pipe
    port = receiver.stdout.readline().strip()
    sender = hosts.start(0, [*command, "--to", port, *common])
    times = json.loads(sender.communicate()[0])
    receiver.wait()
    return {size: STREAM_MESSAGES * size / times[str(size)] for size in sizes}


def show(
    found: list[dict[str, Any]],
    hosts: Hosts,
    iperf_rates: dict[str, list[float]],
    bare_rates: dict[int, float],
    console: Console,
) -> None:
    """Print a table, and write add figures to the JSON as it has them."""
    title = f"{hosts.count} hosts with {BESIDE} ranks each, float32"
    table = Table(
        title=f"{title}{f', {hosts.delay_ms} ms one way by {hosts.delayed_by}' if hosts.delay_ms else ''}"
    )
    for column in ("operation", "bytes", "dist2", "Gloo", "Gloo / dist2", "wire bytes", "of one rank a host"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    if hosts.delay_ms:
        table.add_column("one-way delays")
        table.add_column("theory")
    for each in found:
        own, peer = (statistics.median(each["rounds_s"][name]) for name in ("dist2", "Gloo"))
        sent = statistics.median(each["sent"]["dist2"])
        theory = wire_bytes(each["op"], each["nbytes"], hosts.count)
        each["theory_bytes"] = theory
        row = [each["op"], size_text(each["nbytes"]), time_text(own), time_text(peer), ratio_text(peer / own)]
        row += [f"{sent:,.0f}", f"{sent / theory:.2f}x" if theory else ""]
        if hosts.delay_ms:
            row += [f"{1000 * own / hosts.delay_ms:.2f}", str(_CROSSINGS.get(each["op"], ""))]
        table.add_row(*row)
    console.print(table)
    streams = [each for each in found if each["op"] == STREAM]
    medians = {name: statistics.median(rates) for name, rates in iperf_rates.items()}
    for each in streams:
        rates = {"bare sockets": bare_rates[each["nbytes"]]}
        for name in ("dist2", "Gloo"):
            rates[name] = STREAM_MESSAGES * each["nbytes"] / statistics.median(each["rounds_s"][name])
        for name, rate in rates.items():
            shares = "".join(f", {100 * rate / most:.0f} % of {peer}" for peer, most in medians.items())
            console.print(
                f"{name}, messages of {size_text(each['nbytes'])} one way: {rate_text(rate)}{shares}"
            )
    for name, rate in medians.items():
        console.print(f"{name}, one stream: {rate_text(rate)}")


def measure(options: argparse.Namespace, console: Console) -> None:
    """Make the hosts, measure, show and save."""
    sizes = options.sizes or [parse_size(each) for each in (SHORT if options.delay_ms else SIZES)]
    cases = [
        (op, nbytes)
        for op in options.op
        for nbytes in ([0] if op == "barrier" else sizes)
        if op != STREAM or nbytes >= 1 << 20
    ]
    with Hosts(options.hosts, options.delay_ms, options.congestion) as hosts:
        rates: dict[str, list[float]] = {}
        bare_rates: dict[int, float] = {}
        streams = [nbytes for op, nbytes in cases if op == STREAM]
        if streams:
            bare_rates = bare(hosts, streams, options.rounds)
            iperf(hosts, rates)
        found = run_ranks(hosts, cases, options.rounds)
        if streams:
            iperf(hosts, rates)
        show(found, hosts, rates, bare_rates, console)
    RESULTS.mkdir(exist_ok=True)
    kinds = ["-delayed"] * bool(options.delay_ms) + [f"-{options.congestion}"] * bool(options.congestion)
    name = f"hosts-{options.hosts}{''.join(kinds)}.json"
    document = {
        "machine": machine(),
        "settings": vars(options),
        "iperf3": rates,
        "bare": bare_rates,
        "cases": found,
    }
    (RESULTS / name).write_text(json.dumps(document, indent=1, default=str))
    plot = (RESULTS / name).with_suffix(".png")
    if any(nbytes for _, nbytes in cases):
        draw(plot, f"{options.hosts} hosts with {BESIDE} ranks each", panels(found))
    console.print(f"saved {RESULTS / name} and {plot}")


def panels(found: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the panels to draw: operations that move bytes."""
    sized = [each for each in found if each["nbytes"]]
    return {
        op: {
            name: [
                (each["nbytes"], statistics.median(each["rounds_s"][name]))
                for each in sized
                if each["op"] == op
            ]
            for name in ("dist2", "Gloo")
        }
        for op in dict.fromkeys(each["op"] for each in sized)
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, choices=(2, 4), default=2)
    parser.add_argument("--op", nargs="+", choices=(*OPERATIONS, STREAM), default=(*OPERATIONS, STREAM))
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay of each host's frames")
    parser.add_argument(
        "--congestion", default="", metavar="NAME", help="congestion control of the hosts, such as cubic"
    )
    console = Console(width=130)
    options = parser.parse_args()
    try:
        measure(options, console)
    except NoPrivilegeError as error:
        console.print(f"skipped: hosts cannot be made here: {error}")


if __name__ == "__main__":
    stop_as_by_ctrl_c()
    main()
