"""torch's own c10d backends as dist2 backends. Now ``gloo``; one more is a `Library` and a factory."""

from dist2.backends.native.gloo import create_gloo

__all__ = ["create_gloo"]
