"""Objects as bytes, safely: decoding can only make plain data and tensors.

MessagePack carries None, bool, int, float, str, bytes, list and dict; the other types travel as extensions:
tuples, sets, big integers, complex numbers, times, paths, argparse's namespaces, the dicts of `collections`,
dense CPU tensors, devices, and numpy's scalars, arrays and dtypes.
Types of users and some of Python's travel as a name and an object that stands for them: `object_types`.
A `bytearray` or a `memoryview` arrives as bytes, and an object that is held twice as two.
Decoding runs nothing that the bytes name. Objects of other types travel pickled, where both sides allow it.
The first byte tells plain data from pickled, and from a refusal: the sender could not encode its object.

dist2 does not depend on numpy: it is imported only when a value of it is encoded or decoded. A value travels
as its bytes and the name of its dtype. Only dtypes that hold numbers or times are accepted: no objects, no
fields, and nothing that numpy would have to unpickle.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import re
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import PosixPath
from typing import Any

import attrs
import msgpack
import torch

from dist2.errors import InvalidUsageError, WireError
from dist2.group.object_types import EXCEPTION, type_named, type_of
from dist2.operation.storage import lacks_memory
from dist2.runtime.rank_names import RANKS, RankNames

PLAIN, PICKLED, REFUSED = 0, 1, 2
MAX_DEPTH = 32
"""Tuples, sets and tensors inside each other; lists and dicts may nest deeper."""
_MAX_DIMENSIONS = 64
_MAX_INTEGER_BYTES = 1 << 20
_SHOWN = 200

_ALL_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.complex64, torch.complex128),
    )
}
"""Those of tensors that travel."""


_PICKLE = "allow_pickle=True on all of them (of dist2.legacy, DIST2_ALLOW_PICKLE=1)"


def encode(obj: object, *, allow_pickle: bool = False) -> bytes:
    """Return the bytes of an object.

    Args:
        obj: Plain data, tensors and numpy's values. Tensors travel by value, detached from autograd's graph.
        allow_pickle: Pickle an object that holds anything else, or an exception: its text alone is safe.

    Raises:
        InvalidUsageError: It holds something of another type; says which, and where.
    """
    try:
        return bytes([PLAIN]) + _Coder(as_text=not allow_pickle).pack(obj)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if allow_pickle:
            return bytes([PICKLED]) + _pickled(obj)
        where, what = _culprit(obj)
        raise InvalidUsageError(
            f"{where} cannot travel safely: {what}. Objects travel as plain data, dense CPU tensors and "
            f"numpy's numbers, and other types by dist2.register_type; where all ranks trust each other, "
            f"{_PICKLE} would pickle it"
        ) from error


def _pickled(obj: object) -> bytes:
    try:
        return pickle.dumps(obj)
    except MemoryError:
        raise
    except Exception as error:  # a user's `__reduce__` may raise anything
        raise InvalidUsageError(f"obj cannot be pickled: {error!r}") from error


def _unpickled(content: bytes, whose: str) -> Any:
    try:
        return pickle.loads(content)
    except MemoryError:
        raise
    except Exception as error:  # a class may be missing here, and a user's functions may raise anything
        raise InvalidUsageError(f"{whose} cannot be unpickled here: {error!r}") from error


def refusal(error: Exception) -> bytes:
    """Return the message that replaces an object that cannot be encoded: the others must not wait for it."""
    return bytes([REFUSED]) + str(error).encode()


def decode(
    data: bytes, *, allow_pickle: bool = False, source: int | None = None, names: RankNames = RANKS
) -> Any:
    """Return the object that was encoded.

    Args:
        data: A result of `encode`, on any rank.
        allow_pickle: Unpickle pickled objects: this executes code that the sender chose.
        source: Rank that sent it, for errors.
        names: Names it.

    Raises:
        InvalidUsageError: It is pickled and ``allow_pickle`` is False or it cannot be unpickled here, its
            sender could not encode it, or it needs numpy, which is not installed here.
        WireError: The bytes are malformed.
    """
    whose = "the object" if source is None else f"the object of {names([source])}"
    kind, content = data[:1], data[1:]
    if kind == bytes([REFUSED]):
        raise InvalidUsageError(f"{whose} was not sent: {content.decode(errors='replace')}")
    if kind == bytes([PICKLED]):
        if not allow_pickle:
            raise InvalidUsageError(f"{whose} was pickled: {_PICKLE} would unpickle it")
        return _unpickled(content, whose)
    if kind != bytes([PLAIN]):
        raise WireError(f"{whose} has an unknown first byte: {kind.hex() or 'it is empty'}")
    try:
        return _Coder().unpack(content)
    except _UnknownTypeError as error:
        raise InvalidUsageError(
            f"{whose} holds a value of type {error}, which is not registered here: every rank calls "
            f"dist2.register_type for it"
        ) from error
    except ImportError as error:
        raise InvalidUsageError(f"{whose} holds values of numpy, and cannot be decoded: {error}") from error
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        struct.error,
        msgpack.UnpackException,
    ) as error:
        raise WireError(f"{whose} cannot be decoded: {error or type(error).__name__}") from error


# Extensions


@attrs.frozen
class _Extension:
    """The encoding of a type that MessagePack lacks.

    Attributes:
        code: Its number.
        dump: Returns its bytes, or a list of its parts.
        load: The reverse.
    """

    code: int
    dump: Callable[[Any], bytes | list[Any]]
    load: Callable[[Any], object]


class _Coder:
    """Packs and unpacks one object. Extensions nest, and each level costs MessagePack much of the stack.

    Args:
        as_text: Whether it packs exceptions, as their text.
    """

    def __init__(self, *, as_text: bool = True) -> None:
        self._depth = 0
        self._as_text = as_text

    def pack(self, obj: object) -> bytes:
        packed: bytes = msgpack.packb(obj, default=self._dump, strict_types=True)
        return packed

    def unpack(self, data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=self._load, strict_map_key=False)

    def _dump(self, obj: object) -> msgpack.ExtType:
        extension = _BY_TYPE.get(type(obj)) or (_NUMPY if _is_numpy_value(obj) else None)
        if extension is None:
            named = type_of(obj)
            if named is None or (named.name == EXCEPTION and not self._as_text):
                raise TypeError(f"type {type(obj).__qualname__}")
            extension = _NAMED
        content = extension.dump(obj)
        if isinstance(content, list):
            with self._one_deeper():
                content = self.pack(content)
        return msgpack.ExtType(extension.code, content)

    def _load(self, code: int, data: bytes) -> object:
        extension = _BY_CODE.get(code)
        if extension is None:
            raise ValueError(f"extension {code}")
        if extension.code in _SCALARS:
            return extension.load(data)
        with self._one_deeper():
            content = self.unpack(data)
        if not isinstance(content, list):
            raise ValueError(f"extension {code} without a list")
        return extension.load(content)

    @contextmanager
    def _one_deeper(self) -> Iterator[None]:
        if self._depth == MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} tuples, sets and tensors inside each other")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _dump_integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    if size > _MAX_INTEGER_BYTES:
        raise ValueError(f"an integer of {size} bytes")
    return value.to_bytes(size, "little", signed=True)


def _load_integer(data: bytes) -> int:
    return int.from_bytes(data[:_MAX_INTEGER_BYTES], "little", signed=True)


def _dump_tensor(tensor: torch.Tensor) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or name not in DTYPES:
        raise TypeError(f"a tensor that is {tensor.layout}, {tensor.dtype}, on {tensor.device}")
    if lacks_memory(tensor):
        raise TypeError(
            "a tensor without memory: its storage was freed, or it exists only inside a transform"
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Straight from memory: torch needs numpy for anything else, and dist2 does not depend on it.
    content = ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""
    return [name, list(tensor.shape), content]


def _load_tensor(items: list[Any]) -> torch.Tensor:
    name, shape, content = items
    dtype = _load_dtype(DTYPES, name)
    if not isinstance(content, bytes) or not isinstance(shape, list):
        raise ValueError("not a tensor")
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise ValueError(f"a tensor of shape {str(shape)[:_SHOWN]}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for a tensor of shape {shape}, {dtype}")
    flat = (
        torch.frombuffer(bytearray(content), dtype=dtype)
        if content
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.reshape(shape)


def _load_dtype(known: Mapping[str, torch.dtype], name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"no dtype: {str(name)[:_SHOWN]!r}")
    return known[name]


# Dicts, namespaces, times and devices

_FACTORIES = {each.__name__: each for each in (bool, int, float, complex, str, bytes, list, tuple, set, dict)}
"""The ``default_factory`` that may travel, by name: types that make an empty value."""


def _dump_pairs(mapping: dict[Any, Any]) -> list[Any]:
    return [list(pair) for pair in mapping.items()]


def _dump_default_dict(mapping: defaultdict[Any, Any]) -> list[Any]:
    factory: Any = mapping.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise TypeError(f"a defaultdict of {factory!r}")
    return [factory and factory.__name__, _dump_pairs(mapping)]


def _load_default_dict(items: list[Any]) -> defaultdict[Any, Any]:
    name, pairs = items
    if name is not None and name not in _FACTORIES:
        raise ValueError(f"no default_factory that travels: {str(name)[:_SHOWN]!r}")
    return defaultdict(name and _FACTORIES[name], pairs)


def _load_namespace(items: list[Any]) -> Namespace:
    (attributes,) = items
    return Namespace(**attributes)


def _load_datetime(items: list[Any]) -> datetime:
    text, fold, zone = items
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _load_device(data: bytes) -> torch.device:
    try:
        return torch.device(data.decode())
    except RuntimeError as error:
        raise ValueError(f"no device: {data[:_SHOWN]!r}") from error


# numpy's scalars, arrays and dtypes

_UNIT = r"(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)"
_NUMPY_DTYPE = re.compile(rf"\|(?:b1|[iu]1)|[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:\[{_UNIT}\])?)")
"""Names of those dtypes in numpy: byte order, kind, bytes, and the unit of times."""
_NUMPY_TEXT, _NUMPY_BYTES = "U", "S"


def _is_numpy_value(obj: object) -> bool:
    """Whether an object is a scalar, an array or a dtype of numpy itself, not of a type made from those."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(obj, numpy.generic):
        return type(obj) is obj.dtype.type
    return type(obj) is numpy.ndarray or isinstance(obj, numpy.dtype)


