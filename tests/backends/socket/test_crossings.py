"""Finding constants: the turning point of two rows of times, and the constant that turns selection there."""

from __future__ import annotations

import pytest
from crossings import ALWAYS, CROSSINGS, NEVER, Crossing, turning_point
from hypothesis import given
from hypothesis import strategies as st

from dist2.backends.socket.algorithms.request import Request
from dist2.backends.socket.selection import select
from dist2.backends.socket.tuning import CROWDS, DEFAULT_THRESHOLDS, MAPPED, ROWS, column
from dist2.cli.bench.sizes import parse_size, size_text
from dist2.operation.kinds import OpKind

SIZES = [1 << shift for shift in range(12, 20)]


@pytest.mark.parametrize("last", range(1, len(SIZES)))
def test_the_turning_point_lies_between_the_last_won_and_the_first_lost_size(last: int) -> None:
    short = [float(size) for size in SIZES]
    long = [size * (1.2 if index < last else 0.8) for index, size in enumerate(SIZES)]
    assert SIZES[last - 1] <= turning_point(SIZES, short, long) < SIZES[last]


def test_one_spoiled_time_does_not_move_it() -> None:
    short = [1.0, 1, 1, 1.5, 1, 9, 9, 9]
    long = [2.0, 2, 2, 1.0, 2, 3, 3, 3]
    assert SIZES[4] <= turning_point(SIZES, short, long) < SIZES[5]


def test_where_one_always_wins_it_gets_all_that_was_measured() -> None:
    slow, fast = [2.0] * len(SIZES), [1.0] * len(SIZES)
    assert turning_point(SIZES, fast, slow) == SIZES[-1]
    assert turning_point(SIZES, slow, fast) < SIZES[0]


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=len(SIZES)))
def test_no_other_size_would_lose_less(times: list[tuple[float, float]]) -> None:
    short, long = [pair[0] for pair in times], [pair[1] for pair in times]
    sizes = SIZES[: len(times)]

    def loss(limit: int) -> float:
        product = 1.0
        for size, own, other in zip(sizes, short, long, strict=True):
            product *= own / other if size <= limit else 1
        return product

    least = min(loss(limit) for limit in [0, *sizes])
    assert loss(turning_point(sizes, short, long)) == pytest.approx(least)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "crossing", [each for each in CROSSINGS if not each.plain], ids=lambda each: each.constant
)
def test_the_constant_turns_selection_at_the_size(crossing: Crossing, ranks: int) -> None:
    size = 300 << 10
    limits = crossing.changed(DEFAULT_THRESHOLDS, crossing.value_at(size, ranks), ranks)

    def choice(nbytes: int) -> str:
        request = Request(crossing.kind, ranks, (nbytes // 4,), itemsize=4, lends=False)
        return select(request, limits).name

    assert choice(size) == choice(size // 2) != choice(size + 64) == choice(2 * size)


@pytest.mark.parametrize("ranks", [2, 3, 16, 40])
@pytest.mark.parametrize("crossing", CROSSINGS, ids=lambda each: each.constant)
def test_the_two_variants_differ_in_the_constant_alone(crossing: Crossing, ranks: int) -> None:
    short, long = crossing.thresholds(ALWAYS, ranks), crossing.thresholds(NEVER, ranks)
    assert crossing.changed(short, NEVER, ranks) == long != short
    assert [case.nbytes for case in crossing.cases][-1] == crossing.high


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("crossing", CROSSINGS, ids=lambda each: each.constant)
def test_noise_keeps_the_default_and_a_clear_gain_does_not(crossing: Crossing, ranks: int) -> None:
    sizes = [case.nbytes for case in crossing.cases]
    ones, slow = [1.0] * len(sizes), [2.0] * len(sizes)
    noisy = [1.08 if at % 2 else 0.93 for at in range(len(sizes))]
    default = crossing.default(ranks)
    for short, long in ((ones, noisy), (noisy, ones), (ones, ones)):
        assert crossing.best(sizes, short, long, ranks) == default
    assert crossing.best(sizes, ones, slow, ranks) >= min(default, crossing.value_at(sizes[-1], ranks))
    assert crossing.best(sizes, slow, ones, ranks) <= max(default, crossing.value_at(sizes[0], ranks))
    by_default = [1.0 if crossing.value_at(size, ranks) <= default else 2.0 for size in sizes]
    opposite = [2.0 if each == 1 else 1.0 for each in by_default]
    assert crossing.best(sizes, by_default, opposite, ranks) == default
    # All sizes are on the same side of the default: another constant serves them all.
    moved = {crossing.best(sizes, *times, ranks) for times in ((ones, slow), (slow, ones))}
    assert moved != {default}


ROW_CROSSINGS = [each for each in CROSSINGS if each.constant in ROWS]


def test_every_row_is_measured() -> None:
    assert {each.constant for each in ROW_CROSSINGS} == set(ROWS)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 40])
@pytest.mark.parametrize("crossing", ROW_CROSSINGS, ids=lambda each: each.constant)
def test_what_is_found_about_some_ranks_is_for_them_alone(crossing: Crossing, ranks: int) -> None:
    limits = crossing.changed(DEFAULT_THRESHOLDS, 12345, ranks)
    before, after = getattr(DEFAULT_THRESHOLDS, crossing.constant), getattr(limits, crossing.constant)
    assert [at for at in range(len(CROWDS)) if before[at] != after[at]] == [column(ranks)]
    assert crossing.changed(limits, before[column(ranks)], ranks) == DEFAULT_THRESHOLDS

    def choice(nbytes: int) -> object:
        whole = crossing.kind in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.BROADCAST)
        counts = (nbytes,) if whole else (nbytes, *[0] * (ranks - 1))
        lends = crossing.constant in MAPPED
        request = Request(crossing.kind, ranks, counts, slot_bytes=1 << 20, received=counts, lends=lends)
        return select(request, limits).name

    # Tensors are read in place from a size on; others are short up to one.
    last = 12344 if crossing.constant in MAPPED else 12345
    assert choice(last - 1) == choice(last) != choice(last + 1) == choice(last + 2)


@given(st.integers(0, 1 << 40))
def test_a_size_that_is_written_is_read(nbytes: int) -> None:
    assert parse_size(size_text(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-4", "1.5KiB", "8 KB", "8 KiB 3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
