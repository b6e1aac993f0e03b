"""`dist2.register_type`, and the types that travel without it."""

from __future__ import annotations

import enum
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import TENANTS, run_ranks

import dist2
from dist2 import InvalidUsageError, ProcessGroup, WireError
from dist2.group import object_types
from dist2.group.serialization import decode, encode


@dist2.register_type
class Color(enum.Enum):
    RED = "r"


@dist2.register_type
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dist2.register_type
class Point(NamedTuple):
    x: float
    of: Any


@dist2.register_type
@dataclass(frozen=True)
class Box:
    low: Point
    color: Color
    area: int = field(init=False, default=4)


class Interval:
    def __init__(self, low: float, high: float) -> None:
        if low > high:
            raise KeyError("empty")
        self.low, self.high = low, high

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interval) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # not hashable


dist2.register_type(Interval, lambda it: (it.low, it.high), lambda it: Interval(*it))

VALUES = [
    Color.RED,
    Access.READ | Access.WRITE,
    Access(0),
    Point(1.5, torch.Size([2])),
    Box(Point(1, None), Color.RED),
    [Interval(1, 2), {"deep": (Interval(3, 4),)}],
    slice(1, None, 2),
    range(3, 30, 4),
    Decimal("1.20E+5"),
    uuid.UUID(int=7),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_travel(value: object) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_values_of_torch_travel() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    found = decode(encode(generator))
    assert torch.equal(torch.rand(4, generator=found), torch.rand(4, generator=generator))
    parameter = decode(encode(torch.nn.Parameter(torch.ones(2), requires_grad=False)))
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad
    assert parameter.tolist() == [1, 1]


def test_exceptions_travel_as_text() -> None:
    error = decode(encode(KeyError("lost")))
    assert type(error) is RuntimeError
    assert str(error) == "KeyError: 'lost'"


def test_ranks_exchange_objects_of_their_types() -> None:
    def body(pg: ProcessGroup) -> None:
        found = pg.all_gather_object(Interval(pg.rank(), 5))
        assert found == [Interval(0, 5), Interval(1, 5)]

    run_ranks(2, body, TENANTS[0])


def test_a_type_that_the_receiver_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode([Interval(1, 2)])
    monkeypatch.setattr(object_types, "_by_name", {})
    with pytest.raises(InvalidUsageError, match=r"of rank 3 holds a value of type .*Interval, .*_type"):
        decode(data, source=3)


def test_errors_of_the_functions_are_told() -> None:
    data = encode(Interval(1, 2)).replace(encode((1, 2))[1:], encode((2, 1))[1:])
    with pytest.raises(WireError, match=r"decode of type .*Interval raised KeyError"):
        decode(data)

    class Odd:
        pass

    dist2.register_type(Odd, lambda it: 1 / 0, lambda it: Odd())
    with pytest.raises(InvalidUsageError, match=r"obj\[0\] .* raised ZeroDivisionError"):
        encode([Odd()])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InvalidUsageError, match="cls must be a class, got 3"):
        dist2.register_type(3)
    with pytest.raises(InvalidUsageError, match="give both, or neither"):
        dist2.register_type(Interval, list)
    with pytest.raises(InvalidUsageError, match="no enum, named tuple or dataclass"):
        dist2.register_type(type("Other", (), {}))
    with pytest.raises(InvalidUsageError, match=r"by dist2\.register_type"):
        encode(object())


@settings(max_examples=200)
@given(st.sampled_from([*VALUES, torch.Generator(), torch.nn.Parameter(torch.ones(1))]), st.data())
def test_bytes_of_a_hostile_peer_raise_or_make_known_types(value: object, data: Any) -> None:
    content = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(1, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidUsageError, WireError):
        decode(bytes(content))
