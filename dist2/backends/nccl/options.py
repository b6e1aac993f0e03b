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
        is_high_priority_stream: Asynchronous operations run on streams of high priority.
        min_ctas: The least number of blocks of a kernel of NCCL; None leaves it to NCCL, here as below.
        max_ctas: The greatest.
        cga_cluster_size: Size of the clusters of these blocks.
        net_name: The plugin or module for the network, as ``"Socket"`` or ``"IB"``.
        split_share: 1: communicators made from another one share its resources.
        platform: For tests: returns replacements for the device and the library.
        control: Options of the socket backend that carries control messages and CPU tensors.
    """

    blocking: bool = False
    strict: bool = False
    eager: bool = True
    timing: bool = False
    is_high_priority_stream: bool = False
    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None
    split_share: int | None = None
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
            _check(name, value)
        given: dict[str, Any] = {name: value for name, value in options.items() if name in own}
        return cls(
            **given, control={name: value for name, value in options.items() if name in CONTROL_OPTIONS}
        )

    @property
    def config(self) -> dict[str, int | str]:
        """The settings of communicators that are not left to NCCL."""
        return {name: getattr(self, name) for name in _OF_COMMUNICATORS if getattr(self, name) is not None}


_SWITCHES = ("blocking", "strict", "eager", "timing", "is_high_priority_stream")
_NUMBERS = ("min_ctas", "max_ctas", "cga_cluster_size", "split_share")
_OF_COMMUNICATORS = (*_NUMBERS, "net_name")


def _check(name: str, value: object) -> None:
    if name in _SWITCHES and not isinstance(value, bool):
        raise InvalidUsageError(f"{name} must be a bool, got {value!r} ({type(value).__name__})")
    if name in _NUMBERS and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidUsageError(f"{name} must be an int that is not negative, got {value!r}")
    if name == "net_name" and not (isinstance(value, str) and value):
        raise InvalidUsageError(f"net_name must be a text that is not empty, got {value!r}")
