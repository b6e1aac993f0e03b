"""numpy's values in objects: they come back as they were, and bytes from a stranger make no others."""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist2.errors import InvalidUsageError, WireError
from dist2.group.serialization import PICKLED, PLAIN, decode, encode

np = pytest.importorskip("numpy")

SCALARS = [
    *(np.bool_(True), np.int8(-3), np.int64(-(1 << 60)), np.uint8(200), np.uint64((1 << 64) - 1)),
    *(np.float16(0.5), np.float32(0.1), np.float64(0.1), np.complex64(1 - 2j), np.complex128(1e300j)),
    *(np.datetime64("2024-02-29"), np.datetime64("2024-02-29T12:00", "25s"), np.timedelta64(3, "ms")),
    *(np.str_("Zahl"), np.str_(""), np.bytes_(b"ab")),
]
ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.arange(6, dtype=">i4").reshape(2, 3).T,
    np.arange(10, dtype=np.uint16)[::3],
    np.zeros((0, 3), dtype=np.complex64),
    np.array(2.5, dtype=np.float16),
    np.array([True, False]),
    np.array(["2024-02-29", "NaT"], dtype="datetime64[D]"),
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_come_back_as_they_were(value: Any) -> None:
    found = decode(encode({value: [value]}))
    assert type(next(iter(found))) is type(found[value][0]) is type(value)
    assert found[value][0].dtype == value.dtype
    assert found[value] == [value]


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_arrays_come_back_and_can_be_written_to(array: Any) -> None:
    found = decode(encode((array,)))[0]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable
    assert found.flags.c_contiguous


def test_dtypes_come_back() -> None:
    assert decode(encode([np.dtype("float32"), np.dtype(">i8")])) == [np.dtype("float32"), np.dtype(">i8")]


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))

    def __repr__(self) -> str:  # names of tests have it: an address would be another in each process
        return "Bomb()"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.array([Bomb()], dtype=object), "a numpy array of dtype object"),
        (np.array(["a"]), "a numpy array of dtype <U1"),
        (np.zeros(1, dtype="i4,f8"), "a numpy array of dtype .*f0"),
        (np.zeros(1, dtype="i4,f8")[0], "a numpy scalar of dtype .*f0"),
        (np.zeros(1, dtype="V3"), r"a numpy array of dtype \|V3"),
        (np.longdouble(1), "a numpy scalar of dtype float"),
        (np.dtype("O"), "the numpy dtype object"),
        (np.dtype("f4", metadata={"any": Bomb()}), "the numpy dtype float32"),
        (np.float32, "type type"),
        (np.ma.array([1.0]), "type MaskedArray"),
        (type("Mine", (np.float64,), {})(1), "type Mine"),
    ],
    ids=repr,
)
def test_what_holds_more_than_numbers_is_refused_by_place(value: Any, why: str) -> None:
    with pytest.raises(InvalidUsageError, match=rf"obj\['loss'\] cannot travel safely: {why}"):
        encode({"loss": value})


def value_of(*items: Any) -> bytes:
    return bytes([PLAIN]) + msgpack.packb(msgpack.ExtType(8, msgpack.packb(list(items))))


@pytest.mark.parametrize(
    "items",
    [
        (),
        (1,),
        (["<f4"], b"1234"),
        ("<f4", b"1234", b"1234"),
        ("<f4", "1234"),
        ("<f4", b"123"),
        ("<f4", b""),
        ("<f4", b"12345678"),
        ("<f4", [2], b"1234"),
        ("<f4", [-1, -1], b"1234"),
        ("<f4", [True], b"1234"),
        ("<f4", [1.0], b"1234"),
        ("<f4", ["1"], b"1234"),
        ("<f4", [1 << 62, 4], b""),
        ("<f4", [1 << 61, 1 << 61], b""),
        ("<f4", [1] * 100, b"1234"),
        ("<f4", [0, 1 << 61, 1 << 61], b""),
        ("O", b"12345678"),
        ("|O", [1], b"12345678"),
        ("|O8", [1], b"\x01\x02\x03\x04\x05\x06\x07\x08"),
        ("<f4,|O", [1], b"123456789012"),
        ("(2)<f4", [1], b"12345678"),
        ("<f4\n", b"1234"),
        ("|V4", b"1234"),
        ("<U1", b"\xff\xff\xff\xff"),
        ("<U1000000000", [0], b""),
        ("|S0", [1 << 61], b""),
        ("<f16", bytes(16)),
        ("<M8[0s]", bytes(8)),
        ("<M8[D]/9", bytes(8)),
        ("<M8[99999999999s]", bytes(8)),
        ("float32", b"1234"),
        ("object",),
        ("numpy.core.multiarray._reconstruct",),
        ("U", b"text"),
        ("S", "text"),
        ("U", [1], b"1234"),
    ],
    ids=repr,
)
def test_bytes_that_are_no_value_of_numpys(items: tuple[Any, ...]) -> None:
    with pytest.raises(WireError):
        decode(value_of(*items))


def test_a_mask_that_comes_holds_nothing_but_true_and_false() -> None:
    found = decode(value_of("|b1", [4], b"\x00\x01\x80\xff"))
    assert found.tobytes() == b"\x00\x01\x01\x01"
    assert decode(value_of("|b1", b"\x02")).tobytes() == b"\x01"


def test_pickled_arrays_are_not_unpickled() -> None:
    with pytest.raises(InvalidUsageError, match="was pickled"):
        decode(bytes([PICKLED]) + pickle.dumps(np.array([Bomb()], dtype=object)))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_makes_another_value_or_none(place: int, change: int) -> None:
    data = bytearray(
        encode([np.float32(2), np.arange(3), np.array([True]), np.datetime64(1, "25s"), np.str_("a")])
    )
    data[1 + place % (len(data) - 1)] ^= change
    value: object = None
    with contextlib.suppress(WireError):
        value = decode(bytes(data))
    with contextlib.suppress(OverflowError):  # numpy 2.5 cannot print all of its dates
        repr(value)


def test_where_there_is_no_numpy_its_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode({"loss": np.float32(1)})
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(InvalidUsageError, match="the object of rank 3 holds values of numpy, and cannot be"):
        decode(data, source=3)
    assert decode(encode([1, (2.0,)])) == [1, (2.0,)]
    with pytest.raises(InvalidUsageError, match="type object"):
        encode(object())
