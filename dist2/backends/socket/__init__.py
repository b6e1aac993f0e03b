"""The CPU data plane: shared memory inside a host, TCP between hosts."""

from dist2.backends.socket.create import create

__all__ = ["create"]