def _dump_numpy(obj: Any) -> list[Any]:
    """Return plain data that stands for a value.

    A dtype is its name, a scalar its dtype's and its bytes, an array has its shape between the two.

    Args:
        obj: An object for which `_is_numpy_value` is true.

    Raises:
        TypeError: It is of a dtype that does not travel: objects, fields, texts in arrays, long doubles.
    """
    numpy = sys.modules["numpy"]
    if isinstance(obj, numpy.dtype):
        return [_dtype_name(obj, "the numpy dtype")]
    if isinstance(obj, numpy.str_):
        return [_NUMPY_TEXT, str(obj)]
    if isinstance(obj, numpy.bytes_):
        return [_NUMPY_BYTES, bytes(obj)]
    if isinstance(obj, numpy.generic):
        return [_dtype_name(obj.dtype, "a numpy scalar of dtype"), obj.tobytes()]
    return [_dtype_name(obj.dtype, "a numpy array of dtype"), list(obj.shape), obj.tobytes()]


def _load_numpy(items: list[Any]) -> object:
    """Return the value that plain data stands for; arrays own their memory and are contiguous.

    Raises:
        ImportError: There is no numpy here.
        ValueError: It stands for none.
    """
    numpy: Any = import_module("numpy")
    match items:
        case [str(name)]:
            return _numpy_dtype(numpy, name)
        case [str(name), str(content)] if name == _NUMPY_TEXT:
            return numpy.str_(content)
        case [str(name), bytes(content)] if name == _NUMPY_BYTES:
            return numpy.bytes_(content)
        case [str(name), bytes(content)]:
            return _numpy_array(numpy, _numpy_dtype(numpy, name), (), content)[()]
        case [str(name), list(shape), bytes(content)]:
            return _numpy_array(numpy, _numpy_dtype(numpy, name), tuple(shape), content)
    raise ValueError("not a value of numpy's")


