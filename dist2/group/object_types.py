"""Types of objects that travel by a name: those that users register, and some of Python and torch.

Both sides look the name up in this process's table: nothing is imported, and no code runs but the ``decode``
that was registered here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from datetime import timezone
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import torch

from dist2.errors import ArgumentTypeError, InvalidUsageError

T = TypeVar("T")

EXCEPTION = "exception"
"""The name of all exceptions, which travel as text."""


@attrs.frozen
class ObjectType:
    """A type that travels.

    Attributes:
        name: Its name in messages.
        encode: Returns an object that travels, in place of one of this type.
        decode: The reverse.
    """

    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


def register_type(
    cls: type[T],
    encode: Callable[[T], object] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Have objects of a class travel in the collectives of objects, without pickle; return the class.

    Every rank registers it, and knows it by its module and qualified name. Subclasses are other types. An
    enum, a named tuple and a dataclass need no functions: the first travels by its member's name (flags by
    their value), the others by their fields; ``@dist2.register_type`` above them suffices. A class that is
    defined and registered again replaces the one of its name.

    Args:
        cls: The class.
        encode: Returns an object that travels: plain data, tensors, other registered types.
        decode: Makes the object again. It gets what another rank has sent: it should check it, as members of
            a job may run another version of the program.

    Raises:
        InvalidUsageError: Only one of the functions is given, or none and ``cls`` is of no such kind.

    Examples:
        >>> class Interval:
        ...     def __init__(self, low, high):
        ...         self.low, self.high = low, high
        >>> dist2.register_type(Interval, lambda it: [it.low, it.high], lambda it: Interval(*it)) is Interval
        True
        >>> pg.broadcast_object(Interval(1, 2.5), root=0).high
        2.5
    """
    if not isinstance(cls, type):
        raise ArgumentTypeError(f"cls must be a class, got {cls!r} ({type(cls).__name__})")
    name = f"{cls.__module__}.{cls.__qualname__}"
    if (encode is None) != (decode is None):
        raise InvalidUsageError(f"encode is {encode!r} and decode is {decode!r}: give both, or neither")
    if encode is None or decode is None:
        _enter(cls, _derived(cls, name))
    else:
        _enter(cls, ObjectType(name, encode, decode))
    return cls


def type_of(obj: object) -> ObjectType | None:
    """Return the registered type of an object; None if it has none."""
    found = _by_class.get(type(obj))
    if found is None and isinstance(obj, BaseException):
        return _by_name[EXCEPTION]
    return found


def type_named(name: str) -> ObjectType | None:
    """Return the registered type of a name; None if there is none."""
    return _by_name.get(name)


def registered_in(module: str) -> list[tuple[type, ObjectType]]:
    """Return the types of a module that are registered, without those that others have replaced."""
    known = [(cls, made) for cls, made in _by_class.items() if _by_name[made.name] is made]
    return [(cls, made) for cls, made in known if cls.__module__ == module]


def register_all(types: list[tuple[type, ObjectType]]) -> None:
    """Register the types of another process, as `registered_in` returned them there."""
    for cls, made in types:
        _enter(cls, made)


def _derived(cls: Any, name: str) -> ObjectType:
    """Return the encoding of an enum, a named tuple or a dataclass."""
    if issubclass(cls, enum.Flag):  # combinations of flags are no members
        return ObjectType(name, lambda obj: obj.value, lambda value: cls(int(value)))
    if issubclass(cls, enum.Enum):
        return ObjectType(name, lambda obj: obj.name, lambda member: cls[member])
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return ObjectType(name, list, lambda values: cls(*values))
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls) if field.init]
        made: Any = cls
        return ObjectType(name, lambda obj: [getattr(obj, field) for field in fields], _made_of(made, fields))
    raise InvalidUsageError(
        f"cls {name} is no enum, named tuple or dataclass: give encode and decode, functions from it to an "
        f"object that travels, and back"
    )


def _made_of(cls: Callable[..., object], fields: list[str]) -> Callable[[Any], object]:
    return lambda values: cls(**dict(zip(fields, values, strict=True)))


def _enter(cls: type, made: ObjectType) -> None:
    _by_class[cls] = made
    _by_name[made.name] = made


def _offset_and_name(zone: Any) -> list[object]:
    return list(zone.__getinitargs__())


def _key_of(zone: ZoneInfo) -> str:
    if zone.key is None:
        raise TypeError("a ZoneInfo without a key: it was read from a file")
    return zone.key


def _state_of(generator: torch.Generator) -> torch.Tensor:
    if generator.device.type != "cpu":
        raise TypeError(f"a torch.Generator on {generator.device}")
    return generator.get_state()


def _generator(state: object) -> torch.Generator:
    if not isinstance(state, torch.Tensor):
        raise TypeError("the state of a torch.Generator must be a tensor")
    return torch.Generator().set_state(state)


def _parameter(items: Any) -> torch.nn.Parameter:
    tensor, requires_grad = items
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("the data of a torch.nn.Parameter must be a tensor")
    return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))


_by_class: dict[type, ObjectType] = {}
_by_name: dict[str, ObjectType] = {
    EXCEPTION: ObjectType(EXCEPTION, lambda error: f"{type(error).__qualname__}: {error}", RuntimeError)
}
_enter(slice, ObjectType("slice", lambda obj: [obj.start, obj.stop, obj.step], lambda items: slice(*items)))
_enter(range, ObjectType("range", lambda obj: [obj.start, obj.stop, obj.step], lambda items: range(*items)))
_enter(Decimal, ObjectType("Decimal", str, Decimal))
_enter(UUID, ObjectType("UUID", lambda obj: obj.bytes, lambda data: UUID(bytes=data)))
_enter(timezone, ObjectType("timezone", _offset_and_name, lambda items: timezone(*items)))
_enter(ZoneInfo, ObjectType("ZoneInfo", _key_of, ZoneInfo))
_enter(torch.Generator, ObjectType("torch.Generator", _state_of, _generator))
_enter(
    torch.nn.Parameter,
    ObjectType("torch.nn.Parameter", lambda obj: [obj.detach(), obj.requires_grad], _parameter),
)
