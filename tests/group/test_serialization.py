"""The safe encoding of objects: round trips, and untrusted bytes that create no other types."""

from __future__ import annotations

import contextlib
import pickle
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from io import BytesIO
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist2.errors import InvalidUsageError, WireError
from dist2.group.serialization import DTYPES, MAX_DEPTH, PICKLED, PLAIN, REFUSED, decode, encode, refusal

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes()
    | st.timedeltas()
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
plain: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(st.integers(), max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Whether two objects are equal, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.equal(right)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(one, other) for one, other in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(plain)
def test_plain_data_comes_back_as_it_was(obj: Any) -> None:
    assert same(decode(encode(obj)), obj)


@pytest.mark.parametrize(
    "obj",
    [
        Namespace(lr=0.1, device=torch.device("cuda", 3), out=Path("runs/1"), nested=Namespace()),
        Path("/data/\udcff"),  # a name that is not UTF-8
        Counter({"hits": 3, "rate": 0.5}),
        defaultdict(list, {"loss": [1.0, torch.ones(2).shape]}),
        defaultdict(None, {1: 2}),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_training_scripts_share_comes_back_as_it_was(obj: Any) -> None:
    found = decode(encode(obj))
    assert same(found, obj)
    assert getattr(found, "default_factory", None) is getattr(obj, "default_factory", None)


def test_times_keep_a_zone_of_the_database() -> None:
    if "Europe/Berlin" not in available_timezones():
        pytest.skip("this host has no time zones")
    moment = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    found = decode(encode(moment))
    assert found.isoformat() == moment.isoformat() == "2024-10-27T02:30:00+01:00"
    assert found.tzinfo is moment.tzinfo
    for key in ("Nowhere/None", "Europe", "../etc/localtime", 3, None):
        with pytest.raises(WireError, match="decode of type ZoneInfo raised"):
            decode(bytes([PLAIN]) + msgpack.packb(msgpack.ExtType(12, msgpack.packb(["ZoneInfo", key]))))
    content = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + bytes(6) + b"UTC\0"
    with pytest.raises(InvalidUsageError, match=r"obj\[0\] cannot travel safely: .*without a key"):
        encode([ZoneInfo.from_file(BytesIO(content))])


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2024, 10, 27, 2, 30, fold=1),
        datetime(2024, 7, 1, tzinfo=UTC),
        datetime(2024, 7, 1, 12, 0, 0, 5, timezone(timedelta(hours=2), "CEST")),
    ],
    ids=str,
)
def test_times_keep_their_zone(moment: datetime) -> None:
    found = decode(encode(moment))
    assert (found, found.fold, found.tzinfo, found.tzname()) == (
        moment,
        moment.fold,
        moment.tzinfo,
        moment.tzname(),
    )


def test_dtypes_travel_that_tensors_may_not_have() -> None:
    """A receiver would not know what the sender could not tell it."""
    every = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    assert decode(encode(every)) == every > set(DTYPES.values())
    for name in ("float31", "nn", ["float32"]):
        with pytest.raises(WireError, match="no dtype"):
            decode(bytes([PLAIN]) + msgpack.packb(msgpack.ExtType(6, msgpack.packb([name]))))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    found = decode(encode({"weight": tensor}))["weight"]
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, tensor.shape, True)
    assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_views_travel_by_value() -> None:
    whole = torch.arange(12.0).view(3, 4)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert same(
        decode(encode([whole.t(), whole[:, 1], conjugate])), [whole.t(), whole[:, 1], conjugate.clone()]
    )
    graph = torch.ones(2, requires_grad=True) * 3
    found = decode(encode(graph))
    assert found.tolist() == [3.0, 3.0]
    assert not found.requires_grad


def test_what_comes_can_be_written_to() -> None:
    found = decode(encode(torch.zeros(3)))
    found += 1
    assert found.tolist() == [1.0] * 3


class Custom:
    pass