def _dtype_name(dtype: Any, what: str) -> str:
    name: str = dtype.str
    # Metadata may be any object, and fields and objects have names that do not match.
    if _NUMPY_DTYPE.fullmatch(name) is None or dtype.metadata is not None:
        raise TypeError(f"{what} {dtype}")
    return name


def _numpy_dtype(numpy: Any, name: str) -> Any:
    if _NUMPY_DTYPE.fullmatch(name) is None:  # numpy would take much more for one, objects among it
        raise ValueError(f"no dtype of numpy's that travels: {name[:_SHOWN]!r}")
    return numpy.dtype(name)


def _numpy_array(numpy: Any, dtype: Any, shape: tuple[Any, ...], content: bytes) -> Any:
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise ValueError(f"an array of shape {str(shape)[:_SHOWN]}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for an array of shape {str(shape)[:_SHOWN]}, {dtype}")
    flat = numpy.frombuffer(bytearray(content), dtype=dtype)
    if dtype.kind == "b":  # a mask is counted by adding its bytes: others than 0 and 1 would corrupt memory
        flat = flat.view(numpy.uint8) != 0
    return flat.reshape(shape)


# Types that travel by a name


class _UnknownTypeError(Exception):
    """The name of a type that is not registered here."""


def _dump_named(obj: object) -> list[Any]:
    found = type_of(obj)
    assert found is not None
    try:
        return [found.name, found.encode(obj)]
    except Exception as error:  # a user's function may raise anything
        raise TypeError(f"encode of type {found.name} raised {error!r}") from error


