"""Every collective of a running group is visible to Prometheus: start the control plane, scrape it.

python examples/scraping.py                                   # one rank
torchrun --nproc-per-node 4 examples/scraping.py              # four, each with a control plane
"""

from __future__ import annotations

import os
import time

import torch
from prometheus_client.parser import text_string_to_metric_families

import dist2
import observability

STEPS = 200
SLOW_RANK = 1


def new_group() -> dist2.ProcessGroup:
    """Return a group of the ranks that torchrun started; of one rank where it did not."""
    if "RANK" in os.environ:
        return dist2.new_group("socket", timeout=60, name="training")
    return dist2.new_group(
        "socket", timeout=60, name="training", store=dist2.HashStore(), rank=0, world_size=1
    )


def scrape(server: observability.Server) -> dict[str, float]:
    """Fetch ``/metrics``, with TLS and the secret if they are set; return the figures of this example."""
    text = observability.fetch(f"{server.url}/metrics", server.token).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    ours = [sample for sample in samples if sample.labels.get("op") == "all_reduce"]
    return {
        sample.name: sample.value
        for sample in ours
        if "le" not in sample.labels and "error" not in sample.labels
    }


def main() -> None:
    with new_group() as pg, observability.start(pg) as server:
        gradient = torch.ones(1024)
        for _ in range(STEPS):
            if pg.rank() == SLOW_RANK:
                time.sleep(0.001)  # this one computes longer
            pg.all_reduce(gradient.fill_(1))

        seen = scrape(server)
        assert seen["dist2_operations_total"] == STEPS
        assert seen["dist2_bytes_total"] == STEPS * gradient.nbytes

        # The same with quantiles, ready made:
        metrics = observability.read_metrics(server.url, server.token)
        p50, p99 = (metrics.quantile(q, op="all_reduce") * 1e6 for q in (0.5, 0.99))
        assert 0 < p50 <= p99

        # Inside of collectives ranks wait for each other: the one that waits least holds the others up.
        waited_s = metrics.value("dist2_peer_wait_seconds_total")
        times = torch.empty(pg.size())
        pg.all_gather_single(times, torch.tensor([waited_s]))
        slowest = int(times.argmin())
        if pg.size() > SLOW_RANK:
            assert slowest == SLOW_RANK
        if pg.rank() == 0:
            print(f"{STEPS} all_reduce scraped from {server.url}/metrics: p50 {p50:.1f} us, p99 {p99:.1f} us")
            print(f"the others waited for rank {slowest}" if pg.size() > 1 else "a single rank never waits")
            print("ok")


if __name__ == "__main__":
    main()
