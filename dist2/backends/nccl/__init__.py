"""The GPU data plane: NCCL (or RCCL) through cupy, watched over the socket backend's links."""

from dist2.backends.nccl.create import create

__all__ = ["create"]