def _load_named(items: list[Any]) -> object:
    name, content = items
    found = type_named(name) if isinstance(name, str) else None
    if found is None:
        raise _UnknownTypeError(str(name)[:_SHOWN])
    try:
        return found.decode(content)
    except Exception as error:  # likewise
        raise ValueError(f"decode of type {found.name} raised {error!r}") from error


# The table of extensions

_BY_TYPE: dict[type, _Extension] = {
    torch.Tensor: _Extension(0, _dump_tensor, _load_tensor),
    tuple: _Extension(1, list, tuple),
    set: _Extension(2, list, set),
    frozenset: _Extension(3, list, frozenset),
    OrderedDict: _Extension(4, _dump_pairs, OrderedDict),
    torch.Size: _Extension(5, list, torch.Size),
    torch.dtype: _Extension(
        6, lambda obj: [str(obj).removeprefix("torch.")], lambda items: _load_dtype(_ALL_DTYPES, *items)
    ),
    timedelta: _Extension(
        7, lambda obj: [obj.days, obj.seconds, obj.microseconds], lambda items: timedelta(*items)
    ),
    defaultdict: _Extension(9, _dump_default_dict, _load_default_dict),
    Counter: _Extension(10, _dump_pairs, lambda items: Counter(dict(items))),
    Namespace: _Extension(11, lambda obj: [vars(obj)], _load_namespace),
    datetime: _Extension(
        13, lambda obj: [obj.replace(tzinfo=None).isoformat(), obj.fold, obj.tzinfo], _load_datetime
    ),
    int: _Extension(16, _dump_integer, _load_integer),
    complex: _Extension(
        17,
        lambda obj: struct.pack("<dd", obj.real, obj.imag),
        lambda data: complex(*struct.unpack("<dd", data)),
    ),
    torch.device: _Extension(19, lambda obj: str(obj).encode(), _load_device),
    PosixPath: _Extension(20, os.fsencode, lambda data: PosixPath(os.fsdecode(data))),
}
_NUMPY = _Extension(8, _dump_numpy, _load_numpy)
_NAMED = _Extension(12, _dump_named, _load_named)
_BY_CODE = {extension.code: extension for extension in (*_BY_TYPE.values(), _NUMPY, _NAMED)}
_SCALARS = frozenset(range(16, 32))
"""Codes of those that are bytes; the others are packed lists."""


# The part of an object that cannot be encoded


def _culprit(obj: object) -> tuple[str, str]:
    """Return where in an object the first part is that cannot be encoded, and why."""
    where, children = "obj", list(_children(obj))
    while True:
        for step, child in children:
            try:
                _Coder().pack(child)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                where, obj, children = where + step, child, list(_children(child))
                break
        else:
            break
        if len(where) > _SHOWN:  # it holds itself
            return where, "it is nested too deeply"
    try:
        _Coder().pack(obj)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return where, str(error)
    return where, "it is too large or nested too deeply"


def _children(obj: object) -> Iterator[tuple[str, object]]:
    if type(obj) in (list, tuple, set, frozenset):  # which does not narrow the type for mypy
        yield from ((f"[{index}]", child) for index, child in enumerate(obj))  # type: ignore[arg-type, var-annotated]  # a list or tuple
    elif isinstance(obj, dict) and type(obj) in (dict, OrderedDict, defaultdict, Counter):
        yield from ((f"[{key!r}]", child) for key, child in obj.items())
        yield from ((f" key {key!r}", key) for key in obj)
    elif type(obj) is Namespace:
        yield from ((f".{name}", child) for name, child in vars(obj).items())
