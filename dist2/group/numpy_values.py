"""numpy's scalars, arrays and dtypes as plain data: for `serialization`, which carries plain data.

dist2 does not depend on numpy: it is imported only when a value of it is encoded or decoded. A value travels
as its bytes and the name of its dtype. Only dtypes that hold numbers or times are accepted: no objects, no
fields, and nothing that numpy would have to unpickle.
"""

from __future__ import annotations

import math
import re
import sys
from importlib import import_module
from typing import Any

_UNIT = r"(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)"
_DTYPE = re.compile(rf"\|(?:b1|[iu]1)|[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:\[{_UNIT}\])?)")
"""Names of those dtypes in numpy: byte order, kind, bytes, and the unit of times."""
_TEXT, _BYTES = "U", "S"
_SHOWN = 200


def is_numpy_value(obj: object) -> bool:
    """Whether an object is a scalar, an array or a dtype of numpy itself, not of a type made from those."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(obj, numpy.generic):
        return type(obj) is obj.dtype.type
    return type(obj) is numpy.ndarray or isinstance(obj, numpy.dtype)


def dump(obj: Any) -> list[Any]:
    """Return plain data that stands for a value.

    A dtype is its name, a scalar its dtype's and its bytes, an array has its shape between the two.

    Args:
        obj: An object for which `is_numpy_value` is true.

    Raises:
        TypeError: It is of a dtype that does not travel: objects, fields, texts in arrays, long doubles.
    """
    numpy = sys.modules["numpy"]
    if isinstance(obj, numpy.dtype):
        return [_name(obj, "the numpy dtype")]
    if isinstance(obj, numpy.str_):
        return [_TEXT, str(obj)]
    if isinstance(obj, numpy.bytes_):
        return [_BYTES, bytes(obj)]
    if isinstance(obj, numpy.generic):
        return [_name(obj.dtype, "a numpy scalar of dtype"), obj.tobytes()]
    return [_name(obj.dtype, "a numpy array of dtype"), list(obj.shape), obj.tobytes()]


def load(items: list[Any]) -> object:
    """Return the value that plain data stands for; arrays own their memory and are contiguous.

    Raises:
        ImportError: There is no numpy here.
        ValueError: It stands for none.
    """
    numpy: Any = import_module("numpy")
    match items:
        case [str(name)]:
            return _dtype(numpy, name)
        case [str(name), str(content)] if name == _TEXT:
            return numpy.str_(content)
        case [str(name), bytes(content)] if name == _BYTES:
            return numpy.bytes_(content)
        case [str(name), bytes(content)]:
            return _array(numpy, _dtype(numpy, name), (), content)[()]
        case [str(name), list(shape), bytes(content)]:
            return _array(numpy, _dtype(numpy, name), tuple(shape), content)
    raise ValueError("not a value of numpy's")


def _name(dtype: Any, what: str) -> str:
    name: str = dtype.str
    # Metadata may be any object, and fields and objects have names that do not match.
    if _DTYPE.fullmatch(name) is None or dtype.metadata is not None:
        raise TypeError(f"{what} {dtype}")
    return name


def _dtype(numpy: Any, name: str) -> Any:
    if _DTYPE.fullmatch(name) is None:  # numpy would take much more for one, objects among it
        raise ValueError(f"no dtype of numpy's that travels: {name[:_SHOWN]!r}")
    return numpy.dtype(name)


def _array(numpy: Any, dtype: Any, shape: tuple[Any, ...], content: bytes) -> Any:
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise ValueError(f"an array of shape {str(shape)[:_SHOWN]}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for an array of shape {str(shape)[:_SHOWN]}, {dtype}")
    flat = numpy.frombuffer(bytearray(content), dtype=dtype)
    if dtype.kind == "b":  # a mask is counted by adding its bytes: others than 0 and 1 would corrupt memory
        flat = flat.view(numpy.uint8) != 0
    return flat.reshape(shape)
