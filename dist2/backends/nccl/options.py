"""The options of the NCCL backend: the keyword arguments that `new_group` passes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from dist2.backends.nccl.device import Device
from dist2.backends.nccl.library import Library
from dist2.backends.socket.controlled import CONTROL_OPTIONS
from dist2.errors import InvalidUsageError, UnknownOptionError


@attrs.frozen(eq=False)
class NcclOptions:
    """Checked options, equal on all ranks.

    Attributes:
        blocking: Synchronous operations return when the device has done them, and raise their errors.
            By default they return when they are enqueued, as torch's do, and the next call raises.
        strict: Before a collective is launched, neighbours compare their calls: a mismatch raises before
            anything moves, at the price of a message on the control links each time.
        eager: Communicators are made with the group; else with its first operation on the device.
        timing: Asynchronous operations measure their time on the device.
        platform: For tests: returns replacements for the device and the library.
        control: Options of the socket backend that carries control messages and CPU tensors.
    """

    blocking: bool = False
    strict: bool = False
    eager: bool = True
    timing: bool = False
    platform: Callable[[], tuple[Device, Library]] | None = None
    control: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> NcclOptions:
        """Check the keyword arguments of `new_group`.

        Raises:
            UnknownOptionError: There is no such option.
            InvalidUsageError: An option has a value that it cannot have.
        """
        own = [field.name for field in attrs.fields(cls) if field.name != "control"]
        for name, value in options.items():
            if name not in own and name not in CONTROL_OPTIONS:
                raise UnknownOptionError(
                    f"backend 'nccl' has no option {name!r}; it has {', '.join([*own, *CONTROL_OPTIONS])}"
                )
            if name in ("blocking", "strict", "eager", "timing") and not isinstance(value, bool):
                raise InvalidUsageError(f"{name} must be a bool, got {value!r} ({type(value).__name__})")
        given: dict[str, Any] = {name: value for name, value in options.items() if name in own}
        return cls(
            **given, control={name: value for name, value in options.items() if name in CONTROL_OPTIONS}
        )