class Nowhere(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(0)

    dst = utcoffset

    def tzname(self, moment: datetime | None) -> str:
        return "nowhere"


def without_memory(nbytes: int) -> torch.Tensor:
    """Return a tensor of four floats whose storage has been made smaller."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


Point = namedtuple("Point", "x")
endless: list[Any] = []
endless.append(endless)
deep: tuple[Any, ...] = ()
for _ in range(MAX_DEPTH + 1):
    deep = (deep,)


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        ({"a": [1, Custom()]}, r"obj\['a'\]\[1\] cannot travel safely: type Custom"),
        ({Custom: 1}, r"obj key <class .*Custom'> cannot"),
        (Namespace(a=[Custom()]), r"obj\.a\[0\] cannot travel safely: type Custom"),
        (Counter({Custom: 1}), r"obj key <class .*Custom'> cannot"),
        ([defaultdict(Custom)], r"obj\[0\] cannot travel safely: a defaultdict of .*Custom"),
        (defaultdict(list, a=Custom()), r"obj\['a'\] cannot travel safely: type Custom"),
        ((1, {2: {Point(3)}}), r"obj\[1\]\[2\]\[0\] cannot travel safely: type Point"),
        ([without_memory(0)], r"obj\[0\] cannot travel safely: a tensor without memory"),
        ([without_memory(8)], r"obj\[0\] cannot travel safely: a tensor without memory"),
        (torch.ones(2).to_sparse(), "obj cannot travel safely: a tensor that is torch.sparse_coo"),
        ([torch.ones(2, device="meta")], r"obj\[0\] cannot travel safely: a tensor .* on meta"),
        (torch.nn.Parameter(torch.ones(2).to_sparse()), "a tensor that is torch.sparse_coo"),
        (endless, "nested too deeply"),
        (deep, f"more than {MAX_DEPTH} tuples"),
        (1 << (1 << 24), "an integer of"),
        ([datetime(2024, 7, 1, tzinfo=Nowhere())], r"obj\[0\] cannot travel safely: type Nowhere"),
        (print, "type builtin_function_or_method"),
        ("\ud800", "surrogates"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_plain_is_refused_by_place(obj: Any, where: str) -> None:
    with pytest.raises(InvalidUsageError, match=where):
        encode(obj)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_torch_cannot_read_is_refused_by_place() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(InvalidUsageError, match=r"obj\[1\] cannot travel safely: .*Nested"):
        encode([1, nested])
    assert decode(encode(nested, allow_pickle=True), allow_pickle=True).unbind()[1].tolist() == [1.0] * 3


def test_the_deepest_that_may_be() -> None:
    inner = deep[0][0]
    assert same(decode(encode(inner)), inner)


def test_pickle_only_where_both_sides_say_so() -> None:
    data = encode(Point(3), allow_pickle=True)
    assert data[0] == PICKLED
    assert decode(data, allow_pickle=True) == Point(3)
    with pytest.raises(InvalidUsageError, match="the object of rank 4 was pickled"):
        decode(data, source=4)
    assert encode([1], allow_pickle=True)[0] == PLAIN  # objects that need no pickle are not pickled
    with pytest.raises(InvalidUsageError, match="cannot be pickled"):
        encode(lambda: 0, allow_pickle=True)


def test_exceptions_are_pickled_where_that_is_allowed() -> None:
    """Their text alone is what is left of them without."""
    data = encode([1, ValueError("x")], allow_pickle=True)
    assert data[0] == PICKLED
    (_, found) = decode(data, allow_pickle=True)
    assert (type(found), found.args) == (ValueError, ("x",))
    (_, found) = decode(encode([1, ValueError("x")]))
    assert (type(found), found.args) == (RuntimeError, ("ValueError: x",))


def test_a_refusal_says_why() -> None:
    data = refusal(ValueError("no way"))
    assert data[0] == REFUSED
    with pytest.raises(InvalidUsageError, match="the object of rank 2 was not sent: no way"):
        decode(data, source=2)


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


def test_nothing_of_a_pickle_runs() -> None:
    with pytest.raises(InvalidUsageError):
        decode(bytes([PICKLED]) + pickle.dumps(Bomb()))
    with pytest.raises(WireError):
        decode(bytes([PLAIN]) + pickle.dumps(Bomb()))


def extension(code: int, content: Any) -> bytes:
    return bytes([PLAIN]) + msgpack.packb(msgpack.ExtType(code, msgpack.packb(content)))


def nested(levels: int) -> bytes:
    data = b"\x90"
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    return bytes([PLAIN]) + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x07",
        bytes([PLAIN]),
        bytes([PLAIN]) + b"\x91" * 5000,
        bytes([PLAIN]) + b"\xdd" + struct.pack(">I", 2**32 - 1),
        bytes([PLAIN]) + b"\xc6" + struct.pack(">I", 2**31),
        bytes([PLAIN]) + b"\x90trailing",
        bytes([PLAIN]) + b"\x81\x80\x01",  # a dict as a key
        nested(MAX_DEPTH + 1),
        nested(5000),
        extension(99, []),
        extension(1, {"no": "list"}),
        extension(0, ["float32", [1 << 61, 1 << 61], b""]),
        extension(0, ["float32", [-1, -4], b"1234"]),
        extension(0, ["float32", [2], b"1234"]),
        extension(0, ["float32", [1] * 65, b"1234"]),
        extension(0, ["float32", [True], b"1234"]),
        extension(0, ["__class__", [1], b"1"]),
        extension(0, [["float32"], [1], b"1"]),
        extension(0, []),
        extension(6, ["no_such_type"]),
        extension(7, [2**60, 0, 0]),
        extension(9, ["eval", []]),
        extension(9, [["list"], []]),
        extension(9, ["list", [[1]]]),
        extension(11, [["a"]]),
        extension(11, [{1: 2}]),
        bytes([PLAIN]) + msgpack.packb(msgpack.ExtType(19, b"no device")),
    ],
    ids=lambda data: data[:12].hex() or "nothing",
)
def test_bytes_that_are_no_object(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(bytes([PLAIN]) + data)


@given(plain, st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_never_breaks_more_than_the_object(obj: Any, place: int, change: int) -> None:
    data = bytearray(encode([obj, torch.ones(2)]))
    data[1 + place % (len(data) - 1)] ^= change
    with contextlib.suppress(WireError):
        decode(bytes(data))
