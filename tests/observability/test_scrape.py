"""Reading metrics back: quantiles from buckets, and which rank the others wait for."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from support.fake_groups import FakeGroup, info_of

import dist2
from dist2.errors import InvalidUsageError
from dist2.operation.instruments import dispatch
from observability.exposition import registry_of
from observability.metrics import Metrics
from observability.scrape import Scrape, parse_metrics, quantile_of, read_metrics, slowest_rank


def scrape_of(*took_ns: int) -> Scrape:
    metrics = Metrics()
    group = FakeGroup(info_of(), metrics)
    signature = group.signature()
    for each in took_ns:
        group.run(signature, took_ns=each)
    return parse_metrics(generate_latest(registry_of(metrics)).decode())


@given(st.lists(st.integers(min_value=1100, max_value=10**9), min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(durations: list[int], q: float) -> None:
    """Buckets double, so that an estimate is within a factor of two of the value at that place."""
    estimate_ns = scrape_of(*durations).quantile(q, op="all_reduce") * 1e9
    true_ns = sorted(durations)[max(0, math.ceil(q * len(durations)) - 1)]
    assert true_ns / 2 <= estimate_ns <= true_ns * 2


def test_quantiles_interpolate() -> None:
    assert quantile_of([(1.0, 0.0), (2.0, 10.0), (math.inf, 10.0)], 0.5) == pytest.approx(1.5)
    assert quantile_of([(1.0, 4.0), (2.0, 8.0), (math.inf, 8.0)], 0.25) == pytest.approx(0.5)
    assert quantile_of([(1.0, 0.0), (math.inf, 3.0)], 0.5) == 1.0
    assert math.isnan(quantile_of([], 0.5))
    assert math.isnan(quantile_of([(1.0, 0.0), (math.inf, 0.0)], 0.5))
    for q in (99, "0.99"):
        with pytest.raises(InvalidUsageError, match=f"q must be between 0 and 1, got {q!r}"):
            quantile_of([], q)  # type: ignore[arg-type]  # a str is wrong


def test_many_durations_give_a_good_median() -> None:
    durations = [20_000 + 37 * step for step in range(500)]
    estimate_s = scrape_of(*durations).quantile(0.5)
    assert estimate_s == pytest.approx(statistics.median(durations) / 1e9, rel=0.25)


def test_the_slowest_rank_is_the_one_that_was_found_to_be_late() -> None:
    told = parse_metrics(
        "# TYPE dist2_straggler_seconds counter\n"
        'dist2_straggler_seconds_total{rank="1"} 0.5\n'
        'dist2_straggler_seconds_total{rank="2"} 7.5\n'
    )
    # Rank 1 spends the least time inside operations: it may just have nothing to do.
    others = {1: scrape_of(9_000, 9_000), 2: scrape_of(85_000, 85_000)}
    assert slowest_rank({0: told, **others}) == 2
    assert slowest_rank(others) is None
    with pytest.raises(InvalidUsageError, match="source must hold"):
        slowest_rank({})
    with pytest.raises(InvalidUsageError, match="source must be a group, a URL, or a dict by rank, got list"):
        slowest_rank([])  # type: ignore[arg-type]  # wrong, on purpose
    with pytest.raises(InvalidUsageError, match="url must start with http"):
        slowest_rank("127.0.0.1:9400")
    with pytest.raises(InvalidUsageError, match="no control plane runs in this process"):
        slowest_rank()


def test_without_a_recorder_no_rank_is_held_for_punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    with dist2.new_group("fake", 20, rank=0, world_size=1) as pg:
        assert slowest_rank(pg) is None
        monkeypatch.setattr(dispatch, "instruments", ())
        with pytest.raises(InvalidUsageError, match="unset DIST2_INSTRUMENTS"):
            slowest_rank(pg)


def test_the_url_must_be_one() -> None:
    with pytest.raises(InvalidUsageError, match="'file:///etc/passwd'"):
        read_metrics("file:///etc/passwd")
    with pytest.raises(InvalidUsageError, match="url must start with http"):
        read_metrics(None)  # type: ignore[arg-type]  # wrong


def test_a_token_that_cannot_be_sent_is_refused_without_telling_it() -> None:
    for token in ("schlüssel", "new\nline", b"bytes"):
        with pytest.raises(InvalidUsageError, match="token must be a str of printable ASCII") as caught:
            read_metrics("http://127.0.0.1:1", token)  # type: ignore[arg-type]  # bytes are wrong
        assert str(token) not in str(caught.value)
