"""The options of the socket backend: the keyword arguments that `new_group` passes on.

Type checkers read them in `dist2/group/options.py`. Groups of other backends pass those in `CONTROL_OPTIONS`
(`controlled`) on to their control group.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

import attrs

from dist2.backends.socket.transport.node import Node
from dist2.errors import InvalidUsageError, UnknownOptionError
from dist2.runtime.config import Config


class Transport(enum.Enum):
    """The way of bytes between members."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    INPROC = "inproc"


@attrs.frozen(eq=False)
class SocketOptions:
    """Checked options. Transport, algorithm and order are equal on all ranks.

    Attributes:
        transport: ``auto``: shared memory inside a host, TCP between hosts; ``shm``, ``tcp``: only that;
            ``inproc``: ranks are threads of this process.
        algorithm: Name of the algorithm for all collectives but barriers (see ``docs/algorithms.md``);
            operations without that algorithm raise. By default the fastest is chosen.
        deterministic: Whether inexact reductions combine in rank order (see ``docs/algorithms.md``).
        host: Address that the data listener binds; by default loopback, or that of the route to the store.
        tuning: File of measured constants; rank 0's counts. By default that of ``DIST2_TUNING``, if any.
        node: The `Node` to use; by default that of this rank in the process: see `NodePool`.
    """

    transport: Transport = Transport.AUTO
    algorithm: str | None = None
    deterministic: bool = True
    host: str | None = None
    tuning: str | None = None
    node: Node | None = None

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one host share memory."""
        return self.transport in (Transport.AUTO, Transport.SHM)

    @property
    def alike(self) -> dict[str, str]:
        """The options that must be equal on all ranks, as text."""
        return {
            "transport": repr(self.transport.value),
            "algorithm": repr(self.algorithm),
            "deterministic": repr(self.deterministic),
        }

    @classmethod
    def parse(cls, options: Mapping[str, object], config: Config) -> SocketOptions:
        """Check the keyword arguments of `new_group`.

        Raises:
            UnknownOptionError: There is no such option.
            InvalidUsageError: An option has a value that it cannot have.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOptionError(
                    f"backend 'socket' has no option {name!r}; it has {', '.join(known)}"
                )
        return cls(
            transport=_transport(options.get("transport", config.transport)),
            algorithm=_checked(options, "algorithm", str, None),
            deterministic=bool(_checked(options, "deterministic", bool, True)),
            host=_checked(options, "host", str, config.host),
            tuning=_checked(options, "tuning", str, config.tuning),
            node=_checked(options, "node", Node, None),
        )


def _transport(value: object) -> Transport:
    if isinstance(value, Transport):
        return value
    names = [transport.value for transport in Transport]
    if value not in names:
        raise InvalidUsageError(f"transport must be one of {', '.join(names)}; got {value!r}")
    return Transport(value)


_Kind = TypeVar("_Kind")


def _checked(
    options: Mapping[str, object], name: str, kind: type[_Kind], default: _Kind | None
) -> _Kind | None:
    value = options.get(name, default)
    if value is not None and not isinstance(value, kind):
        raise InvalidUsageError(f"{name} must be a {kind.__name__}, got {value!r} ({type(value).__name__})")
    return value
