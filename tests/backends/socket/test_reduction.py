"""Folds of every dtype and reduction, against plain Python numbers or plain torch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist2.backends.socket import reduction as module
from dist2.backends.socket.reduction import bind_fold, check_supported, fold, is_exact, prepare
from dist2.errors import InvalidUsageError
from dist2.operation.kinds import AVG, MAX, SUM, ReduceKind, Reduction, premul_sum

ALL = [
    Reduction.of(getattr(torch.distributed.ReduceOp, name.name))
    for name in ReduceKind
    if name.value != "premul_sum"
]
BY_KIND = {each.kind: each for each in ALL}
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
BITWISE = (ReduceKind.BAND, ReduceKind.BOR, ReduceKind.BXOR)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype is second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def random_bits(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def random_floats(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(numel, 2, generator=generator, dtype=torch.float64)).to(
            dtype
        )
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 10).to(dtype)


COMBINE: dict[ReduceKind, Callable[[int, int], int]] = {
    ReduceKind.SUM: operator.add,
    ReduceKind.AVG: operator.add,
    ReduceKind.PRODUCT: operator.mul,
    ReduceKind.MIN: min,
    ReduceKind.MAX: max,
    ReduceKind.BAND: operator.and_,
    ReduceKind.BOR: operator.or_,
    ReduceKind.BXOR: operator.xor,
}


def wrapped(value: int, dtype: torch.dtype) -> int:
    """Return a number as a register of the dtype holds it."""
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.is_signed and value >> (bits - 1) else value


def expected_integers(tensors: Sequence[torch.Tensor], kind: ReduceKind) -> list[int]:
    dtype, count = tensors[0].dtype, len(tensors)
    results = [
        wrapped(reduce(COMBINE[kind], column), dtype)
        for column in zip(*(tensor.tolist() for tensor in tensors), strict=True)
    ]
    if kind is ReduceKind.AVG:
        return [divided(result, count) for result in results]
    return results


def divided(value: int, count: int) -> int:
    quotient = abs(value) // count
    return quotient if value >= 0 else -quotient


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("kind", COMBINE, ids=lambda kind: kind.value)
def test_integers_are_those_of_their_register(dtype: torch.dtype, kind: ReduceKind) -> None:
    for count in (1, 2, 3, 5):
        tensors = [random_bits(dtype, 67, seed=10 * count + rank) for rank in range(count)]
        result = torch.empty_like(tensors[0])
        fold(result, tensors, BY_KIND[kind])
        assert result.tolist() == expected_integers(tensors, kind)


@given(
    values=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=9),
    kind=st.sampled_from([ReduceKind.AVG, ReduceKind.MIN, ReduceKind.MAX]),
    dtype=st.sampled_from([torch.uint16, torch.uint32, torch.uint64]),
)
@settings(max_examples=150)
def test_unsigned_division_and_order(values: list[int], kind: ReduceKind, dtype: torch.dtype) -> None:
    tensors = [torch.tensor([value % (1 << (8 * dtype.itemsize))], dtype=dtype) for value in values]
    result = torch.empty_like(tensors[0])
    fold(result, tensors, BY_KIND[kind])
    assert result.tolist() == expected_integers(tensors, kind)


@pytest.mark.parametrize("dtype", (torch.int8, torch.uint8), ids=str)
def test_more_ranks_than_the_dtype_counts(dtype: torch.dtype) -> None:
    combine = bind_fold(AVG, dtype, world_size=300)
    result = torch.empty(2, dtype=dtype)
    combine(result, [torch.tensor([100, 3], dtype=dtype), torch.tensor([20, 1], dtype=dtype)])
    assert result.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ReduceKind.SUM, any),
        (ReduceKind.MAX, any),
        (ReduceKind.BOR, any),
        (ReduceKind.PRODUCT, all),
        (ReduceKind.MIN, all),
        (ReduceKind.BAND, all),
        (ReduceKind.BXOR, lambda column: sum(column) % 2 == 1),
    ],
    ids=lambda value: getattr(value, "value", ""),
)
def test_truth_values(kind: ReduceKind, expected: Callable[[Sequence[bool]], bool]) -> None:
    for count in (1, 2, 3, 4):
        columns = list(itertools.product((False, True), repeat=count))
        tensors = [torch.tensor([column[rank] for column in columns]) for rank in range(count)]
        result = torch.empty_like(tensors[0])
        fold(result, tensors, BY_KIND[kind])
        assert result.tolist() == [expected(column) for column in columns]
        assert result.view(torch.uint8).max() <= 1


def left_fold(tensors: Sequence[torch.Tensor], kind: ReduceKind) -> torch.Tensor:
    """Combine in order in float32 or wider, one operation after the other, and round at the end."""
    dtype = tensors[0].dtype
    wide = [tensor.float() if dtype.itemsize == 2 else tensor for tensor in tensors]
    result = wide[0]
    for tensor in wide[1:]:
        if kind in (ReduceKind.SUM, ReduceKind.AVG):
            result = result + tensor
        elif kind is ReduceKind.PRODUCT:
            result = result * tensor
        else:
            result = (torch.minimum if kind is ReduceKind.MIN else torch.maximum)(result, tensor)
    if kind is ReduceKind.AVG:
        count = len(tensors)
        result = (
            torch.view_as_complex(torch.view_as_real(result) / count) if dtype.is_complex else result / count
        )
    return result.to(dtype)


@pytest.mark.parametrize("dtype", (*FLOATS, *COMPLEX), ids=str)
@pytest.mark.parametrize(
    "kind", [ReduceKind.SUM, ReduceKind.AVG, ReduceKind.PRODUCT, ReduceKind.MIN, ReduceKind.MAX]
)
def test_floats_are_folded_from_left_to_right_and_rounded_once(dtype: torch.dtype, kind: ReduceKind) -> None:
    if dtype.is_complex and kind in (ReduceKind.MIN, ReduceKind.MAX):
        return
    for count in (1, 2, 3, 7):
        tensors = [random_floats(dtype, 133, seed=rank) for rank in range(count)]
        result = torch.empty_like(tensors[0])
        fold(result, tensors, BY_KIND[kind])
        expected = left_fold(tensors, kind)
        if kind is ReduceKind.PRODUCT and dtype.is_complex:
            torch.testing.assert_close(result, expected)
        else:
            assert same_bits(result, expected)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_precision_keeps_small_contributions(dtype: torch.dtype) -> None:
    """With rounding at every step, each of a hundred small numbers would be lost beside 1."""
    small = 2.0**-12
    tensors = [torch.tensor([1.0], dtype=dtype)] + [torch.tensor([small], dtype=dtype)] * 100
    result = torch.empty(1, dtype=dtype)
    fold(result, tensors, SUM)
    assert result.item() == torch.tensor(1.0 + 100 * small).to(dtype).item() != 1.0


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.uint16, torch.int32), ids=str)
@pytest.mark.parametrize("kind", [ReduceKind.SUM, ReduceKind.AVG, ReduceKind.MAX])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_target_may_be_any_of_the_sources(dtype: torch.dtype, kind: ReduceKind, count: int) -> None:
    tensors = [random_bits(torch.int16, 40, seed=rank).to(dtype) for rank in range(count)]
    expected = torch.empty_like(tensors[0])
    fold(expected, tensors, BY_KIND[kind])
    for place in range(count):
        sources = [tensor.clone() for tensor in tensors]
        fold(sources[place], sources, BY_KIND[kind])
        assert same_bits(sources[place], expected)
        others = [source for rank, source in enumerate(sources) if rank != place]
        kept = [tensor for rank, tensor in enumerate(tensors) if rank != place]
        assert all(map(same_bits, others, kept))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint16), ids=str)
@pytest.mark.parametrize("place", [None, 0, 2])
def test_long_folds_go_by_blocks(
    dtype: torch.dtype, place: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [random_bits(torch.int16, 1001, seed=rank).to(dtype) for rank in range(4)]
    expected = torch.empty_like(tensors[0])
    fold(expected, tensors, MAX)
    monkeypatch.setattr(module, "BLOCK_BYTES", 256)
    target = torch.empty_like(tensors[0]) if place is None else tensors[place]
    fold(target, tensors, MAX)
    assert same_bits(target, expected)


def test_two_floats_take_one_call_and_no_memory() -> None:
    combine = bind_fold(SUM, torch.float32, 2)
    first, second, result = torch.ones(3), torch.ones(3), torch.empty(3)
    with torch.profiler.profile(profile_memory=True) as profile:
        combine(result, (first, second))
    assert [event.name for event in profile.events() if event.name.startswith("aten::")] == ["aten::add"]
    assert all(event.self_cpu_memory_usage <= 0 for event in profile.events())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_complex_numbers_are_pairs_of_halves() -> None:
    tensors = [random_floats(torch.float16, 20, seed=rank) for rank in range(3)]
    for kind in (ReduceKind.SUM, ReduceKind.AVG):
        expected, result = torch.empty(20, dtype=torch.float16), torch.empty(10, dtype=torch.complex32)
        fold(expected, tensors, BY_KIND[kind])
        fold(result, [tensor.view(torch.complex32) for tensor in tensors], BY_KIND[kind])
        assert same_bits(result.view(torch.float16), expected)


def test_not_a_number_wins_minimum_and_maximum() -> None:
    nan = float("nan")
    for kind in (ReduceKind.MIN, ReduceKind.MAX):
        result = torch.empty(3)
        fold(result, [torch.tensor([nan, 1, 2]), torch.tensor([1, nan, 3]), torch.zeros(3)], BY_KIND[kind])
        assert result[:2].isnan().all()
        assert result[2] == (0 if kind is ReduceKind.MIN else 3)


def test_a_partial_average_is_a_sum_and_the_final_one_is_divided_by_the_world_size() -> None:
    partial, final = (bind_fold(AVG, torch.float32, 4, last) for last in (False, True))
    tensors = [torch.tensor([float(value)]) for value in (1, 2, 3, 6)]
    result = tensors[0].clone()
    partial(result, [result, tensors[1]])
    partial(result, [result, tensors[2]])
    assert result.item() == 6
    final(result, [result, tensors[3]])
    assert result.item() == 3


def test_premultiplied_contributions() -> None:
    reduction = premul_sum(0.1)
    tensors = [random_floats(torch.float32, 9, seed=rank) for rank in range(3)]
    prepared = [prepare(tensor, reduction) for tensor in tensors]
    result = torch.empty(9)
    fold(result, prepared, reduction)
    assert same_bits(result, (tensors[0] * 0.1 + tensors[1] * 0.1) + tensors[2] * 0.1)
    assert prepare(tensors[0], SUM) is tensors[0]
    assert not prepare(tensors[0].requires_grad_(), reduction).requires_grad


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_take_whole_factors(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2, 3], dtype=dtype)
    prepared = prepare(tensor, premul_sum(3))
    assert prepared.dtype is dtype
    assert prepared.tolist() == [3, 6, 9]
    with pytest.raises(InvalidUsageError, match=r"whole factor.*0\.5"):
        check_supported(premul_sum(0.5), dtype)


def test_empty_tensors() -> None:
    for dtype, kind in itertools.product((torch.float16, torch.uint16, torch.float32), COMBINE):
        if dtype.is_floating_point and kind in BITWISE:
            continue
        tensors = [torch.empty(0, dtype=dtype) for _ in range(3)]
        fold(tensors[0], tensors, BY_KIND[kind])


@pytest.mark.parametrize(
    ("reduction", "dtypes"),
    [
        (BY_KIND[ReduceKind.AVG], (torch.bool,)),
        (BY_KIND[ReduceKind.MIN], COMPLEX),
        (BY_KIND[ReduceKind.MAX], COMPLEX),
        (BY_KIND[ReduceKind.BAND], (*FLOATS, *COMPLEX)),
        (BY_KIND[ReduceKind.BXOR], (*FLOATS, *COMPLEX)),
        (premul_sum(2), (torch.bool,)),
        *[(each, (torch.float8_e4m3fn, torch.float8_e5m2)) for each in ALL],
    ],
)
def test_what_has_no_meaning_is_refused(reduction: Reduction, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        with pytest.raises(InvalidUsageError) as caught:
            check_supported(reduction, dtype)
        assert reduction.kind.value in str(caught.value)
        assert str(dtype) in str(caught.value)
        with pytest.raises(InvalidUsageError):
            bind_fold(reduction, dtype, 2)


def test_everything_else_is_supported() -> None:
    for reduction, dtype in itertools.product(ALL, (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)):
        refused = (
            (dtype is torch.bool and reduction.kind is ReduceKind.AVG)
            or (not _is_whole(dtype) and reduction.kind in BITWISE)
            or (dtype.is_complex and reduction.kind in (ReduceKind.MIN, ReduceKind.MAX))
        )
        if not refused:
            check_supported(reduction, dtype)


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def test_exactness() -> None:
    for reduction in ALL:
        assert is_exact(reduction, torch.int32)
        assert is_exact(reduction, torch.bool)
    for dtype in FLOATS:
        assert [each.kind.value for each in ALL if is_exact(each, dtype)] == ["min", "max"]
    assert not is_exact(premul_sum(2), torch.float32)
    assert not is_exact(SUM, torch.complex64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_reductions_are_so_in_any_order(dtype: torch.dtype) -> None:
    tensors = [random_floats(dtype, 20, seed=rank) for rank in range(4)]
    results = []
    for order in itertools.permutations(tensors):
        result = torch.empty_like(tensors[0])
        fold(result, order, MAX)
        results.append(result)
    assert all(same_bits(result, results[0]) for result in results)
